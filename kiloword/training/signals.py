"""Signals: a run stops after its step and saves its state; where there is nothing to save, it stops at once.

SIGTERM, Ctrl-C (SIGINT) and a closed terminal (SIGHUP) stop the run; SIGUSR1 saves a state and the run continues.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(ValueError):
    """The run ended before its last step; its state is saved. `code`: exit status, 128 plus the signal's number."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class _Now(BaseException):
    """Raised by a signal. A BaseException, so that code which catches errors of sources and methods lets it through."""


class Stop:
    """The signals received so far. Calling it returns whether the run should stop after its step."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._state, self._at_once = False, False

    def __call__(self) -> bool:
        return bool(self.asked)

    def state_asked(self) -> bool:
        """Whether SIGUSR1 came since the last call."""
        asked, self._state = self._state, False
        return asked

    def stopped(self, message: str) -> Stopped:
        """The exception to raise. Its code lets torchrun, Kubernetes and SLURM tell a stopped run from a failed one."""
        return Stopped(message, 128 + self.asked[0] if self.asked else 2)

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Inside, a signal ends the run at once, as there is nothing to save. Raises: Stopped with the message."""
        self._at_once = True
        try:
            if self.asked:
                raise _Now
            yield
        except _Now:
            raise self.stopped(message) from None
        finally:
            self._at_once = False

    def handle(self, number: int, frame: object) -> None:
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
    """Inside, Ctrl-C, SIGTERM and SIGHUP ask the loop to stop after its step; a second Ctrl-C ends the process at once.

    A second SIGTERM changes nothing, as SLURM sends several. Under torchrun a second Ctrl-C changes nothing either:
    torchrun repeats each Ctrl-C of the terminal, and itself ends ranks that do not stop. A signal that was ignored at
    the start (nohup) stays ignored.
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
