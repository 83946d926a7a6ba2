"""`kiloword watch`: repeated frames on a terminal, one frame elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kiloword.config.options import Trackers
from kiloword.runs.expected import read
from kiloword.runs.mirror import Mirrors
from kiloword.runs.page import View, page
from kiloword.runs.plot import Dots
from kiloword.runs.runs import Watched, find
from kiloword.runs.sinks import check_installed
from kiloword.runs.track import catch_up
from kiloword.terminal import say
from kiloword.terminal.screen import Screen

NO_BRAILLE = ("linux", "vt100", "vt102", "vt220", "ansi", "dumb", "unknown")  # terminals without braille characters
PIPE_WIDTH = 100


class Runs:
    """The runs in some folders, including those that begin later."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._runs: dict[Path, Watched] = {}

    def update(self) -> tuple[list[Watched], bool]:
        """All runs, and whether anything changed. Raises: ValueError for paths without runs."""
        new = False
        for folder, name in find(self.paths).items():
            new |= folder not in self._runs
            run = self._runs.setdefault(folder, Watched(folder, name))
            new |= run.update()
        return list(self._runs.values()), new


def main(
    paths: Sequence[Path],
    once: bool = False,
    every: float = 2.0,
    smooth: float = 0.0,
    curves: tuple[str, ...] = (),
    tensorboard: Path | None = None,
    console: Console | None = None,
    log_to: Trackers | None = None,
    expected: str = "",
) -> None:
    """Run `kiloword watch`. Raises: ValueError for paths without runs, invalid settings, and a server that is away."""
    if not every > 0:
        raise ValueError(f"--every is {every}: expected seconds above 0.")
    if not 0 <= smooth < 1:
        raise ValueError(f"--smooth is {smooth}: expected a weight of the past from 0 (none) to below 1, such as 0.9.")
    if not paths:
        raise ValueError("watch needs the folder of a run, e.g. kiloword watch runs/first.")
    console, band = console or screen(), read(expected) if expected else None
    runs, mirrors = Runs(paths), Mirrors(tensorboard)
    if log_to is not None:
        _catch_up(log_to, runs)
    redraws = console.is_terminal and not console.is_dumb_terminal and not once

    def frame() -> tuple[Text, bool]:
        """The page, and whether anything changed."""
        watched, new = runs.update()
        mirrors.update(watched)
        height = console.height - 1 if redraws else None
        view = View(
            width=console.width,
            height=height,
            dots=_dots(console, len(watched)),
            smooth=smooth,
            curves=curves,
            expected=band,
        )
        return page(watched, view), new

    if once or not console.is_terminal:
        console.print(frame()[0], soft_wrap=True)
        return
    display = Live(console=console, screen=True, auto_refresh=False) if redraws else nullcontext()
    with suppress(KeyboardInterrupt), display as live:
        while True:
            text, new = frame()
            if live is not None:
                text.append(f"\n{time.strftime('%H:%M:%S')}  Ctrl-C ends", "dim")
                live.update(text, refresh=True)
            elif new:  # print each changed frame below the previous one
                console.print(text, soft_wrap=True)
            time.sleep(every)


def _catch_up(kind: Trackers, runs: Runs) -> None:
    """Send the rows that a server lacks."""
    check_installed(kind)
    for run in runs.update()[0]:
        catch_up(kind, run.folder, complete=run.state()[0] == "finished")
        say(f"{kind} has all rows of {run.name}")


def screen() -> Console:
    """The terminal; without one, output of COLUMNS columns without control characters."""
    screen = Screen()
    if screen.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return screen
    return Screen(PIPE_WIDTH)


def _dots(console: Console, runs: int) -> Dots:
    """Braille dots if the terminal supports them and colours tell runs apart, else marks."""
    utf = console.encoding.lower().startswith("utf")
    plain = console.is_terminal and os.environ.get("TERM", "").lower() in NO_BRAILLE
    colours = bool(console.color_system) and not console.no_color
    return "braille" if utf and not plain and (colours or runs == 1) else "marks"
