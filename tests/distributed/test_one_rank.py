"""One rank's side of heartbeats and ends, without its threads: what it decides, by a clock that only the test moves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from kiloword.distributed import diagnosis, heartbeat, launch
from kiloword.distributed.heartbeat import LEAVE_S, End, Peers, RanksEnded
from kiloword.training.signals import Stopped

BROKEN = RuntimeError("[gloo] Connection closed by peer")
END = End(1, "gone.", 1, 143)


class Clock:
    """Seconds that pass as they are slept; `then` is done at each sleep."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.then: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (heartbeat, diagnosis):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(heartbeat.signal, "signal", lambda *given: None)
    return clock


@pytest.fixture
def rank(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Peers]:
    """Makes a rank of three in one store; its threads do not run."""
    root = HashStore()
    root.set_timeout(timedelta(seconds=1))  # for what nobody sets
    monkeypatch.setattr(heartbeat, "connect", lambda rank, hosts, timeout_s: root)
    monkeypatch.setattr(heartbeat, "claim", lambda store, rank: None)
    idle = SimpleNamespace(start=lambda: None, join=lambda timeout: None)

    def make(number: int, timeout_s: float = 300, ranks: int = 3) -> Peers:
        for name, value in launch.announced(number, ranks, 12345).items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patch:
            patch.setattr(heartbeat.threading, "Thread", lambda **named: idle)
            return Peers(timeout_s)

    return make


@pytest.mark.parametrize(
    ("number", "agent", "hosts"), [(0, "", True), (0, "False", True), (0, "True", False), (1, "", False)]
)
def test_how_a_rank_begins(monkeypatch: pytest.MonkeyPatch, number: int, agent: str, hosts: bool) -> None:
    """Rank 0 keeps the store where torchrun keeps none; a torchrun that starts again has names of its own in it."""
    root, threads, met = HashStore(), list[dict[str, Any]](), list[Any]()
    for name, value in launch.announced(number, 3, 12345).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "7")
    monkeypatch.setattr(heartbeat, "connect", lambda *given: met.append(given) or root)
    idle = SimpleNamespace(start=lambda: threads.append({"started": True}), join=threads.append)
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat.threading, "Thread", lambda **named: threads.append(named) or idle)
        one = Peers(77)
    assert met == [(number, hosts, 77)]
    assert (one.rank, one.ranks, one.timeout_s, one.abrupt, one._end) == (number, 3, 77, False, None)
    assert [thread["target"] for thread in threads[:2]] == [one._live, one._watch]
    assert all(thread["daemon"] for thread in threads[:2])
    assert threads[2:] == [{"started": True}] * 2
    assert root.get(f"kiloword/run/7/is/{number}").startswith(b"process ")
    for store in (one._mine, one._store):
        store.set("a", "b")
        assert root.get("kiloword/run/7/a") == b"b"
    one.group_store.set("a", "c")
    assert root.get("kiloword/run/7/group/a") == b"c"
    one.over()
    assert one._leaving.is_set()
    assert one._left.is_set()
    assert threads[4:] == [diagnosis.SILENT_S] * 2  # each is waited for, a while


def ended(rank: Peers) -> End:
    return rank._read(rank._mine)


@pytest.mark.parametrize(("number", "by", "said"), [(0, 1, 1), (0, 0, 0), (1, 1, 0), (1, 0, 0)])
def test_rank_0_reports_the_end_of_another(
    rank: Callable[..., Peers], clock: Clock, capsys: pytest.CaptureFixture[str], number: int, by: int, said: int
) -> None:
    one = rank(number)
    one._tell(End(2, "gone.", by))
    one._end = None
    one._hear()
    assert one._end == End(2, "gone.", by)
    assert one._deadline == clock.now + LEAVE_S
    assert one._mine.check([f"heard/{number}"])
    assert capsys.readouterr().err.count("kiloword: rank 2: gone.") == said
    clock.now += 5
    one._hear()
    assert one._deadline == clock.now - 5 + LEAVE_S  # a deadline is not put off
    assert "gone" not in capsys.readouterr().err  # once


@pytest.mark.parametrize(("timeout_s", "patience"), [(2, 4), (7, 7), (300, 15)])
def test_time_that_a_rank_has_to_leave(rank: Callable[..., Peers], timeout_s: float, patience: float) -> None:
    assert rank(1, timeout_s)._patience == patience


@pytest.mark.parametrize(("number", "by", "said"), [(0, 1, 1), (0, 0, 1), (1, 1, 1), (1, 0, 0), (2, 1, 0)])
def test_a_process_ends_without_its_main_thread(
    rank: Callable[..., Peers],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    by: int,
    said: int,
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(heartbeat.os, "_exit", codes.append)
    one = rank(number)
    one._end = End(2, "gone.", by, 143)
    one._exit()
    assert codes == [143]
    assert capsys.readouterr().err.count("gone.") == said


def test_a_store_that_is_gone_ends_the_run(
    rank: Callable[..., Peers], clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(heartbeat.os, "_exit", codes.append)
    for number in (0, 1, 2):
        one = rank(number)

        def gone(*given: object) -> None:
            raise RuntimeError("Broken pipe")

        one._store = SimpleNamespace(set=gone)  # type: ignore[assignment]
        one._live()
        assert one._end is not None
        assert (one._end.rank, one._end.code) == (-1, 2)
        assert one._deadline == clock.now + LEAVE_S
        one._exit()
        assert ("kiloword: no answer from 127.0.0.1:12345" in capsys.readouterr().err) == (number < 2)
    assert codes == [2, 2, 2]
    one = rank(1)
    one._leaving.wait = lambda seconds: one._leaving.set()  # type: ignore[assignment,func-returns-value,misc]
    one._store = SimpleNamespace(set=lambda *given: one._leaving.set() or gone())  # type: ignore[assignment,func-returns-value]
    one._live()  # it leaves: no end
    assert (one._end, one._deadline) == (None, math.inf)


def beats(one: Peers, clock: Clock, count: int) -> list[dict[str, Any]]:
    """What the thread of heartbeats writes in `count` rounds."""
    seen: list[dict[str, Any]] = []

    def wait(seconds: float) -> None:
        seen.append(json.loads(one._mine.get(f"beat/{one.rank}")))
        clock.now += seconds
        if len(seen) == count:
            one._leaving.set()

    one._leaving.wait = wait  # type: ignore[assignment]
    one._live()
    return seen


def test_a_heartbeat_each_second_says_where_a_rank_is_and_for_how_long(
    rank: Callable[..., Peers], clock: Clock
) -> None:
    one = rank(1)
    one.at("in step 7")
    assert beats(one, clock, 3) == [{"beat": n + 1, "at": "in step 7", "for": n} for n in range(3)]
    assert one._answered == clock.now - heartbeat.BEAT_S
    assert not one._mine.check(["end"])


@pytest.mark.parametrize(
    ("abrupt", "at", "seconds", "tells"),
    [
        (True, "in step 7", 31, True),
        (True, "in step 7", 30, False),
        (True, "waiting", 31, False),
        (False, "in step 7", 31, False),
    ],
)
def test_a_step_of_devices_that_hangs_is_ended_by_the_thread(
    rank: Callable[..., Peers], clock: Clock, abrupt: bool, at: str, seconds: float, tells: bool
) -> None:
    one = rank(1, timeout_s=30, ranks=2)
    one.abrupt = abrupt
    one._mine.set("beat/0", json.dumps({"beat": 1, "at": "saving", "for": 5.0}))
    one.at(at)
    clock.now += seconds
    beats(one, clock, 1)
    assert one._mine.check(["end"]) == tells
    if tells:
        assert ended(one) == End(0, "no heartbeat; it was last saving. It was killed, or its machine hangs. "
                                    "The last state is kept.", 1)  # fmt: skip


@pytest.mark.parametrize(
    ("deadline", "silent_s", "leaving", "has_end", "exits"),
    [
        (1002.0, 0.0, False, True, False),
        (1001.9, 0.0, False, True, True),
        (math.inf, 45.0, False, False, False),  # timeout and patience
        (math.inf, 46.0, False, False, True),
        (math.inf, 46.0, True, False, False),
        (math.inf, 46.0, False, True, False),
    ],
)
def test_a_process_is_ended_at_its_deadline_or_when_the_store_does_not_answer(
    rank: Callable[..., Peers],
    clock: Clock,
    deadline: float,
    silent_s: float,
    leaving: bool,
    has_end: bool,
    exits: bool,
) -> None:
    one, ends = rank(1, timeout_s=30), list[float]()
    one._exit = lambda: ends.append(clock.now)  # type: ignore[method-assign]
    one._end, one._deadline = END if has_end else None, deadline
    if leaving:
        one._leaving.set()
    one._answered = clock.now + 2 - silent_s
    rounds = iter((False, False, True))

    def wait(seconds: float) -> bool:
        clock.now += seconds
        return next(rounds)

    one._left.wait = wait  # type: ignore[method-assign]
    one._watch()
    assert ends == ([1002.0] if exits else [])


def test_rank_0_keeps_the_store_until_all_that_came_have_left(rank: Callable[..., Peers], clock: Clock) -> None:
    first, second, last = rank(0), rank(1), rank(2)
    for number in (0, 1):  # rank 2 never came
        first._mine.set(f"beat/{number}", "{}")
    second.leave()
    assert clock.now == 1000  # only who keeps the store waits
    assert second._leaving.is_set()
    assert second._deadline == clock.now + 300 + LEAVE_S
    first.leave()
    assert clock.now == 1000
    first._mine.set("beat/2", "{}")
    first._mine.add("left", -1)
    clock.then = lambda: clock.now < 1003 or last.leave()
    first.leave()
    assert 1003 <= clock.now < 1004
    first._mine.add("left", -2)
    clock.then = lambda: first._tell(END)
    first.leave()  # an end: nobody is waited for
    assert clock.now < 1004


def test_ranks_that_do_not_come_are_named(rank: Callable[..., Peers], clock: Clock) -> None:
    one = rank(1, ranks=4)
    for number in (1, 2):
        one._mine.set(f"beat/{number}", "{}")
    with pytest.raises(ValueError, match=r"^ranks 0, 3 of 4 did not join within 7 s\.$"):
        one.gather(7)
    assert 1007 < clock.now < 1008
    one._mine.set("beat/0", "{}")
    with pytest.raises(ValueError, match=r"^rank 3 of 4 did not join within 2 s\.$"):
        one.gather(2)
    assert one.timeout_s == 2
    clock.then = lambda: setattr(one, "_end", END)
    with pytest.raises(dist.DistError, match=r"rank 1: gone\."):
        one.gather(7)
    one._mine.set("beat/3", "{}")
    now = clock.now
    one.gather(7)
    assert clock.now == now


def test_a_place_is_passed_when_all_are_there(rank: Callable[..., Peers], clock: Clock) -> None:
    one, two = rank(0, ranks=2), rank(1, ranks=2)
    clock.then = lambda: clock.now < 1003 or two.wait("here")
    one.wait("here")
    assert 1003 <= clock.now < 1004
    clock.then = lambda: setattr(one, "_end", END)
    with pytest.raises(dist.DistError, match=r"rank 1: gone\."):
        one.wait("there")


def test_an_interrupted_rank_tells_the_others(rank: Callable[..., Peers], clock: Clock) -> None:
    one = rank(1)
    one.interrupted()
    assert ended(one) == End(1, "interrupted", 1)
    assert one._leaving.is_set()
    assert one._deadline == clock.now + LEAVE_S


@pytest.mark.parametrize(
    ("number", "error", "told", "text", "quiet"),
    [
        (0, ValueError("no room."), End(0, "no room.", 0), "no room.", False),
        (1, ValueError("no room."), End(1, "no room.", 1), "rank 1: no room.", False),
        (1, Stopped("stopped.", 143), End(1, "stopped.", 1, 143), "rank 1: stopped.", False),
        (0, BROKEN, END, "rank 1: gone.", True),  # said by rank 0 as it hears it
        (1, BROKEN, END, "rank 1: gone.", False),
        (2, BROKEN, END, "rank 1: gone.", True),
        (0, ValueError("no room."), END, "rank 1: gone.", True),  # too late
        (2, KeyError("bug"), End(2, "KeyError: 'bug'", 2), "'bug'", None),
        (0, RuntimeError("shapes"), End(0, "RuntimeError: shapes", 0), "shapes", None),
    ],
)
def test_what_a_rank_ends_with(
    rank: Callable[..., Peers],
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
    number: int,
    error: Exception,
    told: End,
    text: str,
    quiet: bool | None,
) -> None:
    """Its own error, or that of the first who told one; a bug as it is. Who says it, and the code for the shell."""
    one = rank(number)
    if told is END:
        one._tell(END)
        one._end = None
    result = one.ended(error)
    assert str(result) == text
    assert ended(one) == told
    assert one._leaving.is_set()
    assert one._deadline == 1000 + 2 * LEAVE_S
    if quiet is None:
        assert result is error
    else:
        assert isinstance(result, RanksEnded)
        assert (result.code, result.quiet) == (told.code, quiet)
        assert one.ended(result) is result
    assert ("kiloword: rank 1: gone." in capsys.readouterr().err) == (number == 0 and told is END)


@pytest.mark.parametrize(
    ("number", "heard", "waits"),
    [(0, "heard/1 heard/2", 0), (0, "heard/1", 4), (1, "heard/0", 0), (2, "heard/1", 4)],
)
def test_a_rank_that_failed_stays_until_the_others_know(
    rank: Callable[..., Peers], clock: Clock, number: int, heard: str, waits: float
) -> None:
    """Rank 0, which keeps the store, waits for all; the others for rank 0, which then reports the end for them."""
    one = rank(number)
    for name in heard.split():
        one._mine.set(name, "")
    result = one.ended(ValueError("no room."))
    assert isinstance(result, RanksEnded)
    assert clock.now - 1000 == pytest.approx(waits, abs=0.1)
    assert result.quiet == (number == 1)


def test_nobody_tells_why_a_collective_broke(rank: Callable[..., Peers], clock: Clock) -> None:
    one = rank(1, ranks=2)
    one._mine.set("beat/0", json.dumps({"beat": 1, "at": "saving", "for": 5.0}))
    result = one.ended(BROKEN)
    assert str(result).startswith("rank 0: no heartbeat; it was last saving.")
    assert ended(one).by == 1
    # a second for another's words, some for a heartbeat, and for rank 0 to report it
    assert clock.now - 1000 == pytest.approx(heartbeat.BEAT_S + 2 * diagnosis.SILENT_S, abs=0.2)


class Told:
    """Stands for `Peers`: notes what happens."""

    def __init__(self, timeout_s: float) -> None:
        self.calls: list[object] = [timeout_s]

    def __getattr__(self, name: str) -> Callable[..., Exception]:
        def note(*given: object) -> Exception:
            self.calls.append((name, *given))
            return RanksEnded("all.", 2, False)

        return note


@pytest.mark.parametrize(
    ("error", "calls", "raises"),
    [
        (None, ["leave"], None),
        (SystemExit(), ["leave"], SystemExit),
        (SystemExit(0), ["leave"], SystemExit),
        (SystemExit(2), ["interrupted"], SystemExit),
        (KeyboardInterrupt(), ["interrupted"], KeyboardInterrupt),
        (ValueError("one."), ["ended"], RanksEnded),
    ],
)
def test_how_a_rank_leaves(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, calls: list[str], raises: Any
) -> None:
    monkeypatch.setattr(heartbeat, "Peers", Told)
    monkeypatch.setattr(launch, "adopt", lambda: 2)
    made: Any = None

    def run() -> None:
        nonlocal made
        with heartbeat.monitored(77) as made, heartbeat.monitored(5) as again:
            assert again is made
            heartbeat.at("here")
            heartbeat.wait("there")
            if error is not None:
                raise error

    if raises is None:
        run()
    else:
        with pytest.raises(raises):
            run()
    assert made.calls[:4] == [77, ("at", "here"), ("at", "there"), ("wait", "there")]
    assert [call[0] for call in made.calls[4:]] == [*calls, "over"]
    assert heartbeat._current is None
    heartbeat.at("nobody asks")
    heartbeat.wait("nobody comes")


def test_a_single_rank_has_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "adopt", lambda: 1)
    with heartbeat.monitored() as made:
        assert made is None


def test_an_end_names_the_rank_at_fault_if_there_is_one() -> None:
    assert [str(End(rank, "why.", 0)) for rank in (-1, 0, 3)] == ["why.", "rank 0: why.", "rank 3: why."]


def test_waiting_for_something_to_become_true(clock: Clock) -> None:
    assert diagnosis.within(3, lambda: clock.now > 1002)
    assert clock.now == pytest.approx(1002.05)
    assert not diagnosis.within(3, lambda: False)
    assert clock.now == pytest.approx(1005.05, abs=0.1)
    assert diagnosis.within(0, lambda: True)


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (BROKEN, True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (dist.DistError("anything"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("Connection reset"), False),
    ],
)
def test_collectives_that_broke(error: Exception, broken: bool) -> None:
    assert diagnosis.is_broken(error) == broken
