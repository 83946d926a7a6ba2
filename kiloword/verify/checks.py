"""The result of a check, and how gradients and states are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-10  # of the largest gradient, in fp64


@dataclass(frozen=True)
class Check:
    """One property: what was measured, and what it may be at most."""

    name: str
    value: float
    limit: float
    where: str = ""  # the failure is: names of tensors

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # False for NaN


def compare(name: str, measured: dict[str, Tensor], reference: dict[str, Tensor]) -> Check:
    """The largest difference, relative to the largest gradient (losses and states: to themselves)."""
    if others := sorted(measured.keys() ^ reference.keys()):
        return Check(f"{name}: other parameters have gradients", float("inf"), EXACT, ", ".join(others[:3]))
    largest = most(float(g.abs().max()) for n, g in reference.items() if ":" not in n)
    errors = {
        n: float((measured[n] - g).abs().max()) / (max(float(g.abs().max()), 1e-12) if ":" in n else largest)
        for n, g in reference.items()
    }
    worst = max(errors, key=lambda n: float("inf") if math.isnan(errors[n]) else errors[n])
    return Check(name, most(errors.values()), EXACT, f"largest in {worst}")


def most(values: Iterable[float]) -> float:
    """The largest; NaN where any is, which `max` returns only in the first place."""
    return float(torch.tensor(list(values), dtype=torch.float64).amax())
