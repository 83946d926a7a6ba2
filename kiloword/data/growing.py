"""Loader processes that a run starts by itself, once it has waited for data longer than they cost."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator

from kiloword.data.loader import Loader
from kiloword.types import Batch

LOOKS_S = 5.0  # seconds of the run before it decides
LEAST_WAIT = 0.05  # share of the time spent waiting, below which nothing is gained
LEAST_LEFT_S = 10.0  # seconds of waiting that the rest of the run would have, below which nothing is gained


def batches(loader: Loader, start: int, stop: int, most: int, say: Callable[[str], None]) -> Iterator[Batch]:
    """The loader's batches of the steps [start, stop), made in this process until training waits too long for them.

    Args: most: processes to start then; say: receives the note that they start. Errors: as `Loader.batches`.
    """
    if most < 1 or loader.workers or loader.reads_ahead or not _forks():
        yield from loader.batches(start, stop)
        return
    here, wait, step = loader.batches(start, stop), _Wait(), start
    while (batch := wait.next(here)) is not None:
        step += 1
        yield batch
        loader.workers = wait.worth(stop - step, most)
        if loader.workers:
            break
    else:
        return
    here.close()  # type: ignore[attr-defined]  # ends its thread: a process is not forked beside one that decodes
    say(
        f"waiting for data takes {wait.share:.0%} of the time: from step {step + 1} on loader processes prepare it "
        f"({loader.workers} at a time; --workers sets their number)."
    )
    yield from loader.batches(step, stop)


def _forks() -> bool:
    """Whether processes start at once, with all that this one has: a source of any kind need not be pickled."""
    return multiprocessing.get_context().get_start_method() == "fork"


class _Wait:
    """Seconds spent waiting for batches, of those since the first came."""

    def __init__(self) -> None:
        self._waited, self._batches, self._began = 0.0, 0, math.inf

    def next(self, items: Iterator[Batch]) -> Batch | None:
        """The next batch; None at the end."""
        start = time.perf_counter()
        batch = next(items, None)
        if self._began < start:
            self._waited, self._batches = self._waited + time.perf_counter() - start, self._batches + 1
        else:
            self._began = time.perf_counter()  # the first batch opens files
        return batch

    @property
    def share(self) -> float:
        """Of the time since the first batch."""
        return self._waited / max(time.perf_counter() - self._began, 1e-9)

    def worth(self, left: int, most: int) -> int:
        """How many processes are worth starting now, 0 to `most`. Args: left: batches that the run still needs."""
        elapsed, share = time.perf_counter() - self._began, self.share
        saved = left * self._waited / max(self._batches, 1)
        if elapsed < LOOKS_S or share < LEAST_WAIT or saved < LEAST_LEFT_S:
            return 0
        return min(most, math.ceil(share / (1 - share)))
