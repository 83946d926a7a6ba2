"""What a pair loss reads: features of rows and columns. Constants reach other ranks only when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kiloword.distributed.gather import gather_features
from kiloword.types import Features

CONSTANT = "_features."  # in the names of precomputed features, which have no gradient


def learns(name: str, value: Tensor) -> bool:
    """Whether a feature can have a gradient: precomputed features are constants."""
    return value.is_floating_point() and CONSTANT not in name


class LazyFeatures(dict[str, Tensor]):
    """Features, of which some are made when they are first read.

    Args: ready: features that are there; later: makes one by its name, or raises KeyError.
    """

    def __init__(self, ready: Mapping[str, Tensor], later: Callable[[str], Tensor]) -> None:
        super().__init__(ready)
        self.later = later

    def __missing__(self, name: str) -> Tensor:
        value = self[name] = self.later(name)
        return value

    def part(self, rows: slice, change: Callable[[str, Tensor], Tensor] = lambda _, x: x) -> LazyFeatures:
        """Some rows of every feature. Args: change: is applied to those that are there."""
        ready = {name: change(name, value[rows]) for name, value in self.items()}
        return LazyFeatures(ready, lambda name: self[name][rows])


@dataclass
class PairInputs:
    """This rank's side of the pairs: R rows, and C columns that every rank needs."""

    rows: Features  # [R, ...] with "vec" and "position"
    columns: Features  # [C, ...] likewise, gathered over ranks with their gradients
    constants: Features = field(default_factory=dict)  # [C, ...] precomputed, gathered when a loss reads them

    def gathered(self) -> LazyFeatures:
        """The columns of all ranks. A collective call, and so is the first reading of every constant."""

        def later(name: str) -> Tensor:
            return gather_features({name: self._constant(name)})[name]

        return LazyFeatures(gather_features(self.columns), later)

    def _constant(self, name: str) -> Tensor:
        if name not in self.constants:
            there = ", ".join(map(repr, {**self.columns, **self.constants}))
            raise ValueError(
                f"the loss reads {name!r}, which nothing provides: this batch has {there}. Precomputed features come "
                "from --features and the method's `needs`."
            )
        return self.constants[name]

    @staticmethod
    def join(parts: list[PairInputs]) -> PairInputs:
        """The inputs of several micro-batches as one, features as leaves of a new graph."""
        rows, columns, constants = zip(*((part.rows, part.columns, part.constants) for part in parts), strict=True)
        return PairInputs(_leaves(rows), _leaves(columns), _leaves(constants))


def _leaves(parts: Sequence[Features]) -> Features:
    whole = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    return {k: v.requires_grad_() if learns(k, v) else v for k, v in whole.items()}
