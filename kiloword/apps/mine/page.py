"""HTML report of `kiloword mine`, from its results and a function that returns images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from kiloword import report
from kiloword.apps.mine import gallery
from kiloword.apps.mine.calibrate import DIGITS, FLOOR, NEARLY_SAME
from kiloword.apps.mine.corpus import Floats
from kiloword.apps.mine.images import Image, ReportImages, mined_pairs, term_rule, wide_captions
from kiloword.apps.mine.results import WHOLE, MiningResults, flags, terms, thresholds, warning
from kiloword.report import Html, distribution, duration, percent, section, table
from kiloword.report.plots import doubling

SHOWN = 15  # of the most frequent captions


def page(results: MiningResults, shown: ReportImages, image: Image) -> str:
    """The whole HTML document."""
    html = report.page(
        "Mined pairs",
        _intro(results),
        [
            section("In short", _short(results)),
            section("Mined pairs", *_mined(results)),
            section("Thresholds", *_thresholds(results)),
            section("Similarities", *_similarities(results)),
            section("Rank of the true caption", *_ranks(results)),
            section("Captions ranked above the image's own", *_above(results, shown, image)),
            section("Captions", *_captions(results)),
            section("Raw captions beside pseudo-captions", *_beside(results, shown, image)),
            section("Pairs that were mined", *mined_pairs(results, shown, image)),
            section("Captions that fit many images", *wide_captions(results, shown, image)),
        ],
    )
    return report.signed(html, report.made_by(data=results.data))


def _intro(results: MiningResults) -> str:
    corpus = results.corpus
    return (
        f"{results.data}: {len(corpus.keys):,} images with {len(corpus.captions):,} captions, with "
        f"features of {results.teacher}. Training treats every caption of another image as a negative, but many are "
        "true. This page shows which pairs the teacher would make positives, and by which term (FFF, "
        "arXiv:2405.10286).\n\n"
        f"All {results.mined.pairs:,} pairs of an image and a caption of another were compared in "
        f"{duration(results.seconds['search'])}; with calibration and analyses it took "
        f"{duration(sum(results.seconds.values()))}."
    )


def _short(results: MiningResults) -> Html:
    mined, whole = results.mined, terms(results.mined)[WHOLE]
    counts = mined.per_image.numpy()
    first = next(iter(results.groups.values())).ranks
    figures = [
        (f"{mined.mined.whole:,}", "pairs mined beside the annotated ones"),
        (_rounded(float(counts.mean())), "mined captions an image, on average"),
        (percent(float((counts > 0).mean())), "of images have a mined caption"),
        (percent(float(np.mean(first.captions <= 1))), f"of images have their own caption first of {first.batch:,}"),
    ]
    if mined.true is not None:
        judged = {"precision": "of the mined pairs are true", "recall": "of the true pairs were mined"}
        shares = {name: whole[name] for name in judged}
        figures[1:1] = [
            ("–" if share is None else percent(share), f"{judged[name]} ({name})") for name, share in shares.items()
        ]
    return report.headline(figures)


def _mined(results: MiningResults) -> Iterator[str]:
    mined = results.mined
    judged = ["precision", "recall"] if mined.true is not None else []
    rows = [
        [
            term_rule(name, results.settings),
            f"{row['mined']:,}",
            *(row[what] for what in judged),
            None if row["alone"] is None else f"{row['alone']:,}",
            f"{row['share_of_pairs']:.3%}",
            percent(float(row["annotated_accepted"] or 0)),
        ]
        for name, row in terms(mined).items()
    ]
    header = ["term", "mined", *judged, "by it alone", "of all pairs", "annotated accepted"]
    yield table(rows, header, strong=1, digits=3)
    if many := warning(mined):
        yield f"Warning: {many}"
    yield _words_of_mined(results)
    counts = mined.per_image.numpy()
    edges = doubling(int(counts.max()))
    yield distribution({"mined": counts}, "mined captions, at least", "% of images", edges=edges, total=100, even=True)


def _words_of_mined(results: MiningResults) -> str:
    mined = results.mined
    share = mined.mined.whole / max(mined.pairs, 1)
    captions = len(results.corpus.captions) / len(results.corpus.keys)
    text = (
        "S_it: cosine of image and caption; S_ii: of the image and the caption's image; S_tt: of the caption and "
        "the image's captions, on average. Annotated accepted: annotated pairs that the term accepts; "
        "S_ii of an image with itself is always 1. "
        f"In a random batch of {results.options.batch:,} images with all captions, an image has "
        f"{_rounded(share * (results.options.batch - 1) * captions)} mined captions beside its own. "
    )
    if mined.true is not None:
        text += (
            f"The data has ground truth: {mined.true:,} pairs ({percent(mined.true / max(mined.pairs, 1))}) are true "
            "without being annotated; precision and recall are exact. "
        )
    return text


def _thresholds(results: MiningResults) -> Iterator[str]:
    yield _words_of_thresholds(results)
    judged = ["precision", "recall"] if results.sample.true is not None else []
    mean = round(float(np.mean(results.corpus.annotated())), DIGITS)
    rows = [
        [
            f"{choice.p1:g}"
            + (" (used)" if choice.p1 == results.settings.p1 else " (mean)" if choice.p1 == mean else ""),
            percent(choice.annotated_above),
            f"{choice.random_above:.3%}",
            _rounded(choice.mined_per_image),
            *(getattr(choice, name) for name in judged),
        ]
        for choice in results.choices
    ]
    header = ["p1", "annotated above", "random above", "mined an image", *judged]
    caption = "Other values of p1, the rest of eq. 2 as it is; from random pairs"
    yield table(rows, header, caption=caption, digits=3)
    yield "To train with them:"
    yield report.code(
        f"kiloword train fff {flags(results.settings)}\n"
        f"kiloword train siglip --positives mined {flags(results.settings, '--settings.mined.')}"
    )


def _words_of_thresholds(results: MiningResults) -> str:
    options = results.options
    mean = float(np.mean(results.corpus.annotated()))
    values = ", ".join(
        f"{name.replace('_text', chr(39))} {value:g}" for name, value in thresholds(results.settings).items()
    )
    if options.calibrate:
        settings, sample, rate = results.settings, results.sample, f"{options.rate:g} of random pairs exceed"
        same = [_nearly_same("p2", "S_ii", settings.p2, sample.ii, rate)]
        same.append(_nearly_same("p3", "S_tt", settings.p3, sample.tt, rate))
        return (
            f"Calibrated: {values}. p1 is the mean S_it of the annotated pairs, {mean:.4f}, from where the paper "
            f"starts, but at least what only {rate}; {'; '.join(same)}; p1' is what all but {FLOOR:.0%} of the "
            "annotated pairs exceed, at most p1. Values given on the command line are unchanged."
        )
    return (
        f"Given: {values}. The paper's are 0.27, 0.92, 0.99 and 0.24, for a teacher whose annotated pairs score 0.29 "
        f"on average; this one's score {mean:.3f}. Where that differs much, --calibrate fits them."
    )


def _nearly_same(name: str, score: str, value: float, random: Tensor, rate: str) -> str:
    """Explain the calibrated p2 or p3."""
    if value < NEARLY_SAME:
        return f"{name} is the {score} that only {rate}"
    above = percent(float((random > value).float().mean()))
    return f"{name} is {value:g}, the highest that identical features surely exceed: {above} of random pairs do, too"


def _similarities(results: MiningResults) -> Iterator[str]:
    sample = results.sample
    yield _density({"annotated": results.corpus.annotated(), "random": sample.it.numpy()}, "S_it, image and caption")
    yield report.grid(
        [
            _density({"random": sample.ii.numpy()}, "S_ii, two images"),
            _density({"random": sample.tt.numpy()}, "S_tt, caption and captions"),
        ]
    )
    yield (
        f"Random: {len(sample.it):,} pairs of an image and a caption of another one; S_ii compares their images, S_tt "
        "the caption with the captions of the image, on average."
    )


def _density(series: Mapping[str, Floats], x_label: str) -> Html:
    return distribution(series, x_label, "% of each", total=100)


def _ranks(results: MiningResults) -> Iterator[str]:
    groups = results.groups
    series, rows = {}, []
    for name, group in groups.items():
        prefix, suffix = (f"{name}: ", f", {name}") if len(groups) > 1 else ("", "")
        batch = group.ranks.batch
        at = sorted({int(v) for v in np.geomspace(1, batch, 60).round()})
        for side, other, ranks in (
            ("own caption", "of an image", group.ranks.captions),
            ("own image", "of a caption", group.ranks.images),
        ):
            series[f"{prefix}{side} {other}"] = [(float(k), float(100 * np.mean(ranks <= k))) for k in at]
            shares = [percent(float(np.mean(ranks <= k))) for k in (1, 5, 10, 100)]
            rows.append([f"{side}{suffix}", *shares, _rounded(float(np.median(ranks)))])
    yield report.line_plot(series, "rank", "% at this rank or better", log_x=True)
    yield table(rows, ["", "first", "first 5", "first 10", "first 100", "median rank"])
    first = next(iter(groups.values())).ranks
    batches = "One random batch" if first.batches == 1 else f"{first.batches} random batches"
    yield (
        f"{batches} of {first.batch:,} images with one caption each. Where the own caption is not first, another one "
        "has a larger cosine: often a false negative."
    )


def _above(results: MiningResults, shown: ReportImages, image: Image) -> Iterator[str]:
    if figures := list(gallery.drawn(shown.above, results.corpus.keys, image)):
        yield (
            "In one of these batches, each with its S_it. Those that are true of the image are false negatives, which "
            "mining makes positives; where the data has ground truth they are ticked."
        )
        yield from figures


def _beside(results: MiningResults, shown: ReportImages, image: Image) -> Iterator[str]:
    if figures := list(gallery.drawn(shown.raw_and_pseudo, results.corpus.keys, image)):
        yield "Images drawn at random, each caption with its S_it, best first."
        yield from figures


def _captions(results: MiningResults) -> Iterator[str]:
    groups = results.groups
    near = {name: group.nearest for name, group in groups.items()}
    within = {name: group.among for name, group in groups.items()}
    yield report.grid(
        [
            _density(near, "mean similarity with its 100 nearest captions"),
            _density(within, "similarity among one image's captions"),
        ]
    )
    prefixes = {name: f"{name}: " if len(groups) > 1 else "" for name in groups}
    series = {}
    for name, group in groups.items():
        if len(group.one):
            series[f"{prefixes[name]}one caption"] = group.one
            series[f"{prefixes[name]}mean of its captions"] = group.mean
    if series:
        yield _density(series, "similarity of an image")
        yield f"On average: {'; '.join(f'{name} {float(np.mean(v)):.3f}' for name, v in series.items())}."
    for name, group in groups.items():
        repeated = [(text, count) for text, count in group.frequent[:SHOWN] if count > 1]
        caption = f"the most frequent of {group.captions:,} captions; {group.repeated:,} repeat an earlier one"
        yield table(repeated, ["caption", "times"], caption=prefixes[name] + caption)
        if not repeated:
            yield f"{prefixes[name]}Each of {group.captions:,} captions occurs once."
    if any(group.repeated for group in groups.values()):
        frequencies = {n: [(float(i), float(c)) for i, (_, c) in enumerate(g.frequent, 1)] for n, g in groups.items()}
        yield report.line_plot(frequencies, "the 100 most frequent captions", "times")


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
