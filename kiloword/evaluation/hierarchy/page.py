"""HTML page of `kiloword eval hierarchy MODEL`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
from PIL import Image

from kiloword.data.images.decode import decode
from kiloword.data.reading import read_image
from kiloword.evaluation.hierarchy.chains import Chains
from kiloword.evaluation.hierarchy.levels import ImageLevels
from kiloword.evaluation.task import Results
from kiloword.evaluation.uncertainty.page import bars, readable_unit
from kiloword.randomness import key
from kiloword.report import distribution, heading, ladder, line_plot, page, percent, section, table, tiles
from kiloword.report.images import Pixels, Steps
from kiloword.types import BadSample, Source

EXAMPLES = 8
REVERSED = 3  # groups of images whose whole is not within the most general level
LEVELS = 6  # in a plot, at most
SIDE = 160  # largest side of an image of the page, in pixels
_MEASURES = ("precision", "recall", "hit", "root_recall", "root_hit", "true_precision", "true_recall", "order")
_INTRO = (
    "Captions come in chains from general (level 0) to specific. Two protocols retrieve texts of every image at "
    "every level; precision is the share of the retrieved texts that are correct, recall the share of the levels of "
    "which a correct text was retrieved.\n\n"
    "HierarCaps takes the best match among the texts up to 50 distances from the embedding of the empty string. A "
    "traversal goes in 50 steps from the text nearest to the image to a root: the empty string, the text that "
    "includes the image most, or the mean of both. The two protocols measure different things: do not compare "
    "their metrics."
)


def report(metrics: Results, data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """HTML page of several models. Args: metrics and page data by model."""
    return page(
        "General and specific",
        f"On {data}. {_INTRO}",
        [
            section("Retrieval along chains", *_retrieval(metrics)),
            section("Uncertainty by level", *_uncertainty(metrics)),
            section("Inclusion", *_inclusion(metrics)),
            *(section(f"Images by level, {model}", *_images(more)) for model, more in shown.items()),
            *(section(f"Examples of {model}", *_examples(more)) for model, more in shown.items()),
        ],
    )


def _retrieval(metrics: Results) -> Iterator[str]:
    """Table with a row per model and protocol."""
    rows = []
    for model, values in metrics.items():
        for prefix in dict.fromkeys(n.removesuffix("_hit").removesuffix("_root") for n in values if n.endswith("_hit")):
            measures = (values.get(f"{prefix}_{measure}") for measure in _MEASURES)
            rows.append([f"{model}, {prefix.replace('_', ', root ', 1)}", *measures])
    if rows:
        yield table(rows, ["", *(measure.replace("_", " ") for measure in _MEASURES)], digits=3)
        yield (
            "Hit: any text of the chain. Root recall: the text nearest to the root is the chain's most general; root "
            "hit: it is in the chain. True: every text that is true of the image counts (scenes only). Order: "
            "Kendall's tau of level and distance from the empty string."
        )


def _uncertainty(metrics: Results) -> Iterator[str]:
    """Plots of mean uncertainty by level: texts of all models, and images."""
    for kind, name in (("text", "texts"), ("image", "images")):
        prefix = f"{kind}_chain_uncertainty"
        levels = {
            model: [(float(n.partition("@")[2]), v) for n, v in values.items() if n.startswith(f"{prefix}@")]
            for model, values in metrics.items()
        }
        lines = {model: points for model, points in levels.items() if points}
        if lines:
            yield line_plot(lines, f"level of {name}", "mean sum of variances", whole_x=True)
            rows = [[m, metrics[m].get(f"{prefix}_spearman"), metrics[m][f"{prefix}_order"]] for m in lines]
            yield table(rows, [name, "Spearman with level", "falls within chains (tau)"], digits=3)


def _inclusion(metrics: Results) -> Iterator[str]:
    """Table of the shares of pairs that pass each test."""
    names = dict.fromkeys(n for values in metrics.values() for n in values if "_inclusion_" in n)
    rows = [[f"{m}, {_test(n)}", values[n]] for m, values in metrics.items() for n in names if n in values]
    if rows:
        yield table(rows, ["is it included?", "share"], digits=3)
        yield (
            "H > 0: the more specific is the narrower, mostly; the distance of the two does not count against it. By "
            "inc: the chain's own more general text includes it more than one that is wrong of the image. Chance is "
            "one half."
        )


def _test(name: str) -> str:
    """ "text_inclusion_h@2" in words."""
    kind, level = name.split("_inclusion_")[0], int(name.split("@")[1])
    what = "texts" if kind == "text" else "images"
    if "whole" in name:
        return f"{what}: the whole in level {level}, H > 0"
    return f"{what}: level {level} in level {level - 1}, {'H > 0' if '_h@' in name else 'by inc'}"


def _images(more: Mapping[str, Any]) -> Iterator[str]:
    """Uncertainty of images by level; whether the whole lies within its parts (arXiv:2410.18857, Figs. 8, C.2, C.3)."""
    images: ImageLevels | None = more.get("images")
    if images is None:
        return
    last = images.uncertainty.shape[1] - 1
    levels = sorted({round(k * (last - 1) / (LEVELS - 2)) for k in range(LEVELS - 1)})
    scale, label = readable_unit(images.uncertainty)
    names = {k: f"level {k}" for k in levels} | {last: "the whole image"}
    yield heading("Uncertainty")
    yield from bars({name: images.uncertainty[:, k] * scale for k, name in names.items()}, label, "share of each")
    gaps = {f"level {k}": (images.uncertainty[:, k] - images.uncertainty[:, -1]) * scale for k in levels}
    yield heading("Uncertainty above that of the whole image")
    yield "Right of 0 the part is less certain than the whole image, as it should be."
    yield distribution(gaps, label, "images", most=40)
    yield heading("Is the whole image within a level? H(whole in level)")
    shares = ", ".join(f"level {k} {percent(float((images.whole[:, k] > 0).double().mean()))}" for k in levels)
    yield f"Included (H > 0): {shares}. H(level in whole) is the negative: the same bars mirrored at 0."
    yield from bars({f"level {k}": images.whole[:, k] for k in levels}, "H(whole in level)", "share of each")
    yield from _reversed(images)


def _reversed(images: ImageLevels) -> Iterator[str]:
    """The images whose whole lies farthest from being within the most general level."""
    order = images.whole[:, 0].argsort(stable=True).tolist()
    if not (wrong := [g for g in order if images.whole[g, 0] <= 0][:REVERSED]):
        return
    yield heading("Where the whole image is not within level 0")
    yield "From the most general level to the whole image, each with its uncertainty; the most negative H first."
    for group in wrong:
        values = images.uncertainty[group].tolist()
        parts = [_pixels(images.source, row) for row in images.rows[group]]
        yield tiles(
            [(part, f"{value:#.3g}") for part, value in zip(parts, values, strict=True) if part is not None], len(parts)
        )


def _pixels(source: Source, row: int) -> Pixels | None:
    """A small image; None where it can no longer be read."""
    try:
        image = Image.fromarray(decode(read_image(source, row).image))
    except BadSample:
        return None
    image.thumbnail((SIDE, SIDE))
    return np.asarray(image)


def _examples(more: Mapping[str, Any]) -> Iterator[str]:
    """Some images, the same ones for every model: their chains and what each protocol retrieved."""
    chains: Chains | None = more.get("chains")
    if chains is None:
        return
    source, n = more["source"], len(chains.rows)
    chosen = sorted(range(n), key=lambda i: key(source.fingerprint, "examples", chains.rows[i]))[:EXAMPLES]
    for i in sorted(chosen):
        record = source.record(chains.rows[i])
        columns: list[Steps] = [
            ("as annotated", [(chains.texts[t], None) for t in chain]) for chain in chains.of(i)[:1]
        ]
        for name, paths in more["paths"].items():
            path = paths[i].tolist()
            columns.append((name, _steps(path if name == "HierarCaps" else path[::-1], i, chains, more["truth"])))
        yield ladder(decode(record.image), record.key, columns)


def _steps(path: list[int], image: int, chains: Chains, truth: Any) -> list[tuple[str, bool]]:
    """A path without consecutive repeats; correct: in a chain of the image or, with ground truth, true of it."""
    short = [text for text, _ in groupby(path)]
    if truth is None:
        right = {text for chain in chains.of(image) for text in chain}
        return [(chains.texts[text], text in right) for text in short]
    truths = truth(short, slice(image, image + 1))
    return [(chains.texts[text], bool(true)) for text, true in zip(short, truths[:, 0].tolist(), strict=True)]
