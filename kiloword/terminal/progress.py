"""How far long work is: a live line on a terminal, plain lines elsewhere; and how long it still takes."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from kiloword.terminal import say

PLAIN_EVERY_S = 10.0  # without a terminal, a line at most this often
RECENT = 20  # rows
Item = TypeVar("Item")


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


@dataclass
class _State:
    """Whether progress is shown, and the line that is not finished."""

    on: bool = False
    bar: Bar | None = None


_state = _State()


@contextmanager
def showing_progress() -> Iterator[None]:
    """Inside, `track` shows progress. A line that an error leaves unfinished is ended."""
    before, _state.on = _state.on, True
    try:
        yield
    finally:
        _end_line()
        _state.on = before


def _end_line() -> None:
    bar, _state.bar = _state.bar, None
    if bar is not None and bar.live and bar.spoke:
        say("", to=bar.out)


def track(
    items: Iterable[Item], what: str, unit: str, of: int, count: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """The items, with share, rate and time left on stderr under `showing_progress`; short work shows nothing.

    Args: of: number of units of all items; count: number of units of one item. Inside another `track` nothing is shown.
    """
    if not _state.on or _state.bar is not None:
        yield from items
        return
    bar = _state.bar = Bar(what, unit)
    done = 0
    try:
        for item in items:
            yield item
            done += count(item)
            if done < of or bar.spoke:
                bar(done, of)
    finally:
        if _state.bar is bar:
            _state.bar = None if done >= of else bar
            _end_line()


class Pace:
    """Pairs a second over the last rows; validation is no part of them. Args: batch, pairs a step."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._rates: deque[float] = deque(maxlen=RECENT)

    def add(self, row: Mapping[str, Any]) -> None:
        rate = row.get("pairs_per_s")
        if isinstance(rate, int | float) and 1e-9 < rate < math.inf:
            self._rates.append(float(rate))

    @property
    def rate(self) -> float | None:
        """Pairs a second: the harmonic mean, as rows hold equally many pairs."""
        return len(self._rates) / sum(1 / r for r in self._rates) if self._rates else None

    def seconds(self, steps: int) -> float | None:
        """What `steps` steps take."""
        return None if self.rate is None else steps * self.batch / self.rate


def per_second(rate: float) -> str:
    """1,234, 56, 7.8, 0.4 or 0.012: two digits where the rate is below 10, as of a large model on a CPU."""
    return f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.2g}"


def duration(seconds: float | None) -> str:
    """7:05, 3:07:05 or 12d 03h; "?" where it is not known."""
    if seconds is None:
        return "?"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours < 1:
        return f"{m}:{s:02d}"
    return f"{hours}:{m:02d}:{s:02d}" if hours < 24 else f"{hours // 24}d {hours % 24:02d}h"
