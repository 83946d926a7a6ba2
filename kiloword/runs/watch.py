"""The verb watch: the last row and the alerts of runs, until they end."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kiloword.config.execution import Some
from kiloword.runs.rows import in_words
from kiloword.runs.run import Run, find
from kiloword.terminal import say, shown
from kiloword.terminal.progress import duration, time_left

EVERY, PAUSE = 2.0, 10  # seconds between two looks, at least; and such multiples of the time that one takes


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Show the progress and the alerts of runs until they end.

    Examples:
      kiloword watch runs/first
    """

    runs: Some[Path]  # folders of runs (--out of train), or folders that contain runs
    once: bool = False  # print the state of the runs once and exit; always so where the output is not a terminal

    def run(self) -> None:
        """Raises: ValueError for paths without runs."""
        if self.once or not sys.stdout.isatty():
            say(*(line for run in find(self.runs) for line in lines_of(run)))
            return
        from rich.live import Live
        from rich.text import Text

        going = True
        with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
            while going:
                began = time.monotonic()
                runs = find(self.runs)
                live.update(Text("\n".join(shown(line) for run in runs for line in lines_of(run))), refresh=True)
                going = any(run.state == "running" for run in runs)
                time.sleep(going * max(EVERY, PAUSE * (time.monotonic() - began)))


def lines_of(run: Run) -> list[str]:
    """A run as it is now: its last row, its last validation, the error that ended it, its alerts."""
    steps, state, method = run.recipe.get("steps"), run.state, str(run.recipe.get("method", ""))
    parts = [run.name, method, state, f"step {run.step:,}" + (f"/{steps:,}" if steps else "")]
    if steps and state == "running":
        left = time_left((steps - run.step) * run.batch, run.curves.get("pairs_per_s", ((), ()))[1])
        parts.append(f"ETA {duration(left)}")
    now = {name: values[-1] for name, (_, values) in run.curves.items()}
    parts += [*in_words(now), *(f"{name.removeprefix('val/')} {now[name]:.4g}" for name in run.validation)]
    lines = ["  ".join(filter(None, parts))]
    lines += [f"  ! the run ended with an error: {run.error}"] if run.error else []
    return lines + [f"  ! {alert.name} since step {alert.since:,}: {alert.message}" for alert in run.alerts.current]
