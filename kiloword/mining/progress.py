"""How far a long search is: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from kiloword.terminal import say
from kiloword.training.log import PLAIN_EVERY_S
from kiloword.watch.pace import duration


class Bar:
    """Called with (done, of): says the share, the rate and the time left; the last call ends the line."""

    def __init__(self, what: str, unit: str, out: TextIO | None = None) -> None:
        self.what, self.unit, self.out = what, unit, out or sys.stderr
        self.live = self.out.isatty()
        self._start = time.perf_counter()
        self._spoke = self._start

    @property
    def spoke(self) -> bool:
        """Whether a line was written."""
        return self._spoke > self._start

    def __call__(self, done: int, of: int) -> None:
        now, last = time.perf_counter(), done >= of
        if not last and now - self._spoke < (0.2 if self.live else PLAIN_EVERY_S):
            return
        self._spoke = now
        rate = done / max(now - self._start, 1e-9)
        left = (of - done) / max(rate, 1e-9)
        line = f"{self.what} {done / of:4.0%}  {_short(rate)} {self.unit}/s  ETA {duration(left)}"
        if self.live:
            say(line.ljust(60), to=self.out, start="\r", end="\n" if last else "")
        else:
            say(line, to=self.out)


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"
