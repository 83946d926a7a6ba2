"""Work that ranks share, with three threads as ranks: who does what, and that the result is that of one process."""

from __future__ import annotations

from typing import Any

import pytest

from kiloword.distributed import sharing
from threads import over_threads

RANKS = 3


@pytest.mark.parametrize("count", [0, 1, 3, 7])
@pytest.mark.parametrize("lockstep", [False, True])
def test_turns_give_all_to_all_in_order(count: int, lockstep: bool) -> None:
    def work() -> tuple[list[int], list[int], list[int]]:
        calls = list[int]()
        with sharing.sharing(lockstep):
            with sharing.alone():
                assert sharing.share() == (0, 1)
            made = list(sharing.in_turns(range(count), lambda n: calls.append(n) or n * n))
            return made, calls, sharing.own(range(count))

    rounds = -(-count // RANKS)
    for rank, (made, calls, own) in enumerate(over_threads(RANKS, work)):
        assert made == [n * n for n in range(count)]
        assert own == list(range(rank, count, RANKS))
        assert calls == own + [0] * (rounds - len(own) if lockstep else 0)


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
