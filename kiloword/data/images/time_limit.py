"""A limit on the processor time of decoding one sample, for images that pass the limits of `work.py`.

A reader records which row it decodes and since when. The thread that waits for the batch checks this, gives up a late
row, and begins again without it. Unlike wall time, processor time does not grow while a process is stopped or waits.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from kiloword.types import BadSample

SECONDS = 60.0  # the largest images within the limits on work take some seconds
REASON = "decoding takes more than"
POLL_S = 2.0  # between two checks of the waiting thread
ENDED_S = 5.0  # in which a thread should end, which it does at its next row
_SLOT = struct.Struct("<qqqd")  # row, process, thread, processor time of the thread when it began
_IDLE = _SLOT.pack(-1, 0, 0, math.inf)  # infinite: a slot read while it is written is not late
_here = threading.local()


class Late(Exception):
    """A row that took too long to decode was given up."""


class TimeLimit:
    """What each reader decodes now, in memory that forked processes share, and the rows that are given up.

    Without /proc (outside of Linux) no row is late.
    """

    def __init__(self, readers: int, given_up: set[int]) -> None:
        self.given_up, self.over = given_up, False
        idle = _IDLE * max(1, readers)
        self._slots = mmap.mmap(-1, len(idle))
        self._slots[:] = idle

    def is_shared(self) -> bool:
        """Whether worker processes see the same memory."""
        return multiprocessing.get_start_method() == "fork"

    def enter(self, reader: int) -> None:
        """Make this thread the reader of this number."""
        _here.reading = self, reader * _SLOT.size, os.getpid(), threading.get_native_id()

    def begin(self, place: int, process: int, thread: int, row: int) -> None:
        """Raises: BadSample for a row that was given up; SystemExit in an abandoned thread."""
        if self.over:
            raise SystemExit
        if row in self.given_up:
            raise BadSample(f"{REASON} {SECONDS:g} s of processor time")
        _SLOT.pack_into(self._slots, place, row, process, thread, time.thread_time())

    def end(self, place: int) -> None:
        self._slots[place : place + _SLOT.size] = _IDLE

    def check(self) -> None:
        """Give up late rows. Raises: Late if there are any."""
        late = {
            row
            for row, process, thread, begun in _SLOT.iter_unpack(self._slots[:])
            if row >= 0 and _busy(process, thread) - begun > SECONDS
        }
        if late:
            self.given_up |= late
            self.over = True
            raise Late


@contextmanager
def decoding(row: int) -> Iterator[None]:
    """Count the work within against the limit of a row, if there is a limit. Raises: BadSample for late rows.

    Args: row: its number by `kiloword.data.sources.mixture.stored_row`.
    """
    reading = getattr(_here, "reading", None)
    if reading is None:
        yield
        return
    limit, place, process, thread = reading
    limit.begin(place, process, thread, row)
    try:
        yield
    finally:
        limit.end(place)


class Apart:
    """Repeats a call in a separate thread. A late call is abandoned, as no thread can be ended."""

    def __init__(self, call: Callable[[], Any], limit: TimeLimit) -> None:
        self._call, self._limit = call, limit
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self) -> Any:
        """What the call returns or raises. Raises: Late."""
        self._asked.put(True)
        while True:
            try:
                value, error = self._answers.get(timeout=POLL_S)
            except Empty:
                self._limit.check()
                continue
            if error is not None:
                raise error
            return value

    def close(self) -> None:
        """End the thread at its next row, and wait for that unless it is late.

        torch and OpenCV abort a process that ends while a thread decodes (SIGABRT instead of its exit code).
        """
        late, self._limit.over = self._limit.over, True
        self._asked.put(False)
        self._thread.join(0 if late else ENDED_S)

    def _run(self) -> None:
        self._limit.enter(0)
        while self._asked.get():
            try:
                self._answers.put((self._call(), None))
            except BaseException as error:  # raised in the waiting thread
                self._answers.put((None, error))


def _busy(process: int, thread: int) -> float:
    """Processor time of a thread in seconds; 0 if unknown."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/task/{thread}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
