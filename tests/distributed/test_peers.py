"""Ranks beside their collectives: heartbeats, who is at fault, and an end that all of them learn of."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from kiloword.distributed import diagnosis, heartbeat, launch
from kiloword.distributed.heartbeat import Peers

BROKEN = RuntimeError("[gloo] Connection closed by peer")


def until(true: Callable[[], Any]) -> None:
    """Waits for other threads; the limit ends a test that would hang."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Peers]]:
    """Both ranks of a run, in one process."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    port, made = launch.free_port(), list[Peers]()
    for rank in (0, 1):
        for name, value in launch.announced(rank, 2, port).items():
            monkeypatch.setenv(name, value)
        made.append(Peers(timeout_s=300))
    yield made
    for rank in reversed(made):
        rank.over()


def aside(call: Callable[[], Any]) -> Any:
    """In another thread, as a main thread that ends ignores SIGTERM from then on."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def about(rank: Peers, other: int) -> dict[str, Any]:
    return dict(json.loads(rank._mine.get(f"beat/{other}")))


def test_each_rank_gives_signs_of_life_and_says_where_it_stands(two: list[Peers]) -> None:
    first, second = two
    first.gather(120)
    begun = about(first, 1)["beat"]
    second.at("in step 7")
    until(lambda: about(first, 1)["beat"] > begun + 1 and about(first, 1)["at"] == "in step 7")
    assert about(second, 0)["at"] == "at its start"


def test_a_rank_that_fails_alone_ends_the_other_with_its_sentence(
    two: list[Peers], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two
    own = aside(lambda: second.ended(ValueError("the disk is full.")))
    until(lambda: first._end is not None)
    other = aside(lambda: first.ended(BROKEN))
    assert [str(own), str(other)] == ["rank 1: the disk is full."] * 2
    assert (own.code, other.code) == (2, 2)
    assert capsys.readouterr().err.count("the disk is full.") == 1


def test_a_rank_that_waits_learns_of_an_end(two: list[Peers], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = two
    failed = threading.Timer(0, lambda: second._tell(heartbeat.End(1, "gone.", 1)))
    failed.start()
    with pytest.raises(dist.DistError, match=r"rank 1: gone\."):
        first.wait("at a place")
    failed.join()


def standing(store: PrefixStore, rank: int, beat: int, at: str, seconds: float) -> None:
    store.set(f"beat/{rank}", json.dumps({"beat": beat, "at": at, "for": seconds}))


@pytest.mark.parametrize(
    ("moves", "places", "rank", "says"),
    [
        ((True, False), ("in step 3", "in step 2"), 2, "no heartbeat; it was last in step 2. "),
        (
            (True, True),
            ("in step 3", "reading data"),
            2,
            "it has been reading data for 20 s; the others stopped waiting",
        ),
        ((True, True), ("reading", "saving"), 2, "it has been saving for 20 s"),
        (
            (True, True),
            ("in step 3", "in step 3"),
            -1,
            "all ranks are alive and in step 3, but cannot continue together",
        ),
    ],
)
def test_the_rank_at_fault_is_silent_or_stands_elsewhere(
    moves: tuple[bool, bool], places: tuple[str, str], rank: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 asks, of ranks 1 and 2; `moves`: which of them give a heartbeat while it waits."""
    store = PrefixStore("run", HashStore())
    standing(store, 0, 1, "in step 3", 5)
    for n, at in enumerate(places, 1):
        standing(store, n, 1, at, 10 * n)

    def wait(seconds: float, true: Callable[[], bool]) -> bool:
        for n, (alive, at) in enumerate(zip(moves, places, strict=True), 1):
            standing(store, n, 1 + alive, at, 10 * n)
        return true()

    monkeypatch.setattr(diagnosis, "within", wait)
    end = diagnosis.diagnose(store, 0, 3, "in step 3", BROKEN)
    assert end.rank == rank
    assert says in end.message
    assert end.message.endswith("The last state is kept.")


def test_a_rank_that_never_came_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore("run", HashStore())
    standing(store, 0, 1, "in step 3", 5)
    monkeypatch.setattr(diagnosis, "within", lambda seconds, true: true())
    end = diagnosis.diagnose(store, 0, 2, "in step 3", BROKEN)
    assert (end.rank, end.by) == (1, 0)
    assert "it was last at its start" in end.message
