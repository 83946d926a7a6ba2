"""Work that ranks share outside training steps: evaluation, embed, caption, mine. The result is that of one process.

Work is cut as one process would cut it, so that every batch and block is the same; ranks take them in turns, and what
they make is put together in the order of one process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kiloword.distributed import collectives, heartbeat, launch

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass
class _Mode:
    """Whether ranks share, and whether all must make the same calls of the model."""

    on: bool = False
    lockstep: bool = False


_mode = _Mode()


@contextmanager
def _set(on: bool, lockstep: bool) -> Iterator[None]:
    before = (_mode.on, _mode.lockstep)
    _mode.on, _mode.lockstep = on, lockstep
    try:
        yield
    finally:
        _mode.on, _mode.lockstep = before


@contextmanager
def sharing(lockstep: bool = False) -> Iterator[None]:
    """Inside, the ranks share the work; all of them must do the same in the same order.

    Args: lockstep: every rank calls the model as often as the others: a sharded model computes together.
    """
    with _set(collectives.ranks() > 1, lockstep):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this rank works by itself again."""
    with _set(False, False):
        yield


def share() -> tuple[int, int]:
    """This rank and the number of ranks that share the work; (0, 1) where it is not shared."""
    return (collectives.rank(), collectives.ranks()) if _mode.on else (0, 1)


def is_first() -> bool:
    """Whether this rank does what is not shared, and speaks."""
    return share()[0] == 0


def lockstep() -> bool:
    """Whether a rank without work must call the model all the same."""
    return _mode.on and _mode.lockstep


def own(items: Sequence[Item]) -> list[Item]:
    """What this rank does of all items: ranks take turns."""
    rank, ranks = share()
    return list(items[rank::ranks])


def wait(where: str) -> None:
    """Until all ranks have come to a place that no command comes to twice, however long it takes one of them."""
    if share()[1] > 1:
        heartbeat.wait(where)


def gathered(mine: Item) -> list[Item]:
    """Every rank's object, in rank order, on all of them; tensors must be on the CPU."""
    if share()[1] == 1:
        return [mine]
    out: list[Any] = [None] * share()[1]
    dist.all_gather_object(out, mine)
    return out


def to_first(mine: Item) -> list[Item]:
    """Every rank's object, in rank order, on the first rank; none on the others."""
    if share()[1] == 1:
        return [mine]
    out: list[Any] | None = [None] * share()[1] if is_first() else None
    dist.gather_object(mine, out)
    return out or []


def in_turns(items: Sequence[Item], do: Callable[[Item], Made]) -> Iterator[Made]:
    """`do` of every item, in order, on all ranks; each has done its share. What is made must be on the CPU."""
    rank, ranks = share()
    if ranks == 1:
        yield from map(do, items)
        return
    for first in range(0, len(items), ranks):
        there = first + rank < len(items)
        made = do(items[first + rank]) if there else do(items[0]) if lockstep() else None
        for one in gathered(made if there else None)[: len(items) - first]:
            assert one is not None
            yield one


def sums(*mine: Tensor) -> list[Tensor]:
    """Each the sum over ranks; all of one dtype, on one device."""
    if share()[1] == 1:
        return list(mine)
    flat = collectives.sum_over_ranks(torch.cat([x.flatten() for x in mine]))
    parts = torch.split(flat, [x.numel() for x in mine])
    return [part.view_as(x) for part, x in zip(parts, mine, strict=True)]


class PartWriter(Protocol):
    """What writes a table part by part."""

    @property
    def missing(self) -> Sequence[int]:
        """Numbers of the parts that are not there."""

    def rows_of(self, number: int) -> range:
        """The rows of the data that a part is made of."""


def missing_parts(writer: PartWriter | None, what: str) -> tuple[list[int], list[range]]:
    """Numbers and rows of the parts that the first rank's writer lacks, on all ranks.

    Args: writer: None on the other ranks; what: the table, in a word, should one wait in vain.
    """
    mine = [] if writer is None else [(number, writer.rows_of(number)) for number in writer.missing]
    wait(f"at the start of its {what}")  # the first rank has read the parts that are there
    found = gathered(mine)[0]
    return [number for number, _ in found], [rows for _, rows in found]


@contextmanager
def interruptible(todo: Sequence[range], rows: int) -> Iterator[list[range]]:
    """An interruption (Ctrl-C) inside says how much of a table is kept; the caller adds each part that it wrote.

    Args: todo: rows of the parts to be written; rows: of the whole table.
    """
    written: list[range] = []
    try:
        yield written
    except KeyboardInterrupt:
        if not is_first():
            raise
        kept = rows - sum(map(len, todo)) + sum(map(len, written))
        raise KeyboardInterrupt(
            f"{kept:,} of {rows:,} rows are kept, the same command goes on with the others."
        ) from None


def part_by_part(
    parts: Sequence[range], batch: int, make: Callable[[list[range]], Iterator[Made]]
) -> Iterator[list[Made]]:
    """For every part what is made of its batches of rows, in order, on the first rank; nothing on the others.

    Args: make: of batches of rows, one thing each, made ahead as it likes; each rank makes its share.
    """
    rank, ranks = share()
    number = itertools.count()
    batches = [[(next(number), part[n : n + batch]) for n in range(0, len(part), batch)] for part in parts]
    mine = [[(n, rows) for n, rows in part if n % ranks == rank] for part in batches]
    made = make([rows for part in mine for _, rows in part])
    for part in mine:
        every = to_first([(n, next(made)) for n, _ in part])
        yield [one for _, one in sorted((pair for some in every for pair in some), key=lambda pair: pair[0])]


@contextmanager
def together(device: str) -> Iterator[None]:
    """A command that torchrun or srun started several times: the ranks share its work, the first one alone speaks.

    The others wait at the end for as long as the first one takes.
    Raises: ValueError for a device that is one of several.
    """
    if dist.is_initialized() or launch.adopt() == 1:
        yield
        return
    if ":" in device:
        raise ValueError(f"--device {device} is one card, but {os.environ['WORLD_SIZE']} ranks run: use --device cuda.")
    with collectives.process_group(device), ExitStack() as stack:
        stack.enter_context(sharing())
        if collectives.rank():
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
        wait("at the end of the command")
