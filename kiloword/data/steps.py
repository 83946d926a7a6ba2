"""Ordered work in worker processes: results of numbered steps do not depend on the number of workers."""

from __future__ import annotations

import multiprocessing.process
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from kiloword.data.images.time_limit import POLL_S, Apart, Late, TimeLimit
from kiloword.distributed.device import SHARED_MEMORY, free_shared_memory
from kiloword.errors import WORKER, sentence_of

Item = TypeVar("Item")
_FILES, _FILES_WORKER = 12, 8  # open files besides a batch's tensors: pipes, sockets, tars
KILLED_S = 5.0  # seconds for a killed worker to end


class LoaderStopped(ValueError):
    """A worker process died, or took too long."""


def in_order(
    make: Callable[[int], Item],
    steps: Iterable[int],
    workers: int,
    timeout: float = 300,
    given_up: set[int] | None = None,
    apart: bool = False,
    pin: bool = False,
) -> Iterator[Item]:
    """`make(step)` for every step, in order, prefetched by `workers` processes (0: made in this process).

    A row that takes too long to decode (see `time_limit`) is added to `given_up`, and the item is made again without
    it. Args: apart: without workers, make items in a separate thread, so that this one can notice slow rows; pin: items
    are in page-locked memory (by their `pin_memory`).
    Errors: a ValueError of `make` unchanged, lack of memory or a file's error as a ValueError with a message;
    LoaderStopped when a worker died or took longer than `timeout` seconds for one step. (If a worker dies while nothing
    is awaited, DataLoader raises a RuntimeError anywhere in this process; `sentence_of` handles it.)
    """
    rest, open_steps, given_up = iter(steps), deque[int](), set() if given_up is None else given_up
    if workers:
        _check_open_files(_FILES + _FILES_WORKER * workers)
    while True:
        try:
            limit = TimeLimit(workers, given_up)
            items = iter(_loader(make, _noted(rest, open_steps), workers, timeout, limit, pin))
            for item in _items(items, workers, timeout, limit, apart):
                open_steps.popleft()
                yield item
            return
        except Late:
            rest = chain(tuple(open_steps), rest)
            open_steps.clear()


def _noted(steps: Iterator[int], into: deque[int]) -> Iterator[int]:
    for step in steps:
        into.append(step)
        yield step


def _loader(
    make: Callable[[int], Item], steps: Iterable[int], workers: int, timeout: float, limit: TimeLimit, pin: bool
) -> DataLoader[Item | _Failed]:
    return DataLoader(
        _Steps(make, limit if workers and limit.is_shared() else None),
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        timeout=min(POLL_S, timeout) if workers else 0,
        worker_init_fn=_start_worker if workers else None,
        pin_memory=pin,
        generator=torch.Generator(),  # otherwise an iterator would draw from the global generator
    )


def _items(
    items: Iterator[Item | _Failed], workers: int, timeout: float, limit: TimeLimit, apart: bool
) -> Iterator[Item]:
    """The items of a loader. Raises: as `in_order`; Late, after adding the slow rows to `limit.given_up`."""
    following = partial(next, items, None)
    fetch = partial(_wait, following, limit, timeout) if workers else Apart(following, limit) if apart else following
    try:
        while (item := fetch()) is not None:
            if isinstance(item, _Failed):
                raise item.error
            yield cast(Item, item)
    except RuntimeError as error:
        if workers and "DataLoader" in str(error):
            raise LoaderStopped(sentence_of(error) or "") from error
        raise
    except (EOFError, OSError) as error:  # those of `make` are ValueErrors by now
        if workers:
            raise LoaderStopped(f"a loader worker stopped while it sent a batch. {WORKER}") from error
        raise
    finally:
        if isinstance(fetch, Apart):
            fetch.close()
        _end_workers(items)


def _wait(following: Callable[[], Item], limit: TimeLimit, timeout: float) -> Item:
    """The next item; checks for slow rows every `POLL_S` seconds of waiting."""
    end = time.monotonic() + timeout
    while True:
        try:
            return following()
        except RuntimeError as error:
            if "DataLoader timed out" not in str(error):
                raise
            limit.check()
            if time.monotonic() >= end:
                raise RuntimeError(f"DataLoader timed out after {timeout:g} seconds") from error


@dataclass
class _Failed:
    """An error message from a worker; the DataLoader would wrap it in a traceback."""

    error: ValueError


class _Steps(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any], limit: TimeLimit | None) -> None:
        self.make, self.limit = make, limit

    def __getitem__(self, step: int) -> Any:
        try:
            worker = get_worker_info()
            if self.limit and worker is not None:
                self.limit.enter(worker.id)
            item = self.make(step)
            if worker is not None:
                tensors = list(_tensors_in(item))
                _check_shared_memory(sum(tensor.nbytes for tensor in tensors))
                _check_open_files(_FILES + len(tensors))
            return item
        except ValueError as error:
            return _Failed(error)
        except (MemoryError, OSError) as error:
            return _Failed(ValueError(f"batch of step {step + 1}: {sentence_of(error)}"))


def _tensors_in(item: Any) -> Iterator[torch.Tensor]:
    """The tensors in a batch; each is sent to the main process through shared memory, as an open file."""
    if isinstance(item, torch.Tensor):
        yield item
        return
    for value in (item if isinstance(item, dict) else getattr(item, "__dict__", {})).values():
        yield from _tensors_in(value)


def _check_open_files(count: int) -> None:
    """Raises: ValueError if `count` more cannot be opened; otherwise sending a batch would fail silently."""
    with suppress(OSError):  # only Linux has this folder
        opened, most = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most - opened < count:
            raise ValueError(
                f"a process may open {most} files here, {opened} are open, and loader workers need {count} more: "
                "raise the limit (ulimit -n 1024), or use --workers 0."
            )


def _check_shared_memory(size: int) -> None:
    """Raises: ValueError for less than `size` bytes; otherwise a worker would drop the batch it sends."""
    free = free_shared_memory()
    if free is not None and free < size:
        raise ValueError(
            f"{SHARED_MEMORY} has {free / 1e6:.1f} MB left, and a batch takes {size / 1e6:.1f} MB: give it more "
            "(of a container, by --shm-size), or use fewer --workers, or 0."
        )


def _start_worker(worker: int) -> None:
    """Set up a worker: one thread, and no reaction to signals, which SLURM and torchrun send to all processes.

    The main process handles them and ends its workers; without workers it could not save.
    """
    torch.set_num_threads(1)
    sys.excepthook = _unless_the_reader_is_gone
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if "cv2" in sys.modules:  # its thread pool does not survive a fork
        sys.modules["cv2"].setNumThreads(0)


def _unless_the_reader_is_gone(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """Suppress the traceback of the thread that sends tensors after the main process was killed."""
    if not isinstance(error, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, at)


def _end_workers(items: Any) -> None:
    """End all workers, including hanging ones: Python waits for them at its exit, and they ignore SIGTERM."""
    workers = getattr(items, "_workers", ())
    if workers:
        items._shutdown_workers()  # they end by themselves; from here on a dead worker is no error
    for worker in workers:
        if worker.is_alive():
            worker.kill()
            worker.join(KILLED_S)
        if worker.is_alive():  # in a system call that does not end, as on a lost network drive
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]
