"""Work that ranks share, with three threads as ranks: who does what, and that the result is that of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kiloword.distributed import collectives as parallel
from kiloword.distributed import heartbeat, sharing

RANKS = 3


class Ranks:
    """Threads that call torch's collectives, which here are lists and a barrier."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.table: list[Any] = [None] * RANKS
        self.waited: list[str] = []

    def rank(self) -> int:
        return int(getattr(self.here, "rank", 0))

    def exchanged(self, mine: Any) -> list[Any]:
        self.table[self.rank()] = mine
        self.barrier.wait()
        every = list(self.table)
        self.barrier.wait()
        return every

    def all_gather_object(self, out: list[Any], mine: Any) -> None:
        out[:] = self.exchanged(mine)

    def gather_object(self, mine: Any, out: list[Any] | None) -> None:
        every = self.exchanged(mine)
        assert (out is None) == (self.rank() > 0)
        if out is not None:
            out[:] = every

    def all_of(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` returns on each rank."""
        results: list[Any] = [None] * RANKS

        def on_rank(rank: int) -> None:
            self.here.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                self.barrier.abort()
                results[rank] = error

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks()
    monkeypatch.setattr(parallel, "ranks", lambda: RANKS)
    monkeypatch.setattr(parallel, "rank", made.rank)
    monkeypatch.setattr(parallel, "sum_over_ranks", lambda x: torch.stack(made.exchanged(x)).sum(0))
    monkeypatch.setattr(heartbeat, "wait", made.waited.append)
    collectives = SimpleNamespace(all_gather_object=made.all_gather_object, gather_object=made.gather_object)
    monkeypatch.setattr(sharing, "dist", collectives)
    return made


def test_ranks_share_only_where_they_are_to(ranks: Ranks) -> None:
    def modes() -> tuple[Any, ...]:
        return sharing.share(), sharing.is_first(), sharing.lockstep()

    ranks.here.rank = 2
    by_itself = ((0, 1), True, False)
    assert modes() == by_itself
    with sharing.sharing():
        assert modes() == ((2, 3), False, False)
        with sharing.sharing(lockstep=True):
            assert modes() == ((2, 3), False, True)
            with sharing.alone():
                assert modes() == by_itself
            assert modes() == ((2, 3), False, True)
        assert modes() == ((2, 3), False, False)
        sharing.wait("here")
    sharing.wait("elsewhere")
    assert ranks.waited == ["here"]
    assert modes() == by_itself


def test_a_single_rank_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing.sharing(lockstep=True):
        assert sharing.share() == (0, 1)
        assert not sharing.lockstep()
        assert sharing.own([1, 2, 3]) == [1, 2, 3]
        assert sharing.gathered("a") == sharing.to_first("a") == ["a"]
        assert list(sharing.in_turns([1, 2, 3], str)) == ["1", "2", "3"]


@pytest.mark.parametrize("count", [0, 1, 3, 7])
@pytest.mark.parametrize("lockstep", [False, True])
def test_turns_give_all_to_all_in_order(ranks: Ranks, count: int, lockstep: bool) -> None:
    calls: list[list[int]] = [[] for _ in range(RANKS)]

    def work(rank: int) -> list[int]:
        return list(sharing.in_turns(range(count), lambda n: calls[rank].append(n) or n * n))

    with sharing.sharing(lockstep):
        assert ranks.all_of(work) == [[n * n for n in range(count)]] * RANKS
        assert ranks.all_of(lambda rank: sharing.own(range(count))) == [
            list(range(r, count, RANKS)) for r in range(RANKS)
        ]
    rounds = -(-count // RANKS)
    for rank, made in enumerate(calls):
        own = list(range(rank, count, RANKS))
        assert made == own + [0] * (rounds - len(own) if lockstep else 0)


def test_what_is_gathered(ranks: Ranks) -> None:
    with sharing.sharing():
        assert ranks.all_of(lambda rank: sharing.gathered(rank * 10)) == [[0, 10, 20]] * RANKS
        assert ranks.all_of(lambda rank: sharing.to_first(rank * 10)) == [[0, 10, 20], [], []]
        sums = ranks.all_of(lambda rank: sharing.sums(torch.ones(2, 2) * rank, torch.tensor(1.0)))
    for matrix, count in sums:
        assert matrix.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert float(count) == 3
    (alone,) = sharing.sums(torch.tensor(5.0))
    assert float(alone) == 5


def test_parts_are_made_by_all_and_put_together_by_the_first(ranks: Ranks) -> None:
    """Batches go in turns over all parts, as one process would cut them."""
    parts = [range(10), range(10, 13), range(13, 20)]
    made: list[list[list[int]]] = [[] for _ in range(RANKS)]

    def work(rank: int) -> list[list[list[int]]]:
        def make(batches: list[range]) -> Any:
            made[rank] = [list(batch) for batch in batches]
            return iter(made[rank])

        return list(sharing.part_by_part(parts, 4, make))

    whole = [[[*range(4)], [*range(4, 8)], [8, 9]], [[10, 11, 12]], [[*range(13, 17)], [17, 18, 19]]]
    assert work(0) == whole  # by itself
    with sharing.sharing():
        assert ranks.all_of(work) == [whole, [[], [], []], [[], [], []]]
    batches = [batch for part in whole for batch in part]
    assert made == [batches[rank::RANKS] for rank in range(RANKS)]


def test_all_get_what_the_first_has(ranks: Ranks) -> None:
    with sharing.sharing():
        assert ranks.all_of(lambda rank: sharing.of_first(10 + rank, "at the start of its table")) == [10] * RANKS
    assert ranks.waited == ["at the start of its table"] * RANKS


def test_one_card_is_not_for_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiloword.distributed.launch.adopt", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ValueError, match="--device cuda:1 is one GPU, but 2 ranks run: use --device cuda"),
        sharing.together("cuda:1"),
    ):
        pass
