"""Does a gain hold, grow or vanish with size? On class photos from scratch (research/README.md).

`python -m research.scale --data tiny/train --val tiny/dev --out runs/scale`: 27 cells of width, photos and steps, two
arms each, of one seed; every value of width, photos and steps has all three seeds. The gain is fitted as a + b
log2(width) + c log2(photos) + d log2(steps), in units of the middle cell, so that a is the mean over cells. The
middle cell chose `RATE` (`--seeds 100 --rate 2 --arms ...`); the first runs had the default, `--rate 1`. `--control`
trains, in every cell, on the captions of classes alone, which the models are tested with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from kiloword.config.recipes import Recipe
from research.arms import Arm, Experiment, main
from research.arms_table import line
from research.classes import ClassOptions, base, classified, part
from research.evidence import Decision, Effect, Runs

WIDTHS, PHOTOS, STEPS, BATCH = (32, 64, 128), (10_000, 20_000, 40_000), (200, 400, 800), 128
HEAD = 16  # width of an attention head
RATE = 4.0  # times the default learning rate: in the middle cell the best for one caption, level with 2 for all
CLASSES_RATE = 2.0  # of the control: the best of 1, 2, 4, 8 there
T_23 = 2.0687  # 97.5% point of Student's t with 27 cells less 4 coefficients
LEVELS = (2, 4, 6)  # of the captions of a photo, one each
ONE, ALL, CLASSES = "one caption", "all captions", "captions of classes"
CELLS = [
    (width, photos, steps) for width in range(3) for photos in range(3) for steps in range(3)
]  # places in WIDTHS, PHOTOS, STEPS
TERMS = (
    "in the mean of the cells",
    "for each doubling of width",
    "for each doubling of photos",
    "for each doubling of steps",
)


def named(captions: str, cell: tuple[int, int, int]) -> str:
    """The arm of a cell."""
    width, photos, steps = cell
    return f"{captions}, width {WIDTHS[width]}, {PHOTOS[photos]} photos, {STEPS[steps]} steps"


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(ClassOptions):
    control: bool = False  # the captions of classes alone, in place of both other arms


def arms(options: ScaleOptions) -> list[Arm]:
    """Siglip on one redrawn caption of a photo, and on all three, in every cell; or the control."""

    def arm(captions: str, cell: tuple[int, int, int]) -> Arm:
        width, photos, steps = cell
        levels = LEVELS[-1:] if captions == CLASSES else LEVELS
        query = f"levels={','.join(map(str, levels))}&captions={len(levels)}"
        recipe = _wide(base(options, "siglip", query, STEPS[steps], BATCH), WIDTHS[width])
        recipe = replace(recipe, data=replace(recipe.data, captions="one" if captions == ONE else "all"))
        judge, source, seed = partial(classified, options), part(slice(PHOTOS[photos])), sum(cell) % 3
        rate, name = CLASSES_RATE if captions == CLASSES else RATE, named(captions, cell)
        return Arm(name=name, recipe=recipe, judge=judge, source=source, rate=rate, seed=seed)

    return [arm(captions, cell) for cell in CELLS for captions in ((CLASSES,) if options.control else (ONE, ALL))]


def _wide(recipe: Recipe, width: int) -> Recipe:
    """The recipe with both towers and the embedding of a width, in bf16."""
    towers = {
        name: replace(getattr(recipe.model, name), width=width, mlp=4 * width, heads=width // HEAD)
        for name in ("image", "text")
    }
    model = replace(recipe.model, **towers, head=replace(recipe.model.head, dim=width))
    return replace(recipe, model=model, precision="bf16")


@dataclass(frozen=True, kw_only=True)
class Slope:
    """One coefficient of the fitted gain, with its 95% interval by Student's t of the fit's residuals."""

    term: int  # place in TERMS
    over: str = ONE

    @property
    def says(self) -> str:
        return f"gain of all captions {'' if self.over == ONE else f'over {self.over} '}{TERMS[self.term]}"

    def lacks(self, runs: Runs) -> str:
        finished = sum(bool(runs.get(named(captions, cell))) for cell in CELLS for captions in (self.over, ALL))
        return "" if finished == 2 * len(CELLS) else f"{finished} of {2 * len(CELLS)} runs are finished"

    def decide(self, runs: Runs) -> Decision:
        gains = np.array([_top1(runs, named(ALL, cell)) - _top1(runs, named(self.over, cell)) for cell in CELLS])
        value, reach = (float(numbers[self.term]) for numbers in fitted(gains))
        effect = Effect(value, value - reach, value + reach)
        return Decision(self.says, "27 cells", effect, 0.0, effect.verdict(0.0))


def _top1(runs: Runs, name: str) -> float:
    (row,) = runs[name]
    metrics: Mapping[str, float] = row["metrics"]
    return metrics["top1"]


def fitted(gains: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Least-squares coefficients of TERMS [4], and the half-widths of their 95% intervals [4].

    Args: gains: [27], in the order of CELLS.
    """
    doublings = np.log2([[WIDTHS[w] / WIDTHS[1], PHOTOS[n] / PHOTOS[1], STEPS[s] / STEPS[1]] for w, n, s in CELLS])
    terms = np.column_stack([np.ones(len(CELLS)), doublings])
    inverse = np.linalg.inv(terms.T @ terms)
    coefficients: NDArray[np.float64] = inverse @ terms.T @ gains
    residuals, freedom = gains - terms @ coefficients, len(CELLS) - len(TERMS)
    deviations = np.sqrt(inverse.diagonal() * (residuals**2).sum() / freedom)
    return coefficients, T_23 * deviations


def summary(runs: Runs) -> list[str]:
    """For each value of width, photos and steps: the means over its cells that both arms finished."""
    done = [cell for cell in CELLS if all(runs.get(named(captions, cell)) for captions in (ONE, ALL))]
    groups = {"all": done} | {
        f"{value} {unit}": [cell for cell in done if cell[axis] == place]
        for axis, (unit, values) in enumerate({"wide": WIDTHS, "photos": PHOTOS, "steps": STEPS}.items())
        for place, value in enumerate(values)
    }
    heads = ["cells", ONE, ALL, "gain", "share of one caption", "cells with a gain", "processor time"]
    lines = [line(_means(name, cells, runs)) for name, cells in groups.items() if cells]
    return ["", line(heads), line(["---"] * len(heads)), *lines, ""]


def _means(name: str, cells: Sequence[tuple[int, int, int]], runs: Runs) -> list[str]:
    one, every = ([_top1(runs, named(captions, cell)) for cell in cells] for captions in (ONE, ALL))
    seconds = [sum(runs[named(captions, cell)][0]["cpu_s"] for cell in cells) for captions in (ONE, ALL)]
    gain = fmean(every) - fmean(one)
    ahead = sum(many > single for single, many in zip(one, every, strict=True))
    return [
        name,
        f"{fmean(one):.4f}",
        f"{fmean(every):.4f}",
        f"{gain:+.4f}",
        f"{gain / fmean(one):.0%}",
        f"{ahead} of {len(cells)}",
        f"{seconds[1] / seconds[0]:.2f} times",
    ]


EXPERIMENT = Experiment(
    module="research.scale",
    title="The gain of all captions by width, photos and steps",
    options=ScaleOptions,
    arms=arms,
    columns={"top-1": "top1"},
    summary=summary,
    claims=(*(Slope(term=term) for term in range(len(TERMS))), Slope(term=0, over=CLASSES)),
)

if __name__ == "__main__":
    main(EXPERIMENT)
