"""Work numbered by steps, done in order by any number of worker processes: the result does not depend on how many."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

Item = TypeVar("Item")


def in_order(make: Callable[[int], Item], steps: Iterable[int], workers: int, timeout: float = 300) -> Iterator[Item]:
    """`make(step)` for every step, in order, made ahead by `workers` processes (0: in this one).

    Errors: a ValueError of `make` comes out as it was raised; RuntimeError when a worker died or took longer than
    `timeout` seconds for one step.
    """
    loader: DataLoader[Item | _Failed] = DataLoader(
        _Steps(make),
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        timeout=timeout if workers else 0,
        worker_init_fn=_start_worker if workers else None,
        generator=torch.Generator(),  # otherwise making an iterator would draw from the global one
    )
    try:
        for item in loader:
            if isinstance(item, _Failed):
                raise item.error
            yield cast(Item, item)
    except RuntimeError as error:
        if workers and "DataLoader" in str(error):
            raise RuntimeError(
                f"a loader worker stopped: {error}. Often memory (fewer --workers), a small /dev/shm, or a file system "
                "that hangs; --workers 0 shows where."
            ) from error
        raise


@dataclass
class _Failed:
    """A sentence for the user, on its way out of a worker; the DataLoader would bury it in a traceback."""

    error: ValueError


class _Steps(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __getitem__(self, step: int) -> Any:
        try:
            return self.make(step)
        except ValueError as error:
            return _Failed(error)


def _start_worker(worker: int) -> None:
    """One thread a worker; Ctrl-C is for the main process, which then ends its workers."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "cv2" in sys.modules:  # its thread pool does not survive a fork
        sys.modules["cv2"].setNumThreads(0)
