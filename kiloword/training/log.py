"""Output of a run: rows in `metrics.jsonl`, a live line on a terminal or plain lines elsewhere, alerts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from kiloword.addresses import scrubbed
from kiloword.config.recipes import Recipe
from kiloword.files import write_atomic
from kiloword.runs.alerts import Alerts
from kiloword.runs.rows import ROWS, in_words, read_metrics
from kiloword.runs.trackers import Kind, Tracker, opened
from kiloword.terminal import say, warn
from kiloword.terminal.progress import ProgressLine, duration, time_left


class Log:
    """Messages and progress of a run on stderr, unless `quiet`; its rows once `open` has named their file.

    As a context manager: at its end the tracker is closed.
    """

    def __init__(self, recipe: Recipe, quiet: bool = False) -> None:
        self.recipe, self.quiet = recipe, quiet
        self.path: Path | None = None
        self._progress = ProgressLine(None if quiet else sys.stderr, at_once=True)
        self._rates = list[float]()  # pairs a second, of each row
        self._tracker: Tracker | None = None

    def open(self, out: Path, step: int = 0, to: Literal["file"] | Kind = "file") -> None:
        """Write rows to OUT/metrics.jsonl. A resumed run writes those after `step` again.

        Args: to: `--log-to`.
        """
        self.path = out / ROWS
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in kept).encode()
        if self.path.is_file() and self.path.read_bytes() != text:
            write_atomic(self.path, text)
        self._restarts = max((row.get("restarts", 0) + 1 for row in rows), default=0)
        self._alerts = Alerts(self.recipe.batch, self.recipe.data.bad_share)
        for row in kept:
            self._alerts.add(row)
        if to != "file":
            with self._tracking(to):
                self._tracker = opened(to, out, step)
                self._tracker.send(kept)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._tracker is not None:
            with self._tracking():
                self._tracker.close(kind is None)

    @contextmanager
    def _tracking(self, kind: str = "the tracker") -> Iterator[None]:
        """What its library raises is printed once, and the run goes on without it."""
        try:
            yield
        except Exception as e:
            self._tracker = None
            reason = scrubbed(" ".join(str(e).split()))[:600] or type(e).__name__
            warn(f"{kind} does not take rows ({reason}). The run goes on; the same command sends what is missing.")

    def row(self, values: dict[str, Any]) -> None:
        """Append one row to the file, with "time" (seconds since 1970) and "restarts" (number of times the run was
        resumed before), and print the alerts that begin or end with it. Nothing on ranks above 0, which have no file.

        Args: values: plain numbers or strings, "step" among them. Raises: OSError.
        """
        if self.path is None:
            return
        values = values | {"time": round(time.time(), 3), "restarts": self._restarts}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        for message in self._alerts.add(values):
            self.say(message)
        if self._tracker is not None:
            with self._tracking():
                self._tracker.send([values])

    def progress(self, values: dict[str, Any]) -> None:
        """Show the step in a line: on a terminal always, elsewhere now and then."""
        self._rates.append(values["pairs_per_s"])
        step, steps = values["step"], self.recipe.steps
        left = duration(time_left((steps - step) * self.recipe.batch, self._rates))
        self._progress.show("  ".join([f"step {step}/{steps}", f"ETA {left}", *in_words(values)]), step, steps)

    def say(self, message: str) -> None:
        """Print a message on its own line, unless quiet."""
        if not self.quiet:
            say(message, to=sys.stderr)
