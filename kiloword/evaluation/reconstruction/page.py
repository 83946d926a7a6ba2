"""HTML page of the task `reconstruction`: metrics, and images with their reconstructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kiloword.evaluation.command import number
from kiloword.report import card, page, paragraph, table
from kiloword.report.overlay import Pixels, covered
from kiloword.report.parts import Cell

SHOWN = 8  # images per kind of mask
NAMES = {"right": "its caption", "wrong": "a wrong caption", "none": "no caption"}
MASKS = {
    "attentive": "The patches most similar to the right caption are masked",
    "random": "Random patches are masked",
}


FLAT = {"own_mean": "each patch's true mean", "mean_colour": "the mean of the visible patches"}


@dataclass(frozen=True)
class PaintedExample:
    """One image with masked patches, reconstructed from several guides."""

    mask: str
    original: Pixels  # [H, W, 3]
    hidden: npt.NDArray[np.bool_]  # [rows, columns] of patches
    painted: Mapping[str, Pixels]  # by guide; visible patches are those of the original
    losses: Mapping[str, float]  # L1 by guide
    right: str
    wrong: str


def report(metrics: Mapping[str, Mapping[str, float]], data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """HTML page of one or several models."""
    sections = [(title, _numbers(metrics, mask)) for mask, title in MASKS.items()]
    for model, drawn in shown.items():
        for mask, title in MASKS.items():
            cards = [_card(example) for example in drawn["examples"] if example.mask == mask]
            of = f" – {model}" if len(shown) > 1 else ""
            sections.append((f"Images{of}: {title[0].lower()}{title[1:]}", "".join([_about(drawn), *cards])))
    return page("Reconstructing masked patches", _intro(data, shown), sections)


def _intro(data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    truth = any(drawn["truth"] for drawn in shown.values())
    wrong = "another image's caption, false of this one" if truth else "another image's caption"
    return (
        f"Some patches of each image of {data} are masked; the model reconstructs them from the other patches and a "
        "caption. If it uses captions, the right one gives a better reconstruction than a wrong one "
        f"({wrong}) and than none (the empty caption). The same patches are masked for all three.\n\n"
        "L1 is the mean absolute difference over the masked patches, in normalised pixels (mean 0, deviation 1); "
        "lower is better."
    )


def _numbers(metrics: Mapping[str, Mapping[str, float]], mask: str) -> str:
    rows: list[list[Cell]] = []
    for model, values in metrics.items():
        at = {name.removesuffix(f"@{mask}"): value for name, value in values.items() if name.endswith(f"@{mask}")}
        losses = [at.get(f"reconstruction_l1_{name}") for name in (*NAMES, "mean_colour", "mean_image")]
        rows.append([model, *losses])
    head = ["L1", *NAMES.values(), "mean colour seen", "mean image"]
    pairs = [_compared(model, values, other, mask) for model, values in metrics.items() for other in ("wrong", "none")]
    comparisons = [pair for pair in pairs if pair]
    head_of_pairs = ["image by image", "against", "right is better in", "L1 more than by right", "± standard error"]
    unread = (
        "" if comparisons else paragraph("Trained without text: the reconstruction does not depend on the caption.")
    )
    by_own_masks = mask == "attentive" and len(metrics) > 1
    flat = "".join(
        paragraph(f"{m}: {warning}") for m, values in metrics.items() if (warning := worse_than_flat(values, mask))
    )
    note = paragraph(
        "Each model masks the patches that it finds most similar to the caption: compare models by random masks."
    )
    return (
        table(rows, head, digits=4)
        + flat
        + (note if by_own_masks else "")
        + (table(comparisons, head_of_pairs) if comparisons else unread)
    )


def worse_than_flat(values: Mapping[str, float], mask: str) -> str:
    """A warning if a model is no better than one flat colour, else "". Args: metrics by name."""
    losses = {name: values.get(f"reconstruction_l1_{name}@{mask}") for name in (*NAMES, *FLAT)}
    guide = next((name for name in NAMES if losses[name] is not None), "none")
    ours = losses[guide]
    for name, what in FLAT.items():
        flat = losses[name]
        if ours is not None and flat is not None and ours >= flat:
            return (
                f"from {NAMES[guide]}, masked patches are reconstructed no better than by one flat colour, {what} "
                f"(L1 {ours:.4f}, against {flat:.4f})."
            )
    return ""


def _compared(model: str, values: Mapping[str, float], other: str, mask: str) -> list[Cell]:
    """Right caption against another guide; empty if the model does not use captions."""
    if f"right_beats_{other}@{mask}" not in values:
        return []
    difference, error = values[f"{other}_minus_right@{mask}"], values.get(f"{other}_minus_right_se@{mask}")
    beats = f"{values[f'right_beats_{other}@{mask}']:.1%}"
    return [model, NAMES[other], beats, number(difference), None if error is None else number(error)]


def _about(drawn: Mapping[str, Any]) -> str:
    text = "The first images of the data. Only masked patches are reconstructed; all others are the original's."
    if drawn["norm_pix"]:
        text += " This model predicts patches without mean and contrast: both are taken from the true patch."
    return paragraph(text)


def _card(example: PaintedExample) -> str:
    images = [(example.original, "original"), (covered(example.original, example.hidden), "hidden")]
    images += [(pixels, f"{NAMES[name]}: {example.losses[name]:.3f}") for name, pixels in example.painted.items()]
    return card(images, [f"a wrong caption: “{example.wrong}”"], strong=f"“{example.right}”")
