"""What a pair loss reads: features of rows and columns. Constants reach other ranks only when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kiloword.distributed.collectives import rank, ranks
from kiloword.distributed.gather import gather_features, row_counts
from kiloword.types import Features

CONSTANT = "_features."  # in the names of precomputed features, which have no gradient


def learns(name: str, value: Tensor) -> bool:
    """Whether a feature can have a gradient: precomputed features are constants."""
    return value.is_floating_point() and CONSTANT not in name


class LazyFeatures(dict[str, Tensor]):
    """Features, of which some are made when they are first read.

    Args: ready: features that are there; later: makes one by its name, or raises KeyError.
    """

    def __init__(self, ready: Mapping[str, Tensor], later: Callable[[str], Tensor] | None = None) -> None:
        super().__init__(ready)
        self.later = later

    def __missing__(self, name: str) -> Tensor:
        try:
            if self.later is None:
                raise KeyError(name)
            value = self.later(name)
        except KeyError:
            raise ValueError(
                f"the loss reads {name!r}, which nothing provides: this batch has {', '.join(map(repr, self))}. "
                "Precomputed features come from --features and the method's `needs`."
            ) from None
        self[name] = value
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
    row_of_column: Tensor | None = None  # [C] int64: a column has the precomputed features of this row, too

    def gathered(self) -> LazyFeatures:
        """The columns of all ranks. A collective call, and so is the first reading of every constant."""
        return LazyFeatures(gather_features(self.columns), self._gathered_constant)

    def here(self) -> Features:
        """The columns of this rank with all their constants."""
        of = {} if self.row_of_column is None else {k: self.rows[k][self.row_of_column] for k in self._of_rows()}
        return {**self.columns, **of, **self.constants}

    def _of_rows(self) -> list[str]:
        return [name for name in self.rows if CONSTANT in name]

    def _gathered_constant(self, name: str) -> Tensor:
        if name in self.constants:
            return gather_features({name: self.constants[name]})[name]
        if self.row_of_column is None or CONSTANT not in name:
            raise KeyError(name)
        before = sum(row_counts(len(self.rows["position"]))[: rank()]) if ranks() > 1 else 0
        row = gather_features({"row": self.row_of_column + before})["row"]
        return gather_features({name: self.rows[name]})[name][row]

    @staticmethod
    def join(parts: list[PairInputs]) -> PairInputs:
        """The inputs of several micro-batches as one, features as leaves of a new graph."""
        first, ofs = parts[0], list[Tensor]()
        before = 0
        for part in parts if first.row_of_column is not None else ():
            assert part.row_of_column is not None
            ofs.append(part.row_of_column + before)
            before += len(part.rows["position"])
        return PairInputs(
            _leaves([part.rows for part in parts]),
            _leaves([part.columns for part in parts]),
            _leaves([part.constants for part in parts]),
            torch.cat(ofs) if ofs else None,
        )


def _leaves(parts: list[Features]) -> Features:
    whole = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    return {k: v.requires_grad_() if learns(k, v) else v for k, v in whole.items()}
