"""HTML report of `kiloword mine`, from its results and a function that returns images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from kiloword import report
from kiloword.mining.calibrate import DIGITS, FLOOR, NEARLY_SAME, ThresholdChoice
from kiloword.mining.corpus import Floats
from kiloword.mining.images import Image, ReportImages, mined_pairs, term_rule, wide_captions
from kiloword.mining.results import WHOLE, Group, MiningResults, flags, terms, thresholds, warning
from kiloword.report.distributions import bins, doubling
from kiloword.report.parts import duration, percent

SHOWN = 15  # of the most frequent captions


def page(results: MiningResults, shown: ReportImages, image: Image) -> str:
    """The whole HTML document."""
    sections = [
        ("In short", _short(results)),
        ("Mined pairs", _mined(results)),
        ("Thresholds", _thresholds(results)),
        ("Similarities", _similarities(results)),
        ("Rank of the true caption", _ranks(results)),
        ("Captions", _captions(results)),
        ("Pairs that were mined", mined_pairs(results, shown, image)),
        ("Captions that fit many images", wide_captions(results, shown, image)),
    ]
    return report.page("Mined pairs", _intro(results), [s for s in sections if s[1]])


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


def _short(results: MiningResults) -> str:
    mined, table = results.mined, terms(results.mined)[WHOLE]
    counts = mined.per_image.numpy()
    first = next(iter(results.groups.values()))
    figures = [
        (f"{mined.mined.whole:,}", "pairs mined beside the annotated ones"),
        (_rounded(float(counts.mean())), "mined captions an image, on average"),
        (percent(float((counts > 0).mean())), "of images have a mined caption"),
        (
            percent(float(np.mean(first.ranks.captions <= 1))),
            f"of images have their own caption first of {first.ranks.batch:,}",
        ),
    ]
    if mined.true is not None:
        precision, recall = table["precision"], table["recall"]
        figures[1:1] = [
            ("–" if precision is None else percent(precision), "of the mined pairs are true (precision)"),
            ("–" if recall is None else percent(recall), "of the true pairs were mined (recall)"),
        ]
    return report.headline(figures)


def _mined(results: MiningResults) -> str:
    mined = results.mined
    has_truth = mined.true is not None
    judged = ["precision", "recall"] if has_truth else []
    rows: list[list[str | float | int | None]] = []
    for name, row in terms(mined).items():
        rows.append(
            [
                term_rule(name, results.settings),
                f"{row['mined']:,}",
                *(row[what] for what in judged),
                None if row["alone"] is None else f"{row['alone']:,}",
                f"{row['share_of_pairs']:.3%}",
                percent(float(row["annotated_accepted"] or 0)),
            ]
        )
    header = ["term", "mined", *judged, "by it alone", "of all pairs", "annotated accepted"]
    counts = mined.per_image.numpy()
    edges = doubling(int(counts.max()))
    share = [float(v) for v in 100 * np.histogram(counts, edges)[0] / len(counts)]
    parts = [
        report.table(rows, header, strong=1, digits=3),
        *([report.paragraph(f"Warning: {many}")] if (many := warning(mined)) else []),
        report.paragraph(_words_of_mined(results)),
        report.histogram({"mined": share}, edges, "mined captions, at least", "% of images", even=True),
    ]
    return "".join(parts)


def _words_of_mined(results: MiningResults) -> str:
    mined = results.mined
    share = mined.mined.whole / max(mined.pairs, 1)
    captions = len(results.corpus.captions) / len(results.corpus.keys)
    inside = share * (results.options.batch - 1) * captions
    text = (
        "S_it: cosine of image and caption; S_ii: of the image and the caption's image; S_tt: of the caption and "
        "the image's captions, on average. Annotated accepted: annotated pairs that the term accepts; "
        "S_ii of an image with itself is always 1. "
        f"In a random batch of {results.options.batch:,} images with all captions, an image has "
        f"{_rounded(inside)} mined captions beside its own. "
    )
    if mined.true is not None:
        text += (
            f"The data has ground truth: {mined.true:,} pairs ({percent(mined.true / max(mined.pairs, 1))}) are true "
            "without being annotated; precision and recall are exact. "
        )
    return text


def _thresholds(results: MiningResults) -> str:
    has_truth = results.sample.true is not None
    mean = round(float(np.mean(results.corpus.annotated())), DIGITS)
    rows = [_choice_row(c, has_truth, results.settings.p1, mean) for c in results.choices]
    header = [
        "p1",
        "annotated above",
        "random above",
        "mined an image",
        *(["precision", "recall"] if has_truth else []),
    ]
    return (
        report.paragraph(_words_of_thresholds(results))
        + report.table(
            rows, header, caption="Other values of p1, the rest of eq. 2 as it is; from random pairs", digits=3
        )
        + report.paragraph("To train with them:")
        + report.code(_commands(results))
    )


def _commands(results: MiningResults) -> str:
    settings = results.settings
    return (
        f"kiloword train fff {flags(settings)}\n"
        f"kiloword train siglip --positives mined {flags(settings, '--settings.mined.')}"
    )


def _choice_row(choice: ThresholdChoice, has_truth: bool, used: float, mean: float) -> list[str | float | None]:
    row: list[str | float | None] = [
        f"{choice.p1:g}" + (" (used)" if choice.p1 == used else " (mean)" if choice.p1 == mean else ""),
        percent(choice.annotated_above),
        f"{choice.random_above:.3%}",
        _rounded(choice.mined_per_image),
    ]
    return [*row, choice.precision, choice.recall] if has_truth else row


def _words_of_thresholds(results: MiningResults) -> str:
    options = results.options
    mean = float(np.mean(results.corpus.annotated()))
    values = ", ".join(
        f"{name.replace('_text', chr(39))} {value:g}" for name, value in thresholds(results.settings).items()
    )
    if options.calibrate:
        settings, sample, rate = results.settings, results.sample, f"{options.false_rate:g} of random pairs exceed"
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


def _similarities(results: MiningResults) -> str:
    sample = results.sample
    plots = {
        "S_it, image and caption": {"annotated": results.corpus.annotated(), "random": sample.it.numpy()},
        "S_ii, two images": {"random": sample.ii.numpy()},
        "S_tt, caption and captions": {"random": sample.tt.numpy()},
    }
    shown = [_density(series, name) for name, series in plots.items()]
    return (
        shown[0]
        + report.grid(shown[1:])
        + report.paragraph(
            f"Random: {len(sample.it):,} pairs of an image and a caption of another one; S_ii compares their "
            "images, S_tt the caption with the captions of the image, on average."
        )
    )


def _density(series: Mapping[str, Floats], x_label: str) -> str:
    values = {name: v for name, v in series.items() if len(v)}
    if not values:
        return ""
    edges = bins([float(f(v)) for v in values.values() for f in (np.min, np.max)])
    heights = {name: [float(h) for h in 100 * np.histogram(v, edges)[0] / len(v)] for name, v in values.items()}
    return report.histogram(heights, edges, x_label, "% of each")


def _ranks(results: MiningResults) -> str:
    groups = results.groups
    series = {}
    for name, group in groups.items():
        prefix = f"{name}: " if len(groups) > 1 else ""
        series[f"{prefix}own caption of an image"] = _cumulative(group.ranks.captions, group.ranks.batch)
        series[f"{prefix}own image of a caption"] = _cumulative(group.ranks.images, group.ranks.batch)
    rows: list[list[str | float | int | None]] = []
    for name, group in groups.items():
        for side, ranks in (("own caption", group.ranks.captions), ("own image", group.ranks.images)):
            label = f"{side}, {name}" if len(groups) > 1 else side
            shares = [percent(float(np.mean(ranks <= k))) for k in (1, 5, 10, 100)]
            rows.append([label, *shares, _rounded(float(np.median(ranks)))])
    first = next(iter(groups.values())).ranks
    batches = "One random batch" if first.batches == 1 else f"{first.batches} random batches"
    return (
        report.line_plot(series, "rank", "% at this rank or better", log_x=True)
        + report.table(rows, ["", "first", "first 5", "first 10", "first 100", "median rank"])
        + report.paragraph(
            f"{batches} of {first.batch:,} images with one caption each. Where the own caption "
            "is not first, another one has a larger cosine: often a false negative."
        )
    )


def _cumulative(ranks: Floats, batch: int) -> list[tuple[float, float]]:
    at = sorted({int(v) for v in np.geomspace(1, batch, 60).round()})
    return [(float(k), float(100 * np.mean(ranks <= k))) for k in at]


def _captions(results: MiningResults) -> str:
    groups = results.groups
    near = _density(
        {name: group.nearest for name, group in groups.items()}, "mean similarity with its 100 nearest captions"
    )
    within = _density({name: group.among for name, group in groups.items()}, "similarity among one image's captions")
    both = _one_and_mean(groups)
    parts = [report.grid([part for part in (near, within) if part]), both]
    for name, group in groups.items():
        title = "" if len(groups) == 1 else f"{name}: "
        title_of_table = (
            f"{title}the most frequent of {group.captions:,} captions; {group.repeated:,} repeat an earlier one"
        )
        repeated = [(text, count) for text, count in group.frequent[:SHOWN] if count > 1]
        rows: list[list[str | float | int | None]] = [[text, count] for text, count in repeated]
        none = report.paragraph(f"{title}Each of {group.captions:,} captions occurs once.")
        parts.append(report.table(rows, ["caption", "times"], caption=title_of_table) if rows else none)
    if not any(group.repeated for group in groups.values()):
        return "".join(parts)
    frequencies = {n: [(float(i), float(c)) for i, (_, c) in enumerate(g.frequent, 1)] for n, g in groups.items()}
    parts.append(report.line_plot(frequencies, "the 100 most frequent captions", "times"))
    return "".join(parts)


def _one_and_mean(groups: Mapping[str, Group]) -> str:
    series: dict[str, Floats] = {}
    for name, group in groups.items():
        prefix = f"{name}: " if len(groups) > 1 else ""
        if len(group.one):
            series |= {f"{prefix}one caption": group.one, f"{prefix}mean of its captions": group.mean}
    if not series:
        return ""
    means = "; ".join(f"{name} {float(np.mean(v)):.3f}" for name, v in series.items())
    return _density(series, "similarity of an image") + report.paragraph(f"On average: {means}.")


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
