"""Signals: a run stops after its step with its state saved; where there is nothing to save, it stops at once.

SIGTERM, Ctrl-C (SIGINT) and a closed terminal (SIGHUP) stop the run; SIGUSR1 saves a state and the run goes on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import TypeVar

from kiloword.distributed import collectives, heartbeat

Item = TypeVar("Item")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(ValueError):
    """The run ended before its last step; its state is saved. `code` is for the shell: 128 and the signal's number."""

    def __init__(self, sentence: str, code: int = 2) -> None:
        super().__init__(sentence)
        self.code = code


class _Now(BaseException):
    """Leaves the place where the signal came, past everything that catches exceptions of sources and methods."""


class Stop:
    """What signals have asked for. Calling it says whether the run is to stop after its step."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._state, self._at_once = False, False

    def __call__(self) -> bool:
        return bool(self.asked)

    def state_asked(self) -> bool:
        """Whether SIGUSR1 came since the last call."""
        asked, self._state = self._state, False
        return asked

    def stopped(self, sentence: str) -> Stopped:
        """To be raised. Torchrun, Kubernetes and SLURM tell a run that was stopped from one that failed by its code."""
        return Stopped(sentence, 128 + self.asked[0] if self.asked else 2)

    @contextmanager
    def at_once(self, sentence: str) -> Iterator[None]:
        """Inside, a signal ends the run where it stands: nothing is to be saved. Raises Stopped with the sentence."""
        try:
            with self._immediate():
                yield
        except _Now:
            raise self.stopped(sentence) from None

    def batches(self, batches: Iterator[Item], step: int) -> Iterator[Item]:
        """The same batches, `step` the first (from 0); a single rank's end when a signal comes while one is waited for.

        Several ranks stop after a step that all of them have made: their state is saved by all together.
        """
        for number in count(step + 1):
            heartbeat.at(f"waiting for its data of step {number}")
            try:
                if collectives.ranks() > 1:
                    batch = next(batches, None)
                else:
                    with self._immediate():
                        batch = next(batches, None)
            except _Now:
                return
            if batch is None:
                return
            heartbeat.at(f"in step {number}")
            yield batch

    @contextmanager
    def _immediate(self) -> Iterator[None]:
        self._at_once = True
        try:
            if self.asked:
                raise _Now
            yield
        finally:
            self._at_once = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM, SIGINT and SIGUSR1; the second SIGINT interrupts at once."""
        if number == signal.SIGUSR1:
            self._state = True
            return
        again = number == signal.SIGINT and number in self.asked
        self.asked.append(number)
        if again and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        if self._at_once:
            self._at_once = False
            raise _Now


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Ctrl-C, SIGTERM and SIGHUP ask the loop to stop after its step; a second Ctrl-C ends at once, a second SIGTERM
    changes nothing: SLURM sends several.

    Not so under torchrun: it hands on each Ctrl-C that the terminal has sent already, and ends what does not stop.
    What was started with a signal ignored (nohup) goes on ignoring it.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    wanted = [s for s in (*ENDING, signal.SIGUSR1) if s == signal.SIGINT or signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, stop.handle) for s in wanted}
    try:
        yield stop
    finally:
        for s, old in before.items():
            signal.signal(s, old)
