"""Work that ranks share, with three threads as ranks: who does what, and that the result is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kiloword.distributed import collectives, sharing
from threads import over_threads

RANKS = 3


def test_ranks_share_only_where_they_are_to() -> None:
    def modes() -> tuple[Any, ...]:
        return sharing.share(), sharing.is_first(), sharing.lockstep()

    def work() -> list[Any]:
        found = [modes()]
        with sharing.sharing():
            found.append(modes())
            with sharing.sharing(lockstep=True):
                found.append(modes())
                with sharing.alone():
                    found.append(modes())
            found.append(modes())
        return [*found, modes()]

    alone, shared, together = ((0, 1), True, False), ((2, 3), False, False), ((2, 3), False, True)
    assert over_threads(RANKS, work)[2] == [alone, shared, together, alone, shared, alone]
    assert over_threads(1, work)[0] == [alone] * 6


@pytest.mark.parametrize("count", [0, 1, 3, 7])
@pytest.mark.parametrize("lockstep", [False, True])
def test_turns_give_all_to_all_in_order(count: int, lockstep: bool) -> None:
    def work() -> tuple[list[int], list[int], list[int]]:
        calls: list[int] = []
        with sharing.sharing(lockstep):
            made = list(sharing.in_turns(range(count), lambda n: calls.append(n) or n * n))
            return made, calls, sharing.own(range(count))

    rounds = -(-count // RANKS)
    for rank, (made, calls, own) in enumerate(over_threads(RANKS, work)):
        assert made == [n * n for n in range(count)]
        assert own == list(range(rank, count, RANKS))
        assert calls == own + [0] * (rounds - len(own) if lockstep else 0)


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_what_is_gathered(ranks: int) -> None:
    def work() -> tuple[Any, ...]:
        rank = collectives.rank()
        with sharing.sharing():
            sums = sharing.sums(torch.full((2, 2), 1.0 + rank), torch.tensor(1.0))
            each = sharing.gathered(rank * 10), sharing.to_first(rank * 10), sharing.of_first(10 + rank)
        return *each, *(x.tolist() for x in sums)

    every, total = [rank * 10 for rank in range(ranks)], float(sum(range(1, ranks + 1)))
    for rank, found in enumerate(over_threads(ranks, work)):
        assert found == (every, every if rank == 0 else [], 10, [[total, total]] * 2, float(ranks))


def test_parts_are_made_by_all_and_put_together_by_the_first() -> None:
    """Batches go in turns over all parts, as one process would cut them."""
    parts = [range(10), range(10, 13), range(13, 20)]

    def work() -> tuple[Any, list[list[int]]]:
        made: list[list[int]] = []

        def make(batches: list[range]) -> Any:
            made.extend(list(batch) for batch in batches)
            return iter(made)

        with sharing.sharing():
            return list(sharing.part_by_part(parts, 4, make)), made

    whole = [[[*range(4)], [*range(4, 8)], [8, 9]], [[10, 11, 12]], [[*range(13, 17)], [17, 18, 19]]]
    batches = [batch for part in whole for batch in part]
    assert over_threads(1, work) == [(whole, batches)]
    found = over_threads(RANKS, work)
    assert [parts for parts, _ in found] == [whole, [[], [], []], [[], [], []]]
    assert [made for _, made in found] == [batches[rank::RANKS] for rank in range(RANKS)]
