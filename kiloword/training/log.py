"""Output of a run: rows in `metrics.jsonl`, a live line on a terminal or plain lines elsewhere, alerts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives
from kiloword.files import write_atomic
from kiloword.terminal import say
from kiloword.terminal.progress import Pace, ProgressLine, duration, per_second
from kiloword.watch.alerts import Alerts
from kiloword.watch.mirror import in_training
from kiloword.watch.rows import RowReader
from kiloword.watch.rule import About
from kiloword.watch.track import Tracker


@dataclass
class SinceRow:
    """Reports of the steps since the last row; saved with the run, so that a resumed run writes the same next row."""

    reports: list[dict[str, Tensor]] = field(default_factory=list)  # the same on all ranks
    captions: int = 0  # on this rank

    def state_dict(self) -> dict[str, Any]:
        """Plain values, summed over ranks. A collective: all ranks must call it."""
        reports = [{k: [str(x.dtype).removeprefix("torch."), x.item()] for k, x in r.items()} for r in self.reports]
        return {"reports": reports, "captions": collectives.add_up(self.captions)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Args: state: result of `state_dict`, from any number of ranks."""
        self.reports = [
            {name: torch.tensor(x, dtype=getattr(torch, kind), device=device) for name, (kind, x) in report.items()}
            for report in state["reports"]
        ]
        self.captions = 0 if collectives.rank() else state["captions"]


class Log:
    """Metrics of a run from step `step` on. `quiet` prints nothing; without `path` nothing is written (ranks above 0).

    Every row gets "time" (seconds since 1970) and "restarts" (number of times the run was resumed before). `mirror` is
    called after every row.
    """

    def __init__(
        self,
        path: Path | None,
        steps: int,
        step: int = 0,
        quiet: bool = False,
        out: TextIO | None = None,
        about: About | None = None,
    ) -> None:
        self.path, self.steps, self.quiet = path, steps, quiet
        self.out = out or sys.stderr
        self._progress = ProgressLine(None if quiet else self.out, at_once=True)
        self.mirror: Callable[[], None] = lambda: None
        self.tracker: Tracker | None = None
        about = about or About()
        self._alerts, self._pace = Alerts(about), Pace(about.batch)
        self._restarts = 0
        if path is not None:
            self._go_on(path, step)

    def _go_on(self, path: Path, step: int) -> None:
        """A resumed run writes the rows after its state again: drop the old ones, and feed the rest to the alerts.

        Raises: ValueError for a pipe.
        """
        if path.is_fifo():
            raise ValueError(f"{path} is a pipe: expected a file of metrics, or none. Remove it.")
        rows = read_metrics(path)
        kept = [r for r in rows if r["step"] <= step]
        text = "".join(json.dumps(r) + "\n" for r in kept)
        if path.is_file() and (path.stat().st_size != len(text) or path.read_bytes() != text.encode()):
            write_atomic(path, text.encode())
        self._restarts = max((r.get("restarts", 0) + 1 for r in rows), default=0)
        for row in kept:
            self._alerts.add(row)

    def row(self, values: dict[str, Any]) -> None:
        """Append one row to the file, and print the alerts that begin or end with it.

        Args: values: plain numbers or strings, "step" among them. Raises: ValueError when the file cannot be written.
        """
        if self.path is None:
            return
        values = values | {"time": round(time.time(), 3), "restarts": self._restarts}
        try:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(json.dumps(values) + "\n")
        except OSError as e:
            raise ValueError(f"cannot write {self.path}: {e.strerror}. The last state is kept.") from e
        for message in self._alerts.add(values):
            self.say(message)
        self.mirror()

    def progress(self, values: dict[str, Any]) -> None:
        """Show the step: a line with a bar on a terminal, elsewhere a line now and then."""
        self._pace.add(values)
        self._progress.show(self._line(values), values["step"], self.steps)

    def _line(self, values: dict[str, Any]) -> str:
        left = self._pace.seconds(self.steps - values["step"])
        wait, loader_rate = values.get("slowest_data_wait", values["data_wait"]), values.get("loader_pairs_per_s")
        parts = [
            f"step {values['step']}/{self.steps}",
            f"loss {values['loss']:.3f}" if "loss" in values else "loss ?",
            f"{per_second(values['pairs_per_s'])} pairs/s",
            f"ETA {duration(left)}",
            f"data wait {wait:.0%}" + (f" (loader makes {per_second(loader_rate)}/s)" if loader_rate else ""),
        ]
        if "epoch" in values:
            parts.insert(1, f"epoch {values['epoch']:.2f}")
        if "lr" in values:
            parts.append(f"lr {values['lr']:.2e}")
        counts = (("skipped", "bad samples"), ("skipped_steps", "skipped steps"))
        return "  ".join(parts + [f"{values[name]} {words}" for name, words in counts if values.get(name)])

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """At its end the tracker has all rows, or the user knows that it lacks some."""
        complete = False
        try:
            yield
            complete = True
        finally:
            if self.tracker is not None:
                self.tracker.close(complete)

    def say(self, message: str) -> None:
        """Print a message on its own line, unless quiet."""
        if not self.quiet:
            say(message, to=self.out)


def open_log(out: Path, recipe: Recipe, step: int, options: RunOptions, log_limit: Tensor | None) -> Log:
    """The log of a run from `step` on; on ranks above 0 it prints and writes nothing.

    Args: log_limit: upper limit of the head's log scale.
    """
    if collectives.rank():
        return Log(None, recipe.steps, quiet=True)
    max_scale = None if log_limit is None else float(log_limit.exp())
    about = About(batch=recipe.batch, bad_share=recipe.data.bad_share, max_scale=max_scale)
    log = Log(out / "metrics.jsonl", recipe.steps, step, quiet=options.quiet, about=about)
    if options.log_to == "tensorboard":
        log.mirror = in_training(out, log.say)
    elif options.log_to != "file":
        log.tracker = Tracker(options.log_to, out)
    return log


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a `metrics.jsonl`, read by `watch.rows.RowReader`; a last line that a crash cut off is omitted."""
    return list(RowReader(path)())
