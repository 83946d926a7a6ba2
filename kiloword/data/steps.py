"""Ordered work in worker processes: results of numbered steps do not depend on the number of workers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from kiloword.errors import WORKER, sentence_of

Item = TypeVar("Item")
KILLED_S = 5.0  # seconds for a killed worker to end


def in_order(
    make: Callable[[int], Item], steps: Iterable[int], workers: int, timeout: float = 300, pin: bool = False
) -> Iterator[Item]:
    """`make(step)` for every step, in order, prefetched by `workers` processes (0: made in this process).

    Args: timeout: seconds that one step may take a worker; pin: items are in page-locked memory (their `pin_memory`).
    Errors: a ValueError of `make` unchanged; ValueError for lack of memory, a file's error, and a worker that died or
    took too long. (If a worker dies while nothing is awaited, DataLoader raises a RuntimeError anywhere in this
    process; `sentence_of` handles it.)
    """
    items: Any = iter(
        DataLoader(
            _Steps(make),
            batch_size=None,
            sampler=steps,
            num_workers=workers,
            timeout=timeout if workers else 0,
            worker_init_fn=_start_worker if workers else None,
            pin_memory=pin,
            generator=torch.Generator(),  # otherwise an iterator would draw from the global generator
        )
    )
    try:
        for item in items:
            if isinstance(item, ValueError):
                raise item
            yield item
    except (RuntimeError, EOFError, OSError) as error:  # an OSError of `make` is a ValueError by now
        stopped = f"a loader worker stopped while it sent a batch. {WORKER}"
        message = sentence_of(error) if isinstance(error, RuntimeError) else stopped
        if not workers or message is None:
            raise
        _kill(items)
        raise ValueError(message) from error
    finally:
        if workers:
            items._shutdown_workers()
            _kill(items)


def _kill(items: Any) -> None:
    """Kill workers that hang: they ignore SIGTERM, and Python would wait for them at its exit."""
    if items._worker_pids_set:
        torch._C._remove_worker_pids(id(items))  # from here on a dead worker is no error
        items._worker_pids_set = False
    for worker in items._workers:
        worker.kill()
        worker.join(KILLED_S)


class _Steps(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __getitem__(self, step: int) -> Any:
        """The item, or its error: the DataLoader would wrap an error in a traceback."""
        try:
            return self.make(step)
        except ValueError as error:
            return error
        except (MemoryError, OSError) as error:
            return ValueError(f"batch of step {step + 1}: {sentence_of(error)}")


def _start_worker(worker: int) -> None:
    """Ignore signals: SLURM, torchrun and terminals send them to all processes, and the main one, which must save,
    ends its workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if "cv2" in sys.modules:  # its thread pool does not survive a fork
        sys.modules["cv2"].setNumThreads(0)
