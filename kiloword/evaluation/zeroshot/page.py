"""HTML page of `kiloword eval zeroshot MODEL`: accuracy, and weights of the prompts of each class."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kiloword.evaluation.calibration import interval
from kiloword.evaluation.task import Results
from kiloword.evaluation.zeroshot import PRECISION
from kiloword.evaluation.zeroshot.mistakes import classes_table, confusions, gallery, images_of
from kiloword.report import card, distribution, grid, metric_table, page, section, table

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.evaluation.zeroshot import Way
    from kiloword.evaluation.zeroshot.prompts import Chosen, Images, Prompts
    from kiloword.types import Source

CARDS = 12  # classes shown with images: those whose weights are least uniform
SEEN = 3  # images per class
ENDS = 3  # prompts at each end of a card
LINES = 200  # classes in the table
VALUES = {  # columns of the first table: metric -> heading
    "acc1": "acc1",
    "ensemble_acc1": "acc1, ensemble",
    "acc5": "acc5",
    "mean_per_class_recall": "mean per class recall",
    "mean_average_precision": "mAP",
    "mean_average_precision_11": "mAP, 11 points",
    "ensemble_mean_average_precision": "mAP, ensemble",
    "held_out": "held out",
    "kept": "prompts kept",
    "max_weight": "largest weight",
    "max_weight_uniform": "if uniform",
    "entropy": "entropy",
    "entropy_uniform": "if uniform",
}
HIGHER = ("acc1", "acc5", "mean_per_class_recall", "mean_average_precision", "mean_average_precision_11")


@dataclass
class Class:
    """The weighed prompts of one class."""

    name: str
    prompts: list[tuple[str, float]]  # heaviest first
    images: list[tuple[npt.NDArray[np.uint8], str]]  # that it was fitted on, with their true classes

    @property
    def entropy(self) -> float:
        """Of the weights, in nats."""
        return -sum(weight * math.log(weight) for _, weight in self.prompts if weight > 0)

    @property
    def concentration(self) -> float:
        """Ratio of the largest weight to the uniform one."""
        return self.prompts[0][1] * len(self.prompts)


def drawn(
    matcher: Matcher,
    source: Source,
    way: Way,
    chosen: Chosen,
    prompts: Prompts,
    images: Images,
    captions: Sequence[str],
) -> dict[str, Any]:
    """Page data of one model: its classes, those with the least uniform weights first."""
    group, weights = prompts.group.tolist(), chosen.weights.tolist()
    weighted: list[list[tuple[str, float]]] = [[] for _ in prompts.names]
    for c, caption, weight in zip(group, captions, weights, strict=True):
        weighted[c].append((caption, weight))
    classes = [Class(n, sorted(p, key=lambda x: -x[1]), []) for n, p in zip(prompts.names, weighted, strict=True)]
    order = sorted(range(len(classes)), key=lambda c: -classes[c].concentration)
    if chosen.seen is not None:
        for c in order[:CARDS]:
            classes[c].images = _seen(matcher, source, images, chosen.seen[c][:SEEN], prompts.names)
    return {"way": way, "classes": [classes[c] for c in order]}


def _seen(
    matcher: Matcher, source: Source, images: Images, which: torch.Tensor, names: Sequence[str]
) -> list[tuple[npt.NDArray[np.uint8], str]]:
    places = which.tolist()
    labels = [images.labels[i] for i in places]
    words = [names[int(label)] if label.ndim == 0 else "" for label in labels]
    return list(zip(images_of(matcher, source, [images.rows[i] for i in places]), words, strict=True))


def report(metrics: Results, data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """A page: accuracy of every model, then the weights of its prompts, where it has any."""
    weighted = {model: more for model, more in shown.items() if more.get("classes")}
    intro = f"Zero-shot classification of {data}."
    if weighted:
        intro += " Weights of a class's prompts sum to 1."
    if any("entropy" in values for values in metrics.values()):
        intro += " Entropies are in nats."
    accuracy = metric_table(metrics, VALUES, whole=["held_out"], by_model=True, first="model", best=HIGHER)
    prompts = [
        section(f"Prompts of {m}, by {more['way']}", *_weights(more["way"], more["classes"]))
        for m, more in weighted.items()
    ]
    groups = metric_table(metrics, _named(metrics, r"acc_.*|F1.*|(attribute|object)_acc1"))
    by_class = metric_table(metrics, _named(metrics, f"{PRECISION}.*"))
    parts = [section("Accuracy", *_sample_sizes(shown), accuracy), section("Groups and parts", groups)]
    parts.append(section("Average precision", by_class))
    for model, more in shown.items():
        if "confusion" in more:
            of = f", {model}" if len(shown) > 1 else ""
            parts.append(section(f"Classes{of}", *classes_table(more["names"], more["confusion"])))
            parts.append(section(f"Confusions{of}", *confusions(more["names"], more["confusion"])))
            about = "Mistakes whose class is furthest above the true one, by score." if more["mistakes"] else ""
            parts.append(section(f"Mistakes{of}", about, gallery(more["mistakes"])))
    return page("Zero-shot classification by prompts", intro, [*parts, *prompts])


def _sample_sizes(shown: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Right images of each model, with the interval that their number leaves, and what chance would give."""
    for model, more in shown.items():
        if "confusion" in more:
            confusion = more["confusion"]
            n, classes = int(confusion.sum()), len(more["names"])
            right = int(confusion.trace())
            low, high = interval(right / n, n)
            yield (
                f"{model}: {right:,} of {n:,} images are right, {right / n:.1%} "
                f"(95% interval {low:.1%} to {high:.1%}); chance among {classes:,} classes is {1 / classes:.1%}."
            )


def _named(metrics: Results, pattern: str) -> dict[str, str]:
    """Names of the metrics that match a pattern."""
    return {name: name for values in metrics.values() for name in values if re.fullmatch(pattern, name)}


def _weights(way: Way, classes: Sequence[Class]) -> Iterator[str]:
    if way == "bprw":
        yield from _spread(classes)
    ends = [(one, one.prompts[0], one.prompts[-1]) for one in classes[:LINES]]
    rows = [[one.name, *heaviest, *lightest, 1 / len(one.prompts)] for one, heaviest, lightest in ends]
    yield table(rows, ["class", "heaviest prompt", "weight", "lightest prompt", "weight", "uniform"], digits=3)
    if len(classes) > LINES:
        yield f"The first {LINES} of {len(classes)} classes."
    if cards := [_card(one) for one in classes if one.images]:
        yield "Images that the weights were fitted on, each with its true class below."
        yield grid(cards)


def _spread(classes: Sequence[Class]) -> Iterator[str]:
    """How uneven the weights of classes are (arXiv:2410.18857, Fig. C.4)."""
    counts = sorted({len(one.prompts) for one in classes})
    uniform = (
        " or ".join(f"1/{n} = {1 / n:.3g}" for n in counts[:2]),
        " or ".join(f"{math.log(n):.3f}" for n in counts[:2]),
    )
    largest, entropies = [one.prompts[0][1] for one in classes], [one.entropy for one in classes]
    yield (
        f"A class whose prompts weigh the same has the largest weight {uniform[0]} and the entropy {uniform[1]}; the "
        "further from these, the more some prompts are preferred."
    )
    yield grid(
        [
            distribution({"classes": largest}, "largest weight of a class", "classes", most=30),
            distribution({"classes": entropies}, "entropy of a class's weights, in nats", "classes", most=30),
        ]
    )


def _card(one: Class) -> str:
    lines = [f"{weight:.3f}  {prompt}" for prompt, weight in one.prompts]
    if len(lines) > 2 * ENDS:
        lines = [*lines[:ENDS], "…", *lines[-ENDS:]]
    return card(one.images, lines, strong=one.name)
