"""The verb watch: the last row and the alerts of runs, until they end. No torch at import: help is instant."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kiloword.config.execution import Some
from kiloword.runs.run import Run, find
from kiloword.terminal import say, shown
from kiloword.terminal.progress import Pace, duration

SHOWN = {  # metrics of the last row, and how they are shown
    "loss": "loss {:.4g}",
    "lr": "lr {:.2e}",
    "epoch": "epoch {:.2f}",
    "pairs_per_s": "{:,.4g} pairs/s",
    "data_wait": "data wait {:.0%}",
    "memory": "memory {:,.0f} MB",
    "skipped": "{:,.0f} bad samples",
    "truncated": "{:,.0f} captions cut",
    "skipped_steps": "{:,.0f} steps skipped",
    "restarts": "{:,.0f} restarts",
}


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Follow the last rows and the alerts of runs until they end.

    Example: kiloword watch runs/first
    """

    runs: Some[Path]  # folders of runs (--out of train), or folders that contain runs
    once: bool = False  # print how the runs are now and exit, as when the output is not a terminal
    every: float = 2.0  # seconds between two looks

    def run(self) -> None:
        """Raises: ValueError for paths without runs."""
        if not self.every > 0:
            raise ValueError(f"--every is {self.every}: expected seconds above 0.")
        if self.once or not sys.stdout.isatty():
            say(*(line for folder, name in find(self.runs).items() for line in lines_of(Run(folder, name))))
            return
        from rich.live import Live
        from rich.text import Text

        runs, going = dict[Path, Run](), True
        with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
            while going:
                for folder, name in find(self.runs).items():
                    runs.setdefault(folder, Run(folder, name)).update()
                lines = (shown(line) for run in runs.values() for line in lines_of(run))
                live.update(Text("\n".join(lines)), refresh=True)
                going = any(run.state == "running" for run in runs.values())
                time.sleep(self.every * going)


def lines_of(run: Run) -> list[str]:
    """A run as it is now: its last row, its last validation, the error that ended it, its alerts."""
    steps, state, pace = run.recipe.get("steps"), run.state, Pace(run.batch)
    for rate in run.curves.get("pairs_per_s", ((), ()))[1][-20:]:
        pace.add({"pairs_per_s": rate})
    kind = [str(run.recipe.get(name, "")) for name in ("method", "size")]
    parts = [run.name, *kind, state, f"step {run.step:,}" + (f"/{steps:,} ({run.step / steps:.0%})" if steps else "")]
    if steps and state == "running":
        parts.append(f"ETA {duration(pace.seconds(max(steps - run.step, 0)))}")
    parts += [form.format(run.curves[name][1][-1]) for name, form in SHOWN.items() if name in run.curves]
    lines = ["  ".join(filter(None, parts))]
    values = [f"{name.removeprefix('val/')} {run.curves[name][1][-1]:.4g}" for name in run.validation]
    if run.best:
        values.append(f"best {run.best[0].removeprefix('val/')} {run.best[1]:.4g} at step {run.best[2]:,}")
    lines += ["  " + "  ".join(values)] if values else []
    lines += [f"  ! the run ended with an error: {run.error}"] if run.error else []
    return lines + [f"  ! {alert.name} since step {alert.since:,}: {alert.message}" for alert in run.alerts.current]
