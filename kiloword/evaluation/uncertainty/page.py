"""The page of `kiloword eval uncertainty MODEL --html`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kiloword.evaluation.calibration import Bins
from kiloword.evaluation.uncertainty.data import Levelled, buckets
from kiloword.evaluation.uncertainty.inclusion import InclusionAnswers
from kiloword.evaluation.uncertainty.shown import Plane
from kiloword.report import box_plot, grid, histogram, page, paragraph, scatter, table, tiles
from kiloword.report.distributions import bins
from kiloword.report.parts import Cell, percent
from kiloword.report.scatter import Dots, Ellipse

Values = Mapping[str, float]
Shown = Mapping[str, Any]

QUANTILES = (5, 25, 50, 75, 95)  # percent, of a box
DOTS = 1500  # of a scatter plot, at most
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LINKS = 5  # of chains, whose histograms fit one plot
TAIL = 2  # percent of each end that the outermost bars of a histogram hold together
STDS = 2  # of the ellipses
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


def report(results: Mapping[str, Values], data: str, shown: Mapping[str, Shown]) -> str:
    """A page about several models: model -> what `run` yields, and what it shows."""
    sections: dict[str, list[str]] = {"In short": [_figures(results)]}
    for model, more in shown.items():
        for heading, html in _sections(results[model], more):
            name = [paragraph(f"{model}:")] if len(shown) > 1 else []
            sections.setdefault(heading, []).extend([*name, html])
    return page("What is uncertain", f"On {data}. {_INTRO}", [(h, "".join(parts)) for h, parts in sections.items()])


def _figures(results: Mapping[str, Values]) -> str:
    """A row for every figure, a column for every model."""
    rows: list[list[Cell]] = []
    for name in _FIGURES:
        if any(name in values for values in results.values()):
            cells = [f"{values[name]:.3g}" if name in values else None for values in results.values()]
            rows.append([_FIGURES[name], *cells])
    note = paragraph(
        "With: Spearman's correlation of uncertainty with it. Where uncertainty is honest, that with the number of "
        "images that a text is true of is positive, and the others are negative."
    )
    return table(rows, ["", *results]) + note


def _sections(values: Values, more: Shown) -> Iterator[tuple[str, str]]:
    """Headings with what stands below them for one model; parts without data are omitted."""
    yield "How uncertain images and texts are", _spread(values, more)
    if len(more["words"]):
        yield "Uncertainty by length of the text", _lengths(more)
    rest = more["found"]
    if rest["levelled"] is not None:
        yield "Uncertainty by level, from general to specific", _levels(rest["levelled"])
    if rest["true_of"] is not None and bool((rest["true_of"] > 0).any()):
        yield "Uncertainty by what a caption is true of", _truth(values, more)
    if rest["bins"]:
        yield "Who is uncertain, and who is right", grid([_calibration(values, n, b) for n, b in rest["bins"].items()])
    if rest["matched"] is not None:
        yield "Images within their captions", _matched(values, rest["matched"])
    if rest["answers"]:
        yield "Specific texts within general ones", _chains(values, rest["answers"], rest["exact"])
    yield "Most certain images", _images(more["certain"])
    yield "Most uncertain images", _images(more["uncertain"])
    if len(more["words"]):
        yield "Most certain and most uncertain texts", _texts(more)
    if more["plane"] is not None:
        yield "A few images and their captions in a plane", _plane(more["plane"])


def _unit(values: Tensor) -> tuple[float, str]:
    """What sums of variances are multiplied by to be readable, a power of a thousand, and what their axis is called."""
    most = float(values.max())
    power = 0 if most <= 0 or 0.1 <= most < 1000 else 3 * math.floor(math.log10(most) / 3)
    unit = f" in 10{str(power).translate(_RAISED)}" if power else ""
    return 10.0**-power, f"sum of variances{unit}"


def _bars(series: Mapping[str, Tensor], x_label: str, y_label: str) -> str:
    """Histograms whose outermost bars also hold the tails, which is said below them."""
    every = np.concatenate([values.numpy() for values in series.values()])
    low, high = np.percentile(every, (TAIL, 100 - TAIL))
    edges = bins([low, high], 30)
    inside = np.nextafter(edges[-1], edges[0])
    shares = {
        name: (np.histogram(values.numpy().clip(edges[0], inside), edges)[0] / len(values)).tolist()
        for name, values in series.items()
    }
    note = paragraph(f"The outermost bars also hold what lies beyond, at most {TAIL}% of all on each side.")
    return histogram(shares, edges, x_label, y_label) + note


def _spread(values: Values, more: Shown) -> str:
    sides = {"images": more["image"], "texts": more["text"]}
    some = {name: uncertainties for name, uncertainties in sides.items() if len(uncertainties)}
    scale, label = _unit(torch.cat(list(some.values())))
    html = _bars({name: uncertainties * scale for name, uncertainties in some.items()}, label, "share of each")
    if "text_above_image" not in values:
        return html
    summary = f"In {percent(values['text_above_image'])} of the pairs the text is less certain than its image."
    pairs = torch.stack([more["own"], more["text"]], 1) * scale
    dots = scatter({"pairs": _some(pairs)}, f"image: {label}", f"its text: {label}", faint=True)
    return paragraph(summary) + html + dots


def _some(points: Tensor) -> list[tuple[float, float]]:
    """At most DOTS of N points [N, 2], evenly."""
    step = -(-len(points) // DOTS)
    return [(x, y) for x, y in points[::step].tolist()]


def _lengths(more: Shown) -> str:
    scale, label = _unit(more["different"])
    boxes = [(name, _five(more["different"][inside] * scale)) for name, inside in buckets(more["words"])]
    return _counted(boxes, [int(inside.sum()) for _, inside in buckets(more["words"])], "words", label)


def _levels(texts: Levelled) -> str:
    scale, label = _unit(texts.uncertainty)
    levels = sorted(set(texts.level.tolist()))
    boxes = [(f"level {k}", _five(texts.uncertainty[texts.level == k] * scale)) for k in levels]
    return _counted(
        boxes, [int((texts.level == k).sum()) for k in levels], "level of the text, 0 the most general", label
    )


def _five(values: Tensor) -> list[float]:
    percentiles: list[float] = np.percentile(values.numpy(), QUANTILES).tolist()
    return percentiles


def _counted(boxes: Sequence[tuple[str, list[float]]], counts: Sequence[int], x_label: str, y_label: str) -> str:
    """Boxes, and in words what they are and how many texts each holds."""
    each = ", ".join(f"{name}: {n:,}" for (name, _), n in zip(boxes, counts, strict=True))
    note = f"A box holds the middle half, its line is the median, its whiskers reach from 5% to 95%. Texts: {each}."
    return box_plot(boxes, x_label, y_label) + paragraph(note)


def _truth(values: Values, more: Shown) -> str:
    """Every caption by how many images it is true of, coloured by level."""
    count, uncertainties = more["found"]["true_of"], more["different"]
    scale, label = _unit(uncertainties)
    texts = more["found"]["levelled"]
    known = texts is not None and texts.captions
    level = texts.level if texts is not None and known else torch.zeros_like(count)
    points = torch.stack([count.double(), uncertainties * scale], 1)
    levels = sorted(set(level[count > 0].tolist()))
    series = {f"level {k}" if known else "captions": _some(points[(level == k) & (count > 0)]) for k in levels}
    rates = [f"level {k} {values[name]:.2f}" for k in levels if (name := f"truth_spearman_level@{k}") in values]
    pooled = [f"all {values['truth_spearman']:.2f}"] if "truth_spearman" in values else []
    summary = paragraph(f"Spearman's correlation: {', '.join([*pooled, *rates])}.") if pooled or rates else ""
    return summary + scatter(series, "images that the caption is true of", label, log_x=True, faint=True)


def _calibration(values: Values, name: str, bins: Bins) -> str:
    """A dot for every bin, from certain to uncertain."""
    what, y_label = _KINDS[name]
    scale, label = _unit(bins.uncertainty)
    points = list(zip((bins.uncertainty * scale).tolist(), bins.right.tolist(), strict=True))
    rates = [
        f"{kind.capitalize()} {values[key]:.2f}"
        for kind in ("pearson", "spearman")
        if (key := f"calibration_{name}_{kind}") in values
    ]
    summary = f"{what} in {len(points)} bins of {int(bins.counts.min()):,} or more. {', '.join(rates)}".strip()
    return f"<div>{paragraph(summary)}{scatter({what: points}, label, y_label, joined=True)}</div>"


def _matched(values: Values, h: Tensor) -> str:
    summary = (
        f"{percent(values['image_in_text'])} of the captions include their image (H > 0), "
        f"{percent(values['text_in_image'])} lie within it: H the other way round is its negative."
    )
    return paragraph(summary) + _bars({"pairs": h}, "H(image in its caption)", "share of the pairs")


def _chains(values: Values, answers: Mapping[str, InclusionAnswers], exact: bool) -> str:
    """Histograms of H of the links of chains, and the rates of right answers."""
    links = [name for name in answers if name.startswith("chain_")][:LINKS]
    some = {_link(name): answers[name].h for name in [*links, "unrelated"] if name in answers}
    rows: list[list[Cell]] = [
        [
            _link(n),
            len(a.h),
            float(a.truth.double().mean()),
            values[f"inclusion_{n}"],
            values.get(f"inclusion_{n}_overlap"),
        ]
        for n, a in answers.items()
    ]
    summary = "" if exact else "Chains are taken as true, and all else as false. "
    summary += (
        f"Overlapping are texts whose distance is below {values['inclusion_overlap']:.3g}, by which most answers about "
        "half of the chains are right; the last column is about the other half."
        if "inclusion_overlap" in values
        else ""
    )
    header = ["is the first in the second?", "pairs", "truly is", "right by H > 0", "right if they must overlap too"]
    return _bars(some, "H(first in second)", "share of each") + table(rows, header, digits=3) + paragraph(summary)


def _link(name: str) -> str:
    """ "chain_3_in_2" in words."""
    known = {"chain": "all of these", "reverse": "the other way round", "unrelated": "in another image's chain"}
    return known.get(name) or "level " + name.removeprefix("chain_").replace("_in_", " in ")


def _images(ranked: Sequence[tuple[Any, float]]) -> str:
    return tiles([(image, f"{uncertainty:#.3g}") for image, uncertainty in ranked])


def _texts(more: Shown) -> str:
    parts = []
    kinds = {"certain": "most certain", "uncertain": "most uncertain", "long": "of the longest tenth, most uncertain"}
    for kind, name in kinds.items():
        rows: list[list[Cell]] = [[text, f"{uncertainty:#.3g}"] for text, uncertainty in more[f"{kind} texts"]]
        parts.append(table(rows, [name, "variance"]))
    return grid(parts[:2]) + parts[2]


def _plane(plane: Plane) -> str:
    """Squares are images, dots captions, both with their ellipses."""
    series = {}
    for n in range(len(plane.images)):
        own = [i for i, of in enumerate(plane.of) if of == n]
        points = {i: (float(plane.means[i, 0]), float(plane.means[i, 1])) for i in own}
        series[f"image {n + 1}"] = Dots(
            [points[i] for i in own if plane.is_text[i]],
            [points[i] for i in own if not plane.is_text[i]],
            [_ellipse(plane.means[i], plane.spread[i]) for i in own],
        )
    summary = (
        f"Squares are images, dots their captions, ellipses {STDS} standard deviations wide and high to each side; "
        "the axes are the principal components of the means that are shown, and have a scale each."
    )
    x_label, y_label = (f"component {n + 1}, {percent(s)} of the variance" for n, s in enumerate(plane.share.tolist()))
    shown = tiles([(image, f"image {n}") for n, image in enumerate(plane.images, start=1)], len(plane.images))
    rows: list[list[Cell]] = [[text, f"{n + 1}"] for text, n in zip(plane.texts, plane.of, strict=True) if text]
    return paragraph(summary) + scatter(series, x_label, y_label) + shown + table(rows, ["caption", "of image"])


def _ellipse(mean: Tensor, spread: Tensor) -> Ellipse:
    """Where a Gaussian in the plane is STDS standard deviations from its mean [2]; covariance [2, 2]."""
    variance, axes = torch.linalg.eigh(spread)
    (a, b), (c, d) = (STDS * axes * variance.clamp_min(0).sqrt()).tolist()
    return Ellipse(float(mean[0]), float(mean[1]), a, b, c, d)
