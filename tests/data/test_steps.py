"""Work in order: errors as sentences, what is checked before a batch is sent, how workers start and end."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kiloword.data import steps
from kiloword.data.images import time_limit
from kiloword.data.images.time_limit import Apart, Late, TimeLimit, decoding
from kiloword.data.steps import in_order
from kiloword.types import BadSample


@dataclass
class Item:
    a: torch.Tensor
    b: dict[str, torch.Tensor]
    name: str = "x"


@pytest.mark.parametrize("apart", [False, True])
def test_work_is_done_step_by_step_as_it_is_asked_for(apart: bool) -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step * step

    state, threads = torch.random.get_rng_state(), threading.active_count()
    items = in_order(make, iter([3, 1, 2]), 0, apart=apart)
    assert (next(items), made) == (9, [3])
    assert list(items) == [1, 4]
    assert made == [3, 1, 2]
    assert torch.equal(torch.random.get_rng_state(), state), "nothing is drawn from the global generator"
    assert threading.active_count() == threads


@pytest.mark.parametrize("apart", [False, True])
def test_what_goes_wrong_is_a_sentence(apart: bool) -> None:
    def fail(error: Exception) -> Callable[[int], int]:
        def make(step: int) -> int:
            if step == 2:
                raise error
            return step

        return make

    for error, said in (
        (ValueError("as it is"), "^as it is$"),
        (MemoryError(), "^batch of step 3: .*memory"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "^batch of step 3: .*No space left on device"),
    ):
        items = in_order(fail(error), range(5), 0, apart=apart)
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(ValueError, match=said):
            next(items)
    with pytest.raises(KeyError, match="a bug"):
        list(in_order(fail(KeyError("a bug")), range(5), 0, apart=apart))


def test_what_a_batch_takes_is_counted() -> None:
    item = Item(torch.zeros(3), {"x": torch.zeros(2, dtype=torch.uint8), "y": torch.zeros(1, dtype=torch.float64)})
    assert [tensor.nbytes for tensor in steps._tensors_in(item)] == [12, 2, 8]
    assert [len(list(steps._tensors_in(each))) for each in (item.a, {"a": item}, [item.a])] == [1, 3, 0]


def test_open_files_are_counted_before_a_worker_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["0"] * 90 if path == "/proc/self/fd" else [])
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (100, 10**6) if which == resource.RLIMIT_NOFILE else (0, 0)
    )
    steps._check_open_files(10)
    with pytest.raises(
        ValueError, match="may open 100 files here, 90 are open, and loader workers need 11 more: raise"
    ):
        steps._check_open_files(11)
    with pytest.raises(ValueError, match="loader workers need 28 more"):
        next(in_order(lambda step: step, range(2), 2))
    monkeypatch.setattr(os, "listdir", lambda path: os.scandir("/no such folder"))
    steps._check_open_files(10**9)


def test_shared_memory_is_looked_at_before_a_batch_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(f_bavail=3, f_bfree=99, f_frsize=500_000)
    monkeypatch.setattr(os, "statvfs", lambda path: about if path == "/dev/shm" else None)
    steps._check_shared_memory(1_500_000)
    with pytest.raises(ValueError, match=r"/dev/shm has 1\.5 MB left, and a batch takes 2\.5 MB: give it more"):
        steps._check_shared_memory(2_500_000)
    monkeypatch.setattr("kiloword.distributed.device.SHARED_MEMORY", "/no such folder")
    monkeypatch.setattr(os, "statvfs", lambda path: os.listdir(path))
    steps._check_shared_memory(10**18)


def test_a_wait_ends_with_the_time_and_looks_for_what_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looked = iter(range(100)), list[int]()
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: next(now)))
    limit: Any = SimpleNamespace(check=lambda: looked.append(1))
    errors = [RuntimeError("DataLoader timed out after 2 seconds")] * 9

    def following() -> Any:
        if errors:
            raise errors.pop()
        return "item"

    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 5 seconds$"):
        steps._wait(following, limit, 5)
    assert (len(errors), len(looked)) == (4, 5)
    assert steps._wait(following, limit, 50) == "item"
    errors.append(RuntimeError("another"))
    with pytest.raises(RuntimeError, match=r"^another$"):
        steps._wait(following, limit, 50)
    assert len(looked) == 9


class Worker:
    """A process that ends by itself, when it is killed, or never."""

    def __init__(self, lives: int) -> None:
        self.lives, self.calls = lives, list[str]()

    def is_alive(self) -> bool:
        return self.lives > 0

    def kill(self) -> None:
        self.calls.append("kill")
        self.lives -= 1

    def join(self, seconds: float) -> None:
        self.calls.append(f"join {seconds}")


def test_workers_that_do_not_end_are_killed_and_at_last_left(monkeypatch: pytest.MonkeyPatch) -> None:
    children = {"other"}
    monkeypatch.setattr("multiprocessing.process._children", children)
    workers, ended = [Worker(0), Worker(1), Worker(2)], list[str]()
    children.update(workers)  # type: ignore[arg-type]
    steps._end_workers(SimpleNamespace(_workers=workers, _shutdown_workers=lambda: ended.append("asked")))
    assert ended == ["asked"]
    assert [worker.calls for worker in workers] == [[], ["kill", "join 5.0"], ["kill", "join 5.0"]]
    assert children == {"other", *workers[:2]}, "Python would wait for the last one at its exit"
    steps._end_workers(SimpleNamespace())


def test_a_worker_has_one_thread_and_leaves_signals_to_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda number, action: set_to.append((number, action)))
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(setNumThreads=lambda n: set_to.append(f"cv2 {n}")))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    steps._start_worker(0)
    ignored = {(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    assert (set_to[0], set(set_to[1:-1]), set_to[-1]) == (1, ignored, "cv2 0")
    told: list[Any] = []
    monkeypatch.setattr(sys, "__excepthook__", lambda *error: told.append(error[0]))
    for error in (EOFError(), ConnectionResetError(), KeyError()):
        sys.excepthook(type(error), error, None)
    assert told == [KeyError]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, float]]:
    """Processor time by thread; the limit is 60 s."""
    spent: dict[int, float] = {}
    monkeypatch.setattr(time_limit, "_busy", lambda process, thread: spent.get(thread, 0.0))
    yield spent
    vars(time_limit._here).clear()


def test_only_what_is_decoded_for_longer_than_the_limit_is_given_up(busy: dict[int, float]) -> None:
    given_up: set[int] = set()
    limit, here = TimeLimit(2, given_up), threading.get_native_id()
    with decoding(1):  # nobody waits: no limit
        assert given_up == set()
    limit.enter(1)
    with decoding(7):
        begun = time.thread_time()
        busy[here] = begun + 59.0
        limit.check()
        busy[here] = begun + 61.0
        with pytest.raises(Late):
            limit.check()
    assert given_up == {7}
    limit.check()  # no longer decoded
    again = TimeLimit(1, given_up)
    again.enter(0)
    with pytest.raises(BadSample, match="decoding takes more than 60 s of processor time"), decoding(7):
        pass
    with decoding(3):
        pass
    limit.enter(0)
    with pytest.raises(SystemExit), decoding(1):
        pass


def test_a_late_call_is_left_alone(busy: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "POLL_S", 0.01)
    limit, over, begun = TimeLimit(1, set()), threading.Event(), threading.Event()

    def call() -> None:
        with decoding(5):
            busy[threading.get_native_id()] = 1e6
            begun.set()
            over.wait(60)

    apart = Apart(call, limit)
    with pytest.raises(Late):
        apart()
    assert begun.is_set()
    assert limit.given_up == {5}
    apart.close()
    over.set()
    apart._thread.join(60)
    assert not apart._thread.is_alive()


def test_processor_time_of_threads() -> None:
    own = time_limit._busy(os.getpid(), threading.get_native_id())
    assert 0 <= own <= time.process_time() + 1
    assert time_limit._busy(os.getpid(), 2**22 + 1) == 0.0
    began = time.thread_time()
    while time.thread_time() - began < 0.06:
        pass
    assert time_limit._busy(os.getpid(), threading.get_native_id()) - own >= 0.03
