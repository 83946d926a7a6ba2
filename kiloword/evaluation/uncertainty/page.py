"""The page of `kiloword eval uncertainty MODEL --html`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kiloword.evaluation.calibration import Bins, intervals
from kiloword.evaluation.task import Results
from kiloword.evaluation.uncertainty.data import QUANTILES, Levelled, buckets
from kiloword.evaluation.uncertainty.inclusion import InclusionAnswers
from kiloword.evaluation.uncertainty.shown import CertaintyPair, Plane
from kiloword.explain.plane import STDS, components, outline
from kiloword.report import (
    Html,
    bins,
    box_plot,
    card,
    distribution,
    grid,
    heading,
    line_plot,
    metric_table,
    page,
    percent,
    scatter,
    section,
    stack,
    table,
    tiles,
)
from kiloword.report.images import Pixels
from kiloword.report.page import Section
from kiloword.report.plots import FEW, Dots

PageData = Mapping[str, Any]
"""What `shown.drawn` returns."""

DOTS = 1500  # of a scatter plot, at most
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LINKS = 5  # of chains, whose histograms fit one plot
TAIL = 2  # percent of each end that the outermost bars of a histogram hold together
_KINDS = {"text": ("Captions", "recall@1"), "image": ("Images", "recall@1"), "zeroshot": ("Classes", "accuracy")}
_INTRO = (
    "Every image and every text is a Gaussian. Its uncertainty is the sum of its variances over all dimensions; its "
    "size means nothing by itself, its order should: the general is less certain than the specific, and what is less "
    "certain is wrong more often.\n\nH, the difference of two inclusions (arXiv:2410.18857, eq. 4), is positive where "
    "one Gaussian lies within another. Its sign mostly tells which of the two is wider."
)
_FIGURES = {
    "image_uncertainty_mean": "images, mean",
    "text_uncertainty_mean": "texts, mean",
    "text_above_image": "share of captions above their image",
    "text_uncertainty_words_spearman": "texts, with number of words",
    "text_uncertainty_level_spearman": "texts, with level",
    "truth_spearman": "texts, with images they are true of",
    "calibration_text_spearman": "texts, with recall@1 over bins",
    "calibration_image_spearman": "images, with recall@1 over bins",
    "calibration_zeroshot_spearman": "images, with zero-shot accuracy over bins",
}
_SPEARMAN = (
    "With: Spearman's correlation of uncertainty with that quantity. If a model is calibrated, the correlation with "
    "the number of images that a text is true of is positive, and the others are negative."
)


def report(results: Results, data: str, shown: Mapping[str, PageData]) -> str:
    """A page about several models: model -> what `run` yields, and what it shows."""
    short = metric_table(results, _FIGURES, form=".3g")
    sections: dict[str, list[str]] = {"In short": [short, _SPEARMAN]}
    for model, more in shown.items():
        for name, html in _sections(results[model], more):
            if html:
                sections.setdefault(name, []).extend([f"{model}:", html] if len(shown) > 1 else [html])
    return page("What is uncertain", f"On {data}. {_INTRO}", [section(h, *parts) for h, parts in sections.items()])


def _sections(values: Mapping[str, float], more: PageData) -> Iterator[Section]:
    """What is drawn of one model; sections without data are empty."""
    lengths = {name: more["different"][inside] for name, inside in buckets(more["words"])}
    texts: Levelled | None = more["levelled"]
    k_of = [] if texts is None else sorted(set(texts.level.tolist()))
    levels = {} if texts is None else {f"level {k}": texts.uncertainty[texts.level == k] for k in k_of}
    calibrated = (_calibration(values, name, bins) for name, bins in more["bins"].items())
    yield section("How uncertain images and texts are", *_spread(values, more))
    yield section("Uncertainty by length of the text", *_boxes(lengths, "words"))
    yield section(
        "Uncertainty by level, from general to specific", *_boxes(levels, "level of the text, 0 the most general")
    )
    yield section("Uncertainty by what a caption is true of", *_truth(values, more))
    yield section("Calibration: uncertainty and accuracy", grid(calibrated))
    yield section("Images within their captions", *_matched(values, more["matched"]))
    yield section("Specific texts within general ones", *_chains(values, more["answers"], more["exact"]))
    yield section("Most certain images", _images(more["certain"]))
    yield section("Most uncertain images", _images(more["uncertain"]))
    yield section("Most certain and most uncertain texts", *_texts(more))
    yield section("Pairs, by how certain image and text are", *_pairs(more["pairs"]))
    yield section("A few images and their captions in a plane", *_plane(more["plane"]))


def readable_unit(values: Tensor) -> tuple[float, str]:
    """A power of a thousand by which sums of variances are multiplied to be readable, and the label of their axis."""
    most = float(values.max())
    power = 0 if most <= 0 or 0.1 <= most < 1000 else 3 * math.floor(math.log10(most) / 3)
    unit = f" in 10{str(power).translate(_RAISED)}" if power else ""
    return 10.0**-power, f"sum of variances{unit}"


def bars(series: Mapping[str, Tensor], x_label: str, y_label: str) -> Iterator[str]:
    """Histograms whose outermost bars also hold the tails, as a note below them says."""
    low, high = np.percentile(torch.cat(list(series.values())).numpy(), (TAIL, 100 - TAIL))
    edges = bins([low, high], 30)
    inside = np.nextafter(edges[-1], edges[0])
    clipped = {name: values.numpy().clip(edges[0], inside) for name, values in series.items()}
    yield distribution(clipped, x_label, y_label, edges=edges, total=1)
    yield f"The outermost bars also hold what lies beyond, at most {TAIL}% of all on each side."


def _spread(values: Mapping[str, float], more: PageData) -> Iterator[str]:
    sides = {"images": more["image"], "texts": more["text"]}
    filled = {name: uncertainties for name, uncertainties in sides.items() if len(uncertainties)}
    scale, label = readable_unit(torch.cat(list(filled.values())))
    paired = "text_above_image" in values
    if paired:
        yield f"In {percent(values['text_above_image'])} of the pairs the text is less certain than its image."
    yield from bars({name: uncertainties * scale for name, uncertainties in filled.items()}, label, "share of each")
    if paired:
        pairs = torch.stack([more["own"], more["text"]], 1) * scale
        yield scatter({"pairs": _thinned(pairs)}, f"image: {label}", f"its text: {label}", faint=True)


def _thinned(points: Tensor) -> list[tuple[float, float]]:
    """At most DOTS of N points [N, 2], evenly."""
    step = -(-len(points) // DOTS)
    return [(x, y) for x, y in points[::step].tolist()]


def _boxes(groups: Mapping[str, Tensor], x_label: str) -> Iterator[str]:
    """A box for every group of texts, and in words what it is and how many texts each holds."""
    if groups:
        scale, label = readable_unit(torch.cat(list(groups.values())))
        boxes = {name: np.percentile((each * scale).numpy(), QUANTILES).tolist() for name, each in groups.items()}
        few = {name: (each * scale).tolist() for name, each in groups.items() if len(each) < FEW}
        yield box_plot(boxes, x_label, label, counts={name: len(each) for name, each in groups.items()}, few=few)
        yield (
            "A box holds the middle half, its line is the median, its whiskers reach from 5% to 95%; its width grows "
            f"with the root of the number n of texts. Fewer than {FEW} texts are dots."
        )


def _truth(values: Mapping[str, float], more: PageData) -> Iterator[str]:
    """Every caption by how many images it is true of, coloured by level."""
    count: Tensor | None = more["true_of"]
    if count is None or not bool((count > 0).any()):
        return
    scale, label = readable_unit(more["different"])
    texts: Levelled | None = more["levelled"]
    by_level = texts is not None and texts.captions
    level = texts.level if texts is not None and by_level else torch.zeros_like(count)
    points = torch.stack([count.double(), more["different"] * scale], 1)
    levels = sorted(set(level[count > 0].tolist()))
    rates = {"all": "truth_spearman"} | {f"level {k}": f"truth_spearman_level@{k}" for k in levels}
    if words := ", ".join(f"{name} {values[metric]:.2f}" for name, metric in rates.items() if metric in values):
        yield f"Spearman's correlation: {words}."
    series = {f"level {k}" if by_level else "captions": _thinned(points[(level == k) & (count > 0)]) for k in levels}
    yield scatter(series, "images that the caption is true of", label, log_x=True, faint=True)


def _calibration(values: Mapping[str, float], name: str, bins: Bins) -> Html:
    """A dot for every bin, from certain to uncertain."""
    what, y_label = _KINDS[name]
    scale, label = readable_unit(bins.uncertainty)
    points = list(zip((bins.uncertainty * scale).tolist(), bins.right.tolist(), strict=True))
    plot = line_plot({what: points}, label, y_label, spread={what: intervals(bins)})
    rates = {kind: values.get(f"calibration_{name}_{kind.lower()}") for kind in ("Pearson", "Spearman")}
    words = ", ".join(f"{kind} {rate:.2f}" for kind, rate in rates.items() if rate is not None)
    summary = f"{what} in {len(points)} bins of {int(bins.counts.min()):,} or more, with 95% intervals. {words}".strip()
    return Html(f"<div>{stack(summary, plot)}</div>")


def _matched(values: Mapping[str, float], h: Tensor | None) -> Iterator[str]:
    if h is not None:
        yield (
            f"{percent(values['image_in_text'])} of the captions include their image (H > 0), "
            f"{percent(values['text_in_image'])} lie within it: H the other way round is its negative."
        )
        yield from bars({"pairs": h}, "H(image in its caption)", "share of the pairs")


def _chains(values: Mapping[str, float], answers: Mapping[str, InclusionAnswers], exact: bool) -> Iterator[str]:
    """Histograms of H of the links of chains, and the rates of right answers."""
    if not answers:
        return
    links = [*[name for name in answers if name.startswith("chain_")][:LINKS], "unrelated"]
    drawn = {_link(name): answers[name].h for name in links if name in answers}
    yield from bars(drawn, "H(first in second)", "share of each")
    rows = [
        [
            _link(n),
            len(a.h),
            float(a.truth.double().mean()),
            *map(values.get, (f"inclusion_{n}", f"inclusion_{n}_overlap")),
        ]
        for n, a in answers.items()
    ]
    header = ["is the first in the second?", "pairs", "truly is", "right by H > 0", "right if they must overlap too"]
    yield table(rows, header, digits=3)
    summary = "" if exact else "Chains are taken as true, and all else as false. "
    if "inclusion_overlap" in values:
        summary += (
            f"Overlapping are texts whose distance is below {values['inclusion_overlap']:.3g}, by which most answers "
            "about half of the chains are right; the last column is about the other half."
        )
    yield summary


def _link(name: str) -> str:
    """ "chain_3_in_2" in words."""
    pairs = {"chain": "all of these", "reverse": "the other way round", "unrelated": "in another image's chain"}
    return pairs.get(name) or "level " + name.removeprefix("chain_").replace("_in_", " in ")


def _images(ranked: Sequence[tuple[Pixels, float]]) -> Html:
    return tiles([(image, f"{uncertainty:#.3g}") for image, uncertainty in ranked]) if ranked else Html()


def _texts(more: PageData) -> Iterator[str]:
    kinds = {"certain": "most certain", "uncertain": "most uncertain", "long": "of the longest tenth, most uncertain"}
    certain, uncertain, long = (
        table([[text, f"{value:#.3g}"] for text, value in more[f"{kind} texts"]], [name, "variance"])
        for kind, name in kinds.items()
    )
    yield grid([certain, uncertain])
    yield long


def _pairs(pairs: Mapping[str, Sequence[CertaintyPair]]) -> Iterator[str]:
    """Images with their captions, CSD and both uncertainties, by kind."""
    if pairs:
        yield (
            "CSD, the closed-form sampled distance (arXiv:2410.18857, eq. 1), is the expected squared distance of "
            "samples of both: the lower, the better they match; both variances are a part of it."
        )
    for kind, several in pairs.items():
        yield heading(kind)
        yield grid((_pair(one) for one in several), narrow=True)


def _pair(pair: CertaintyPair) -> Html:
    values = f"CSD {pair.distance:#.4g}, variance of the image {pair.image_uncertainty:#.3g}, of the text"
    return card([(pair.image, "")], [f"{values} {pair.text_uncertainty:#.3g}"], strong=pair.caption)


def _plane(plane: Plane | None) -> Iterator[str]:
    """Squares are images, dots captions, both with their ellipses."""
    if plane is None:
        return
    yield (
        f"Squares are images, dots their captions, ellipses {STDS} standard deviations wide and high to each side; "
        "the axes are the principal components of the means that are shown, and have a scale each."
    )
    series: dict[str, Dots] = {}
    for n, text, mean, spread in zip(plane.of, plane.texts, plane.means, plane.spread, strict=True):
        dots = series.setdefault(f"image {n + 1}", Dots([], [], []))
        (dots.squares if text is None else dots.dots).append((float(mean[0]), float(mean[1])))
        dots.outlines.append(outline(mean, spread))
    yield scatter(series, *components(plane.share))
    yield tiles([(image, f"image {n}") for n, image in enumerate(plane.images, start=1)], len(plane.images))
    captions = [[text, f"{n + 1}"] for text, n in zip(plane.texts, plane.of, strict=True) if text is not None]
    yield table(captions, ["caption", "of image"])
