"""Sharing of work outside training steps (evaluation, embed, caption, mine); the result equals that of one process.

Batches and blocks are those of one process; ranks take them in turns, and the results are in the order of one process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

from kiloword.distributed import collectives

Item = TypeVar("Item")
Result = TypeVar("Result")


# whether ranks share work, and whether all must call the model equally often
_mode: ContextVar[tuple[bool, bool]] = ContextVar("mode", default=(False, False))


@contextmanager
def sharing(lockstep: bool = False, on: bool = True) -> Iterator[None]:
    """Inside, the ranks share work; all of them must call the same functions in the same order.

    Args: lockstep: all ranks must call the model equally often, as a sharded model needs.
    """
    token = _mode.set((on and collectives.ranks() > 1, lockstep))
    try:
        yield
    finally:
        _mode.reset(token)


def alone() -> AbstractContextManager[None]:
    """Inside, this rank works alone again."""
    return sharing(on=False)


def share() -> tuple[int, int]:
    """This rank and the number of ranks that share work; (0, 1) where work is not shared."""
    return (collectives.rank(), collectives.ranks()) if _mode.get()[0] else (0, 1)


def is_first() -> bool:
    """Whether this rank does the work that is not shared, and prints."""
    return share()[0] == 0


def lockstep() -> bool:
    """Whether a rank without work must call the model too."""
    return all(_mode.get())


def own(items: Sequence[Item]) -> list[Item]:
    """This rank's items: ranks take them in turns."""
    rank, ranks = share()
    return list(items[rank::ranks])


def gathered(mine: Item) -> list[Item]:
    """Every rank's object, in rank order, on all of them; tensors must be on the CPU."""
    return collectives.objects(mine) if share()[1] > 1 else [mine]


def in_turns(items: Sequence[Item], do: Callable[[Item], Result]) -> Iterator[Result]:
    """Results of `do` for every item, in order, on all ranks; each computes its share. Results must be on the CPU."""
    rank, ranks = share()
    if ranks == 1:
        yield from map(do, items)
        return
    for first in range(0, len(items), ranks):
        mine = items[first + rank : first + rank + 1] or items[: lockstep()]
        yield from (made for [made] in gathered([do(item) for item in mine])[: len(items) - first])


def of_first(mine: Item) -> Item:
    """The first rank's object, on all ranks, which wait for it without timeout."""
    if share()[1] == 1:
        return mine
    collectives.wait(patient=True)
    return gathered(mine)[0]


def part_by_part(
    parts: Sequence[range], batch: int, make: Callable[[list[range]], Iterator[Result]]
) -> Iterator[list[Result]]:
    """For every part the results of its batches of rows, in order, on the first rank; empty lists on the others.

    Args: make: batches of rows -> one result each; it may work ahead. Each rank computes its share.
    """
    rank, ranks = share()
    number = itertools.count()
    batches = [[(next(number), part[n : n + batch]) for n in range(0, len(part), batch)] for part in parts]
    mine = [[(n, rows) for n, rows in part if n % ranks == rank] for part in batches]
    results = make([rows for part in mine for _, rows in part])
    for part in mine:
        made = [(n, next(results)) for n, _ in part]
        every: list[Any] | None = None if rank else [made] * ranks
        if ranks > 1:
            dist.gather_object(made, every)
        pairs = (pair for items in every or () for pair in items)
        yield [result for _, result in sorted(pairs, key=lambda pair: pair[0])]


@contextmanager
def together(device: str) -> Iterator[None]:
    """For a command that torchrun or srun started several times: the ranks share its work, only the first one prints.

    The others wait at the end for as long as the first one takes.
    """
    with collectives.process_group(device), sharing(), ExitStack() as stack:
        if collectives.rank():
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
        collectives.wait(patient=True)
