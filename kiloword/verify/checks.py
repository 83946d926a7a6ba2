"""The result of a check, how gradients and states are compared, and the causes of failures that are known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-10  # of the largest gradient, in fp64

NOT_ADDITIVE = (
    "The {what} of the term {name} for a batch is not the sum of those for its parts: it relates examples to each "
    "other, like a contrast of images with images, or is a mean, not a sum. A term sees one micro-batch of one rank."
)
WRONG_SIGN = "The loss {name}, trained alone, {what}: is its sign wrong? The least value of a loss is 0 here."
RANDOM_INPUT = "A transform or input draws from a global generator, or keeps state: draw by draw.rng('a purpose')."
RANDOM_LOSS = (
    "The same step, repeated, is another, so that nothing else was compared: a loss draws from a global generator. "
    "Draw by kiloword.randomness.uniform(batch.seeds, 'a purpose', n)."
)
NO_DERIVATIVE = "The gradient is not the derivative of the loss: a loss returns a wrong one, or detaches a part."
OTHER_STATE = "What after_step leaves depends on the ranks or micro-batches: add sums and counts by sum_over_ranks."


@dataclass(frozen=True)
class Check:
    """One property: what was measured, and what it may be at most."""

    name: str
    value: float
    limit: float
    cause: str = ""  # of a failure, where it is known
    where: str = ""  # the failure is: tensors, inputs

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # False for NaN


def compare(name: str, measured: dict[str, Tensor], reference: dict[str, Tensor]) -> Check:
    """The largest difference, relative to the largest gradient (losses and states: to themselves)."""
    if measured.keys() != reference.keys():
        where = some(sorted(measured.keys() ^ reference.keys()))
        return Check(f"{name}: other parameters have gradients", float("inf"), EXACT, where=where)
    largest = most(float(g.abs().max()) for n, g in reference.items() if ":" not in n)
    errors = {
        n: float((measured[n] - g).abs().max()) / (max(float(g.abs().max()), 1e-12) if ":" in n else largest)
        for n, g in reference.items()
    }
    worst = max(errors, key=lambda n: float("inf") if math.isnan(errors[n]) else errors[n])
    state = worst.startswith("state:")
    return Check(name, most(errors.values()), EXACT, OTHER_STATE if state else "", f"largest in {worst}")


def most(values: Iterable[float]) -> float:
    """The largest; NaN where any is, which `max` returns only in the first place."""
    return float(torch.tensor(list(values), dtype=torch.float64).amax())


def some(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
