"""Metrics as pure functions of scores. Ties get their expected value over every order of the tied items.

So a constant score gives chance level, and without ties the values equal CLIP_benchmark's. Hits and accuracy treat
scores that differ only by rounding as tied: a matrix product can round equal rows differently in different blocks.
Also rank correlations, and calibration of uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Standing(NamedTuple):
    """Rank of the best positive of every query, with ties. All [N] int64."""

    higher: Tensor  # items scoring strictly higher
    tied: Tensor  # items with its score up to rounding, itself included
    positives: Tensor  # positives among the tied; 0: the query has none


def check_scores(scores: Tensor) -> Tensor:
    """Return the scores. Raises: ValueError for NaN, which cannot be ranked."""
    if bool(scores.isnan().any()):
        raise ValueError("scores are NaN: nothing can be ranked; the weights or the features hold NaN or infinity")
    return scores


def rounding(best: Tensor) -> Tensor:
    """Largest rounding difference of two equal scores: 4 units in the last place of a number of at least 1.

    Measured: cosines of unit vectors of up to 1152 dimensions differed by 1.5 units between block shapes.
    """
    return 4 * torch.finfo(torch.promote_types(best.dtype, torch.float32)).eps * best.abs().clamp(min=1)


def standing(scores: Tensor, positive: Tensor) -> Standing:
    """Count items above and tied with the best positive.

    Args: scores [N, C], higher = better; positive [N, C] bool.
    """
    best = check_scores(scores).masked_fill(~positive, -torch.inf).amax(1, keepdim=True)  # [N, 1]
    higher = scores > best + rounding(best)
    tied = (scores >= best - rounding(best)) & ~higher
    return Standing(higher.sum(1), tied.sum(1), (tied & positive).sum(1))


def hit(where: Standing, k: int) -> Tensor:
    """Probability that a positive is among the first k, over all orders of ties: [N] float64 in [0, 1].

    With m tied items, p of them positive, and s places left for them, it is 1 - C(m - p, s) / C(m, s).
    A query without a positive is a miss, as in CLIP_benchmark.
    """
    places = k - where.higher
    missed = torch.ones_like(places, dtype=torch.float64)
    for j in range(k):
        share = (where.tied - where.positives - j).clamp(min=0) / (where.tied - j).clamp(min=1).double()
        missed = torch.where(j < places, missed * share, missed)
    return torch.where(where.positives > 0, 1 - missed, 0)


def recall_at(scores: Tensor, positive: Tensor, k: int) -> Tensor:
    """Recall@k: whether any positive is among the first k, [N] float64. Args: scores [N, C]; positive [N, C] bool."""
    return hit(standing(scores, positive), k)


def _ranked(scores: Tensor, relevant: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every place of a ranking [N, C]: where its group of tied items starts and its size, and how many relevant
    items are ahead of the group and in it.
    """
    order = check_scores(scores).argsort(descending=True)
    rising = -scores.gather(1, order)
    start, end = torch.searchsorted(rising, rising), torch.searchsorted(rising, rising, right=True)
    cumulative = relevant.gather(1, order).double().cumsum(1)
    cumulative = torch.nn.functional.pad(cumulative, (1, 0))  # [N, C + 1]: relevant items in the first n places
    before = cumulative.gather(1, start)
    return start, end - start, before, cumulative.gather(1, end) - before


def average_precision(scores: Tensor, relevant: Tensor, at_r: bool = False) -> Tensor:
    """Non-interpolated average precision: the precision at every relevant item, averaged.

    Args: scores [N, C]; relevant [N, C] bool; at_r: of R relevant items, those beyond place R count 0 (mAP@R,
    arXiv:2204.03359, section 5). Returns: [N] float64 in [0, 1]; 0 where nothing is relevant.
    Ties: the expectation over their orders. A place of a group of n with r relevant, j places into it, is relevant
    with chance r / n, and then expects j (r - 1) / (n - 1) relevant ones ahead of it in the group.
    """
    start, size, before, inside = _ranked(scores, relevant)
    place = torch.arange(scores.shape[1], device=scores.device)
    ahead = (place - start) * (inside - 1) / (size - 1).clamp(min=1)
    expected = inside / size * ((before + ahead + 1) / (place + 1))
    total = relevant.sum(1)
    if at_r:
        expected = expected.masked_fill(place >= total[:, None], 0)
    return expected.sum(1) / total.clamp(min=1)


def r_precision(scores: Tensor, relevant: Tensor) -> Tensor:
    """Share of relevant items among the first R, of R relevant ones, in expectation over ties: [N] float64.

    Args: scores [N, C]; relevant [N, C] bool, any in each row.
    """
    _, size, _, inside = _ranked(scores, relevant)
    total = relevant.sum(1)
    beyond = torch.arange(scores.shape[1], device=scores.device) >= total[:, None]
    return (inside / size).masked_fill(beyond, 0).sum(1) / total


def binned(uncertainty: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Sort N items by uncertainty, cut them into 10 bins whose counts differ by at most one, and average each.

    With fewer items than bins, each item is a bin. Items of equal uncertainty get their mean accuracy, so that the
    result does not depend on their order.

    Args: uncertainty [N]; right [N], probabilities of being right. Returns: both of each bin, double.
    """
    values, which, counts = groups(uncertainty.double())
    mean = torch.zeros_like(values).index_add(0, which, right.double().cpu()) / counts
    parts = which.argsort().tensor_split(min(10, len(which)))
    means = [[of[which[part]].mean() for part in parts] for of in (values, mean)]
    return torch.stack(means[0]), torch.stack(means[1])


def calibration(name: str, uncertainty: Tensor, right: Tensor) -> Iterator[tuple[str, float]]:
    """Yield `NAME_pearson`, `NAME_spearman` of the means of bins, then these: `NAME_uncertainty@k` and `NAME_right@k`.

    Negative correlations are good: accuracy falls with uncertainty. Bin 1 is the most certain. The correlations are
    omitted below three bins (two points always lie on a line), and where all bins have equal means. Args: of `binned`.
    """
    bins = binned(uncertainty, right)
    if len(bins[0]) >= 3:
        yield from defined(f"{name}_pearson", pearson(*bins))
        yield from defined(f"{name}_spearman", spearman(*bins))
    for k, (mean, share) in enumerate(zip(*(values.tolist() for values in bins), strict=True), start=1):
        yield f"{name}_uncertainty@{k}", mean
        yield f"{name}_right@{k}", share


def defined(name: str, value: float) -> Iterator[tuple[str, float]]:
    """Yield the value under its name, unless it is NaN."""
    if not math.isnan(value):
        yield name, value


def pearson(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of [N] and [N], in [-1, 1]; NaN where one of them is constant or empty."""
    x, y = a.double().cpu(), b.double().cpu()
    if not len(x) or x.min() == x.max() or y.min() == y.max():
        return math.nan
    x, y = x - x.mean(), y - y.mean()
    x, y = x / x.abs().max(), y / y.abs().max()  # or squares of tiny variances would underflow
    return float(x @ y / ((x @ x) * (y @ y)).sqrt())


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation of [N] and [N]: Pearson's of their ranks, NaN as there."""
    return pearson(ranks(a), ranks(b))


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1, [N] double; equal values share their mean rank."""
    _, which, counts = groups(values)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[which]


def groups(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group equal values [N]: unique values, ascending, [G]; group index of each, [N]; counts, [G]."""
    different, which, counts = torch.unique(values.cpu(), return_inverse=True, return_counts=True)
    return different, which, counts
