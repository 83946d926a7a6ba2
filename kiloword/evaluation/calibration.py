"""Calibration of uncertainty: accuracy in bins of equal counts by uncertainty.

As in PCME++ (arXiv:2305.18171): ten bins, and the correlation between their means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BINS = 10
LEAST = 3  # bins needed for a correlation: two points always lie on a line


@dataclass(frozen=True)
class Bins:
    """B bins from certain to uncertain. All [B] double."""

    uncertainty: Tensor  # mean sum of variances
    right: Tensor  # accuracy, in [0, 1]
    counts: Tensor  # number of items


def binned(uncertainty: Tensor, right: Tensor, bins: int = BINS) -> Bins:
    """Sort N items by uncertainty and cut them into bins whose counts differ by at most one.

    With fewer items than bins, each item is a bin. Items of equal uncertainty get their mean accuracy, so that the
    result does not depend on their order.

    Args: uncertainty [N]; right [N], probabilities of being right, in [0, 1].
    Errors: ValueError without items.
    """
    if not len(uncertainty):
        raise ValueError("calibration got no items: it needs at least one")
    values, which, counts = groups(uncertainty.double())
    mean = torch.zeros_like(values).index_add(0, which, right.double().cpu()) / counts
    order = which.argsort()
    parts = order.tensor_split(min(bins, len(order)))
    return Bins(
        torch.stack([values[which[part]].mean() for part in parts]),
        torch.stack([mean[which[part]].mean() for part in parts]),
        torch.tensor([float(len(part)) for part in parts], dtype=torch.float64),
    )


def intervals(bins: Bins) -> list[tuple[float, float]]:
    """The 95% interval of the accuracy of each bin (Wilson, 1927), which is wide for 0 and 1 of few items, too."""
    p, n, z = bins.right, bins.counts, 1.96
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * (p * (1 - p) / n + z * z / (4 * n * n)).sqrt() / (1 + z * z / n)
    return list(zip((middle - half).clamp(min=0).tolist(), (middle + half).clamp(max=1).tolist(), strict=True))


def calibration(name: str, bins: Bins) -> Iterator[tuple[str, float]]:
    """Yield `NAME_pearson`, `NAME_spearman` between bin means, then `NAME_uncertainty@k` and `NAME_right@k` of bin k.

    Negative correlations are good: accuracy falls with uncertainty. Bin 1 is the most certain. The correlations are
    omitted below three bins, and where all bins have equal uncertainty or equal accuracy.
    """
    if len(bins.right) >= LEAST:
        yield from defined(f"{name}_pearson", pearson(bins.uncertainty, bins.right))
        yield from defined(f"{name}_spearman", spearman(bins.uncertainty, bins.right))
    for k, (u, right) in enumerate(zip(bins.uncertainty.tolist(), bins.right.tolist(), strict=True), start=1):
        yield f"{name}_uncertainty@{k}", u
        yield f"{name}_right@{k}", right


def defined(name: str, value: float) -> Iterator[tuple[str, float]]:
    """Yield the value under its name, unless it is NaN."""
    if not math.isnan(value):
        yield name, value


def pearson(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of [N] and [N], in [-1, 1]; NaN where one of them is constant or N is below 2."""
    x, y = a.double().cpu(), b.double().cpu()
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
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
    mean = counts.cumsum(0) - (counts - 1) / 2
    return mean.double()[which]


def groups(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group equal values [N]: unique values, ascending, [G]; group index of each, [N]; counts, [G]."""
    unique = np.unique(values.cpu().numpy(), return_inverse=True, return_counts=True)
    different, which, counts = map(torch.from_numpy, unique)
    return different, which, counts
