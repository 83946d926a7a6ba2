"""How far an evaluation is: lines on stderr while it reads images, encodes texts, ranks pairs or fits a probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kiloword.mining.progress import Bar
from kiloword.terminal import say

Item = TypeVar("Item")


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
