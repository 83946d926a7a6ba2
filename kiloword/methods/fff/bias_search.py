"""Search the initial bias of least pair loss of an untrained model. Source: arXiv:2405.10286, section 4.4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kiloword.distributed.collectives import sum_over_ranks
from kiloword.losses.pairs import PairInputs
from kiloword.methods.method import PAIR
from kiloword.types import Batch

if TYPE_CHECKING:
    from kiloword.training.step import Learner

Inputs = Sequence[PairInputs]  # of each batch
LEAST, MOST = -40.0, 20.0  # range of the search
STEPS = (1.0, 0.1, 0.02)  # of successive grids, each around the best value of the previous one
EDGE, NOTHING = 0.5, 1e-5  # this close to the ends, or below this loss, nearly all pairs are of one class
ABOVE = (
    "A bias above 0 predicts a match at cosine 0; where few pairs match, the best bias is below 0. If positives are "
    "mined, are the thresholds too low? `kiloword mine SRC --features DIR --out OUT --calibrate` proposes some."
)
CLOSE = 1e-4  # tolerance of the descent


def search(learner: Learner, batches: Iterator[Batch], how: Literal["grid", "gradient"], n: int) -> str:
    """Set the head's bias to the minimum of the mean pair loss over the first `n` batches; nothing else changes.

    The result is the same on every rank: losses and gradients are sums over ranks. The loss must be convex in the bias,
    as sigmoid losses are. grid: three grids and a parabola through the best value and its neighbours; gradient:
    bracketed descent with secant steps.
    Returns: a message for the log, with a warning if nearly all pairs are of one class or the head has no bias.
    """
    bias = learner.model.head.bias
    if bias is None:
        return "no bias was searched: the pair loss has none."
    with torch.no_grad():
        inputs = [learner.contrasts[PAIR].inputs(learner.model, b, learner.encode(b)) for b in islice(batches, n)]  # type: ignore[operator]
    before, losses = float(bias.detach()), partial(_losses, learner, inputs, bias)
    if how == "grid":
        best = _by_grid(losses)
    else:
        best = _by_gradient(partial(_slope, learner, inputs, bias), min(max(before, LEAST), MOST))
    first, last = (losses([value])[0] for value in (before, best))  # leaves the bias at the best value
    message = f"bias {before:.4g} -> {best:.4g} ({how} over {len(inputs)} batches, loss {first:.4g} -> {last:.4g})"
    if last > NOTHING and LEAST + EDGE < best < MOST - EDGE:
        return message if best <= 0 else f"{message}. {ABOVE}"
    which = "no" if best < 0 else "every"
    return (
        f"{message}. The bias alone minimises the loss, as nearly {which} pair matches, so there is little to learn: "
        "do the thresholds fit the teacher? `kiloword mine SRC --features DIR --out OUT --calibrate` proposes some."
    )


def _losses(learner: Learner, inputs: Inputs, bias: Tensor, at: list[float]) -> list[float]:
    """Mean loss at each bias value; leaves the bias at the last one."""
    shares = []
    with torch.no_grad():
        for value in at:
            bias.fill_(value)
            shares.append(torch.stack([learner.pair_losses({PAIR: one})[PAIR] for one in inputs]).mean())
    losses: list[float] = sum_over_ranks(torch.stack(shares).double()).tolist()
    return losses


def _slope(learner: Learner, inputs: Inputs, bias: Tensor, at: float) -> float:
    """Derivative of the mean loss by the bias."""
    with torch.no_grad():
        bias.fill_(at)
    shares = [torch.autograd.grad(learner.pair_losses({PAIR: one})[PAIR], bias)[0].sum() for one in inputs]
    return float(sum_over_ranks(torch.stack(shares).mean().double()))


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


def _by_gradient(slope_at: Callable[[float], float], at: float) -> float:
    """Each step goes to the zero of the secant of the last two slopes, or to the middle of the bracket if outside."""
    least, most = LEAST, MOST
    last: tuple[float, float] | None = None
    while most - least > CLOSE:
        slope = slope_at(at)
        least, most = (at, most) if slope < 0 else (least, at)
        following = (least + most) / 2
        if last is not None and slope != last[1]:
            aim = at - slope * (at - last[0]) / (slope - last[1])
            following = aim if least < aim < most else following
        last, move, at = (at, slope), abs(following - at), following
        if move < CLOSE:
            break
    return at
