"""HTML page of the task `reconstruction`: metrics, and images with their reconstructions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kiloword.evaluation.command import number
from kiloword.evaluation.task import Results
from kiloword.report import card, page, remark, section, table
from kiloword.report.images import Pixels
from kiloword.report.overlay import covered

SHOWN = 8  # images per kind of mask
NAMES = {"right": "its caption", "wrong": "a wrong caption", "none": "no caption"}
MASKS = {
    "attentive": "The patches most similar to the right caption are masked",
    "random": "Random patches are masked",
}
FLAT = {"own_mean": "each patch's true mean", "mean_colour": "the mean of the visible patches"}
ABOUT = "The first images of the data. Only masked patches are reconstructed; all others are the original's."
OF_NORM_PIX = " This model predicts patches without mean and contrast: both are taken from the true patch."


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


def report(metrics: Results, data: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """HTML page of one or several models."""
    truth = any(drawn["truth"] for drawn in shown.values())
    wrong = "another image's caption, false of this one" if truth else "another image's caption"
    sections = [section(title, *_numbers(metrics, mask)) for mask, title in MASKS.items()]
    for model, drawn in shown.items():
        of = f" – {model}" if len(shown) > 1 else ""
        for mask, title in MASKS.items():
            cards = [_card(example) for example in drawn["examples"] if example.mask == mask]
            about = ABOUT + (OF_NORM_PIX if drawn["norm_pix"] else "")
            sections.append(section(f"Images{of}: {title[0].lower()}{title[1:]}", about, *cards))
    intro = (
        f"Some patches of each image of {data} are masked; the model reconstructs them from the other patches and a "
        "caption. If it uses captions, the right one gives a better reconstruction than a wrong one "
        f"({wrong}) and than none (the empty caption). The same patches are masked for all three.\n\n"
        "L1 is the mean absolute difference over the masked patches, in normalised pixels (mean 0, deviation 1); "
        "lower is better."
    )
    return page("Reconstructing masked patches", intro, sections)


def _numbers(metrics: Results, mask: str) -> Iterator[str]:
    """Losses of all models with one kind of mask, and the right caption against the other guides."""
    names = (*NAMES, "mean_colour", "mean_image")
    rows = [[m, *(values.get(f"reconstruction_l1_{n}@{mask}") for n in names)] for m, values in metrics.items()]
    yield table(rows, ["L1", *NAMES.values(), "mean colour seen", "mean image"], digits=4)
    for model, values in metrics.items():
        if warning := worse_than_flat(values, mask):
            yield remark(f"{model}: {warning}")
    if mask == "attentive" and len(metrics) > 1:
        yield "Each model masks the patches that it finds most similar to the caption: compare models by random masks."
    pairs = [(m, values, other) for m, values in metrics.items() for other in ("wrong", "none")]
    compared = [_compared(*pair, mask) for pair in pairs if f"right_beats_{pair[2]}@{mask}" in pair[1]]
    yield table(
        compared, ["image by image", "against", "right is better in", "L1 more than by right", "± standard error"]
    )
    if not compared:
        yield "Trained without text: the reconstruction does not depend on the caption."


def _compared(model: str, values: Mapping[str, float], other: str, mask: str) -> list[str | None]:
    """A row: right caption against another guide."""
    difference, error = values[f"{other}_minus_right@{mask}"], values.get(f"{other}_minus_right_se@{mask}")
    beats = f"{values[f'right_beats_{other}@{mask}']:.1%}"
    return [model, NAMES[other], beats, number(difference), None if error is None else number(error)]


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


def _card(example: PaintedExample) -> str:
    images = [(example.original, "original"), (covered(example.original, example.hidden), "hidden")]
    images += [(pixels, f"{NAMES[name]}: {example.losses[name]:.3f}") for name, pixels in example.painted.items()]
    return card(images, [f"a wrong caption: “{example.wrong}”"], strong=f"“{example.right}”")
