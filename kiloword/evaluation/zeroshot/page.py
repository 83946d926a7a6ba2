"""HTML page of `kiloword eval zeroshot MODEL`: accuracy, and weights of the prompts of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kiloword.report import card, grid, page, paragraph, table
from kiloword.report.parts import Cell

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.evaluation.zeroshot.options import Way
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
    "ensemble_mean_average_precision": "mAP, ensemble",
    "held_out": "held out",
    "kept": "prompts kept",
    "max_weight": "largest weight",
    "max_weight_uniform": "if uniform",
    "entropy": "entropy",
    "entropy_uniform": "if uniform",
}


@dataclass
class Class:
    """The weighed prompts of one class."""

    name: str
    prompts: list[tuple[str, float]]  # heaviest first
    images: list[tuple[npt.NDArray[np.uint8], str]]  # that it was fitted on, with their true classes

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
    from kiloword.data.reading import eval_batches

    config, places = matcher.model.config, which.tolist()
    rows = [range(images.rows[i], images.rows[i] + 1) for i in places]
    pixels = torch.cat(
        [b.images for b in eval_batches(source, config.image.size, config.preprocess.resize, parts=rows)]
    )
    labels = [images.labels[i] for i in places]
    words = [names[int(label)] if label.ndim == 0 else "" for label in labels]
    return list(zip((p.permute(1, 2, 0).numpy() for p in pixels), words, strict=True))


def report(metrics: Mapping[str, Mapping[str, float]], data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """A page: accuracy of every model, then the weights of its prompts, where it has any."""
    columns = [name for name in VALUES if any(name in values for values in metrics.values())]
    rows: list[list[Cell]] = [[m, *(_shown(v, name) for name in columns)] for m, v in metrics.items()]
    numbers = table(rows, ["model", *(VALUES[name] for name in columns)], digits=3, strong=1)
    sections = [("Accuracy", numbers)]
    for model, page_data in shown.items():
        classes: list[Class] = page_data.get("classes", [])
        if classes:
            sections.append((f"Prompts of {model}, by {page_data['way']}", _weights(classes) + _cards(classes)))
    intro = f"Zero-shot classification of {data}."
    if any(page_data.get("classes") for page_data in shown.values()):
        intro += " Weights of a class's prompts sum to 1."
    if "entropy" in columns:
        intro += " Entropies are in nats."
    return page("Zero-shot classification by prompts", intro, sections)


def _shown(values: Mapping[str, float], name: str) -> Cell:
    return int(values[name]) if name == "held_out" and name in values else values.get(name)


def _weights(classes: Sequence[Class]) -> str:
    rows: list[list[Cell]] = []
    for shown_class in classes[:LINES]:
        (most, high), (fewest, low) = shown_class.prompts[0], shown_class.prompts[-1]
        rows.append([shown_class.name, most, high, fewest, low, 1 / len(shown_class.prompts)])
    note = paragraph(f"The first {LINES} of {len(classes)} classes.") if len(classes) > LINES else ""
    return table(rows, ["class", "heaviest prompt", "weight", "lightest prompt", "weight", "uniform"], digits=3) + note


def _cards(classes: Sequence[Class]) -> str:
    cards = [_card(one) for one in classes if one.images]
    note = paragraph("Images that the weights were fitted on, each with its true class below.")
    return note + grid(cards) if cards else ""


def _card(shown_class: Class) -> str:
    lines = [f"{weight:.3f}  {prompt}" for prompt, weight in shown_class.prompts]
    if len(lines) > 2 * ENDS:
        lines = [*lines[:ENDS], "…", *lines[-ENDS:]]
    return card(shown_class.images, lines, strong=shown_class.name)
