"""Search the initial bias of least pair loss of an untrained model. Source: arXiv:2405.10286, section 4.4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch

from kiloword.distributed.collectives import sum_over_ranks
from kiloword.methods.method import PAIR
from kiloword.types import Batch

if TYPE_CHECKING:
    from kiloword.training.step import Learner

LEAST, MOST = -40.0, 20.0  # range of the search
STEPS = (1.0, 0.1, 0.02)  # of successive grids, each around the best value of the previous one
EDGE, NOTHING = 0.5, 1e-5  # this close to the ends, or below this loss, nearly all pairs are of one class
CLOSE = 1e-4  # tolerance of the bisection


def search(learner: Learner, batches: Iterator[Batch], how: Literal["grid", "gradient"], n: int) -> str:
    """Set the head's bias to the minimum of the mean pair loss over the first `n` batches; nothing else changes.

    The result is the same on every rank: losses and gradients are sums over ranks. The loss must be convex in the bias,
    as sigmoid losses are. grid: three grids and a parabola through the best value and its neighbours; gradient:
    bisection by the sign of the derivative.
    Returns: a message for the log, with a warning if nearly all pairs are of one class, or the bias is above 0.
    """
    bias: Any = learner.model.head.bias  # a method without one is refused
    contrast: Any = learner.contrasts[PAIR]
    with torch.no_grad():
        inputs = [contrast.inputs(learner.model, batch, learner.encode(batch)) for batch in islice(batches, n)]

    @torch.no_grad()
    def losses(at: list[float]) -> list[float]:
        """Mean loss at each bias value; leaves the bias at the last one."""
        shares = []
        for value in at:
            bias.fill_(value)
            shares.append(torch.stack([learner.pair_losses({PAIR: one})[PAIR] for one in inputs]).mean())
        means: list[float] = sum_over_ranks(torch.stack(shares).double()).tolist()
        return means

    def slope(at: float) -> float:
        """Derivative of the mean loss by the bias."""
        bias.data.fill_(at)
        shares = [torch.autograd.grad(learner.pair_losses({PAIR: one})[PAIR], bias)[0].sum() for one in inputs]
        return float(sum_over_ranks(torch.stack(shares).mean().double()))

    before = float(bias.detach())
    best = _by_grid(losses) if how == "grid" else _by_gradient(slope)
    first, last = (losses([value])[0] for value in (before, best))  # leaves the bias at the best value
    message = f"bias {before:.4g} -> {best:.4g} ({how} over {len(inputs)} batches, loss {first:.4g} -> {last:.4g})"
    if best <= 0 and last > NOTHING and LEAST + EDGE < best < MOST - EDGE:
        return message
    return (
        f"{message}. Where few pairs match, the best bias is below 0; at a loss of 0, or a bias near {LEAST:g} or "
        f"{MOST:g}, nearly no or every pair matches, so that there is little to learn. If positives are mined, do the "
        "thresholds fit the teacher? `kiloword mine SRC --features DIR --out OUT --calibrate` proposes some."
    )


def _by_grid(losses_at: Callable[[list[float]], list[float]]) -> float:
    """Three grids, then a parabola, which resolves finer than the rounding of the loss allows for a grid."""
    best, least, most = 0.0, LEAST, MOST
    for step in STEPS:
        grid = [least + step * n for n in range(round((most - least) / step) + 1)]
        losses = losses_at(grid)
        place = min(range(len(grid)), key=losses.__getitem__)
        best, least, most = grid[place], grid[place] - step, grid[place] + step
    if place in (0, len(grid) - 1):
        return best
    left, middle, right = losses[place - 1 : place + 2]
    bend = left - 2 * middle + right
    return best if bend <= 0 else best + step * (left - right) / (2 * bend)


def _by_gradient(slope_at: Callable[[float], float]) -> float:
    """The middle of ever smaller brackets at whose ends the slope is below and above 0."""
    least, most = LEAST, MOST
    while most - least > CLOSE:
        middle = (least + most) / 2
        least, most = (middle, most) if slope_at(middle) < 0 else (least, middle)
    return (least + most) / 2
