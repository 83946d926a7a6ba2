"""Work in order, in this process or in workers: the same items, errors as sentences, and no worker outlives its end."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from itertools import count, islice

import pytest
import torch

from cases import worker_dies
from kiloword.data.steps import in_order


def test_workers_keep_the_order_of_steps_without_end() -> None:
    """The first steps take longest. Nothing is drawn from the global generator, and the workers end with the items."""
    state = torch.random.get_rng_state()

    def make(step: int) -> torch.Tensor:
        time.sleep(0.05 * (step < 2))
        return torch.tensor([step, os.getpid()])

    items = in_order(make, count(), 2)
    steps, processes = torch.stack(list(islice(items, 6))).T.tolist()
    assert steps == [*range(6)]
    assert len({*processes, os.getpid()}) == 3
    items.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
    assert torch.equal(torch.random.get_rng_state(), state)


def failing(error: Exception) -> Callable[[int], int]:
    def make(step: int) -> int:
        if step == 2:
            raise error
        return step

    return make


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("as it is"), ValueError, "^as it is$"),
        (MemoryError(), ValueError, "^batch of step 3: out of memory"),
        (OSError(errno.ENOSPC, "No space left on device"), ValueError, "^batch of step 3: No space left on device"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
    ids=str,
)
def test_what_goes_wrong(workers: int, error: Exception, kind: type[Exception], said: str) -> None:
    items = in_order(failing(error), range(5), workers)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(kind, match=said):
        next(items)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        pytest.param(killed, "(Killed|exited unexpectedly)", marks=worker_dies),
        (lambda: time.sleep(600), "timed out after 1 seconds"),
    ],
    ids=["killed", "hangs"],
)
def test_a_worker_that_stops_ends_the_items(does: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"a loader worker stopped.*{said}.*fewer --workers"):
        list(in_order(lambda step: does() if step == 1 else None, range(3), 1, timeout=1 if "timed" in said else 60))
    assert not multiprocessing.active_children()
    gc.collect()  # here, not in a later test


def test_a_worker_goes_on_at_a_signal_to_all_processes() -> None:
    """The main process saves first, and ends its workers."""

    def make(step: int) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        return step

    assert list(in_order(make, range(2), 1)) == [0, 1]
