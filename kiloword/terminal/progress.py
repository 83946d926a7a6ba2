"""How far long work is, and how long it still takes: one line on a terminal, some lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import harmonic_mean
from types import SimpleNamespace
from typing import TextIO, TypeVar

from kiloword.terminal import is_terminal, say, shown

LIVE_EVERY_S, PLAIN_EVERY_S = 0.2, 10.0  # between two lines on a terminal and elsewhere, at least
RECENT = 20  # rows
Item = TypeVar("Item")


class ProgressLine:
    """Progress on one stream: a line that is rewritten on a terminal and in a notebook; elsewhere one now and then.

    Args: out: None shows nothing; at_once: show the first line without waiting.
    """

    def __init__(self, out: TextIO | None, at_once: bool = False) -> None:
        self.out, self.shown = out, False
        self._live = in_notebook() or (out is not None and is_terminal(out))
        self._last = -math.inf if at_once else time.perf_counter()

    def show(self, line: str, done: int, of: int) -> None:
        """Show `line` if the last one is old enough or the work is done, `done` of `of` units."""
        now, wait = time.perf_counter(), LIVE_EVERY_S if self._live else PLAIN_EVERY_S
        if self.out is None or (now - self._last < wait and done < of):
            return
        self._last, self.shown = now, True
        if not self._live:
            say(line, to=self.out)
            return
        columns = 80
        with suppress(OSError, ValueError):  # a notebook has no size
            columns = os.get_terminal_size(self.out.fileno()).columns
        # The cursor stays at the beginning, so that what others print takes the line's place.
        text = shown(line, self.out.encoding)[: columns - 1].ljust(columns - 1)
        self.out.write(f"\r{text}" + ("\n" if done >= of else "\r"))
        self.out.flush()


class Bar:
    """Called with (done, of): shows the share, the rate and the time left."""

    def __init__(self, what: str, unit: str, out: TextIO | None) -> None:
        self.what, self.unit, self.line = what, unit, ProgressLine(out)
        self._start = time.perf_counter()

    def __call__(self, done: int, of: int) -> None:
        rate = max(done / max(time.perf_counter() - self._start, 1e-9), 1e-9)
        left = duration((of - done) / rate)
        self.line.show(f"{self.what} {done / of:4.0%}  {per_second(rate)} {self.unit}/s  ETA {left}", done, of)


_state = SimpleNamespace(on=False, busy=False)  # whether `track` shows progress, and whether one does


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook (Jupyter, Colab, VS Code); a terminal of IPython is not."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def showing(progress: bool | None = True) -> Iterator[None]:
    """Inside, `track` shows progress: for True, for None in notebooks, and inside another one unless it is False."""
    before = _state.on
    _state.on = progress is not False and bool(before or progress or in_notebook())
    try:
        yield
    finally:
        _state.on = before
        _state.busy &= before


def track(
    items: Iterable[Item], what: str, unit: str, of: int, count: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """The items, with share, rate and time left on stderr inside `showing`; short work shows nothing.

    Args: of: number of units of all items; count: number of units of one item. Inside another `track` nothing is shown.
    """
    if not _state.on or _state.busy:
        yield from items
        return
    bar, done = Bar(what, unit, sys.stderr), 0
    _state.busy = True
    try:
        for item in items:
            yield item
            done += count(item)
            if done < of or bar.line.shown:
                bar(done, of)
    finally:
        _state.busy = False


def time_left(pairs: int, rates: Sequence[float]) -> float | None:
    """Seconds that pairs take at the mean of the last rates, pairs a second; None where there are none."""
    recent = [rate for rate in rates[-RECENT:] if rate > 1e-9]
    return pairs / harmonic_mean(recent) if recent else None


def per_second(rate: float) -> str:
    """1,234, 56, 7.8, 0.4 or 0.012: two digits where the rate is below 10, as of a large model on a CPU."""
    return f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.2g}"


def duration(seconds: float | None) -> str:
    """7:05, 3:07:05 or 12d 03h; "?" where it is not known."""
    if seconds is None:
        return "?"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
