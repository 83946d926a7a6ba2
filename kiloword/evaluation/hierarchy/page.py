"""HTML page of `kiloword eval hierarchy MODEL`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from torch import Tensor

from kiloword.data.images.decode import decode
from kiloword.evaluation.hierarchy.chains import Chains
from kiloword.evaluation.task import Results
from kiloword.randomness import key
from kiloword.report import distribution, ladder, line_plot, page, section, table
from kiloword.report.images import Steps

EXAMPLES = 8
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
            section("Images against the whole", *(_differences(model, more) for model, more in shown.items())),
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


def _differences(model: str, more: Mapping[str, Any]) -> str:
    """How much less certain a part is than the whole image."""
    images: Tensor | None = more.get("images")
    gaps = {} if images is None else {f"level {k}": images[:, k] - images[:, -1] for k in range(images.shape[1] - 1)}
    return distribution(gaps, f"uncertainty above the whole image's, {model}", "images", most=40)


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
