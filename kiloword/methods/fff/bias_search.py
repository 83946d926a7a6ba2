"""The bias with which an untrained model starts at its lowest pair loss. Source: arXiv:2405.10286, section 4.4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kiloword.distributed.collectives import sum_over_ranks
from kiloword.types import Batch, Features

if TYPE_CHECKING:
    from kiloword.training.learner import Learner

LEAST, MOST = -40.0, 20.0  # where the bias is looked for
STEPS = (1.0, 0.1, 0.02)  # of the grids, each around the best of the one before
EDGE, NOTHING = 0.5, 1e-5  # this near to the ends, or at such a loss, nearly all pairs are of one kind
ABOVE = (
    "A bias above 0 takes a pair of cosine 0 for a match; where few pairs match, it ends below 0. Where positives are "
    "mined, are the thresholds too low? `kiloword mine SRC --side DIR --out OUT --calibrate` proposes some."
)
CLOSE = 1e-4  # where descent ends


def search(learner: Learner, batches: Iterator[Batch], how: Literal["grid", "gradient"], n: int) -> str:
    """Set the head's bias to where the mean pair loss over the first `n` batches is least; all else stays.

    The same on every rank: losses and gradients are sums over ranks. The loss must be convex in the bias, as sigmoid
    losses are. grid: three grids and a parabola through the best and its neighbours; gradient: descent with secant
    steps, held in a bracket.
    Returns: words for the log; where another pair loss has taken the bias away, that there is none; a warning where
    all pairs are of one kind.
    """
    bias = learner.model.head.bias
    if bias is None:
        return "no bias was searched: the pair loss has none."
    with torch.no_grad():
        inputs = [learner.pair_inputs(learner.encode(b), b) for b in islice(batches, n)]
    before = float(bias.detach())
    found = _by_grid(learner, inputs, bias) if how == "grid" else _by_gradient(learner, inputs, bias)
    first, last = (_losses(learner, inputs, bias, [value])[0] for value in (before, found))  # leaves the bias found
    said = f"bias {before:.4g} -> {found:.4g} ({how} over {len(inputs)} batches, loss {first:.4g} -> {last:.4g})"
    if last > NOTHING and LEAST + EDGE < found < MOST - EDGE:
        return said if found <= 0 else f"{said}. {ABOVE}"
    which = "no" if found < 0 else "every"
    return (
        f"{said}. The bias alone does it, as nearly {which} pair matches, so there is little to learn: do the "
        "thresholds fit the teacher? `kiloword mine SRC --side DIR --out OUT --calibrate` finds some that do."
    )


def _losses(
    learner: Learner, inputs: Sequence[tuple[Features, Features]], bias: Tensor, at: list[float]
) -> list[float]:
    """The mean loss with each of some biases; the last one stays."""
    shares = []
    with torch.no_grad():
        for value in at:
            bias.fill_(value)
            shares.append(torch.stack([learner.pair_loss(*pair)["pair"] for pair in inputs]).mean())
    found: list[float] = sum_over_ranks(torch.stack(shares).double()).tolist()
    return found


def _by_grid(learner: Learner, inputs: Sequence[tuple[Features, Features]], bias: Tensor) -> float:
    """A grid resolves no more than the loss's rounding allows; the parabola is finer than its last step."""
    best, least, most = 0.0, LEAST, MOST
    for step in STEPS:
        grid = [least + step * n for n in range(round((most - least) / step) + 1)]
        losses = _losses(learner, inputs, bias, grid)
        place = min(range(len(grid)), key=losses.__getitem__)
        best, least, most = grid[place], grid[place] - step, grid[place] + step
    if place in (0, len(grid) - 1):
        return best
    left, middle, right = losses[place - 1 : place + 2]
    bend = left - 2 * middle + right
    return best if bend <= 0 else best + step * (left - right) / (2 * bend)


def _by_gradient(learner: Learner, inputs: Sequence[tuple[Features, Features]], bias: Tensor) -> float:
    """Each step goes where the secant of the last two slopes meets zero, or to the bracket's middle if that is out."""
    least, most, here = LEAST, MOST, float(bias.detach().clamp(LEAST, MOST))
    last: tuple[float, float] | None = None
    while most - least > CLOSE:
        slope = _slope(learner, inputs, bias, here)
        least, most = (here, most) if slope < 0 else (least, here)
        there = (least + most) / 2
        if last is not None and slope != last[1]:
            aim = here - slope * (here - last[0]) / (slope - last[1])
            there = aim if least < aim < most else there
        last, move, here = (here, slope), abs(there - here), there
        if move < CLOSE:
            break
    return here


def _slope(learner: Learner, inputs: Sequence[tuple[Features, Features]], bias: Tensor, at: float) -> float:
    """The derivative of the mean loss by the bias."""
    with torch.no_grad():
        bias.fill_(at)
    shares = [torch.autograd.grad(learner.pair_loss(*pair)["pair"], bias)[0].sum() for pair in inputs]
    return float(sum_over_ranks(torch.stack(shares).mean().double()))
