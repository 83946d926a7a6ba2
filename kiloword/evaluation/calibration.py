"""Rank correlations, and calibration of uncertainty: accuracy in bins of equal counts by uncertainty.

As in PCME++ (arXiv:2305.18171): ten bins, and the correlation between their means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


def binned(uncertainty: Tensor, right: Tensor, bins: int = 10) -> tuple[Tensor, Tensor]:
    """Sort N items by uncertainty, cut them into B bins whose counts differ by at most one, and average each.

    With fewer items than bins, each item is a bin. Items of equal uncertainty get their mean accuracy, so that the
    result does not depend on their order.

    Args: uncertainty [N]; right [N], probabilities of being right. Returns: uncertainty and accuracy, [B] double each.
    """
    values, which, counts = groups(uncertainty.double())
    mean = torch.zeros_like(values).index_add(0, which, right.double().cpu()) / counts
    parts = which.argsort().tensor_split(min(bins, len(which)))
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
    unique = np.unique(values.cpu().numpy(), return_inverse=True, return_counts=True)
    different, which, counts = map(torch.from_numpy, unique)
    return different, which, counts
