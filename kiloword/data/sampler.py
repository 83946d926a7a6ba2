"""The order of rows, and of an image's captions: functions of (seed, epoch) alone.

Therefore the number of the step suffices to resume a run on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from kiloword.randomness import Draw, generator, key, permutation

RowNumbers = np.ndarray[tuple[int], np.dtype[np.int64]]

FULL_SHUFFLE = 100_000  # largest number of rows with one permutation of all rows
BLOCK = 512  # consecutive rows that are read close together
GROUP = 64  # blocks whose rows are shuffled together
_LEHMER = 20  # 20! < 2^63: one key holds a whole permutation


@dataclass(frozen=True)
class Order:
    """The rows of each global batch.

    Every epoch visits each row at most once and drops an incomplete last batch. Small data sets get a permutation of
    all rows; in large ones blocks of consecutive rows are shuffled, then the rows within groups of blocks.

    Args: rows: that are visited; of: rows of the data set, of which they are a fixed subset (0: all); batch: global
    batch size; full, block, group: see FULL_SHUFFLE, BLOCK, GROUP.
    Errors: ValueError when the batch is larger than the data set.
    """

    rows: int
    batch: int
    seed: int = 0
    full: int = FULL_SHUFFLE
    block: int = BLOCK
    group: int = GROUP
    of: int = 0

    def __post_init__(self) -> None:
        if self.rows < self.batch:
            raise ValueError(
                f"the data set has {self.rows} usable rows, fewer than one batch of {self.batch}; "
                "use a smaller --batch or more data."
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.rows // self.batch

    def batch_rows(self, step: int) -> tuple[int, RowNumbers]:
        """The epoch of a step (from 0) and the rows [batch] of its global batch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.batch
        if self.rows <= self.full:
            return epoch, self.rows_at(_permutation(self, epoch)[start : start + self.batch])
        ends = _group_ends(self, epoch)
        first, last = np.searchsorted(ends, [start, start + self.batch - 1], side="right")
        places = np.concatenate([_group_rows(self, epoch, group) for group in range(first, last + 1)])
        start -= int(ends[first - 1]) if first else 0
        return epoch, self.rows_at(places[start : start + self.batch])

    def rows_at(self, places: RowNumbers) -> RowNumbers:
        """Rows of the data set at places, each below `rows`, in the subset that is visited."""
        return subset(self.rows, self.of)[places] if self.of > self.rows else places


def share(rows: RowNumbers, rank: int = 0, ranks: int = 1) -> RowNumbers:
    """The contiguous slice of a global batch [B], which they divide, for one rank."""
    return np.split(rows, ranks)[rank]


@lru_cache(maxsize=2)
def subset(rows: int, of: int) -> RowNumbers:
    """A fixed subset of a data set, ascending: the same for every seed, so that runs of several seeds compare."""
    return np.sort(permutation(of, of, "subset")[:rows]).astype(np.int64)


@lru_cache(maxsize=2)
def _permutation(order: Order, epoch: int) -> RowNumbers:
    return generator(order.seed, epoch, "order").permutation(order.rows)


@lru_cache(maxsize=2)
def _blocks(order: Order, epoch: int) -> RowNumbers:
    return generator(order.seed, epoch, "order", "blocks").permutation(-(-order.rows // order.block))


@lru_cache(maxsize=2)
def _group_ends(order: Order, epoch: int) -> RowNumbers:
    """Cumulative sizes of the groups; the group with the last block of the data set may be shorter."""
    blocks = _blocks(order, epoch)
    sizes = np.minimum(order.block, order.rows - blocks * order.block)
    firsts = np.arange(0, len(blocks), order.group)
    return np.cumsum(np.add.reduceat(sizes, firsts))


@lru_cache(maxsize=4)
def _group_rows(order: Order, epoch: int, group: int) -> RowNumbers:
    blocks = _blocks(order, epoch)[group * order.group : (group + 1) * order.group]
    rows = (blocks[:, None] * order.block + np.arange(order.block)).ravel()
    rows = rows[rows < order.rows]
    return generator(order.seed, epoch, "order", "group", group).permutation(rows)


def choose_captions(
    captions: Sequence[str], how: int | Literal["one", "all"], draw: Draw, first: bool = False
) -> list[str]:
    """One, N distinct (fewer if there are fewer), or all captions of the row that `draw` names.

    Captions are visited in an order keyed by (seed, row), so that over the epochs all come equally often. Args: first:
    take the first ones in every epoch instead (arXiv:2405.10286, table 6).
    """
    n = len(captions)
    wanted = 1 if how == "one" else n if how == "all" else how
    if wanted >= n or first:
        return list(captions[:wanted])
    order = _caption_order(key(draw.seed, draw.row, "captions"), n)
    start = draw.epoch * wanted
    return [captions[order[(start + j) % n]] for j in range(wanted)]


def _caption_order(number: int, n: int) -> list[int]:
    if n > _LEHMER:
        return [int(i) for i in np.random.Generator(np.random.Philox(number)).permutation(n)]
    left, order = list(range(n)), []
    for size in range(n, 0, -1):
        number, digit = divmod(number, size)
        order.append(left.pop(digit))
    return order
