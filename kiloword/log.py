"""What a run says: `metrics.jsonl` always, a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

PLAIN_EVERY_S = 10.0  # without a terminal, a line at most this often


class Log:
    """Metrics of a run, from the step it resumes at. `quiet` writes the file alone (ranks other than 0: nothing)."""

    def __init__(self, path: Path | None, steps: int, step: int = 0, quiet: bool = False, out: TextIO | None = None):
        self.path, self.steps, self.quiet = path, steps, quiet
        self.out = out or sys.stderr
        self.live = self.out.isatty()
        self._start, self._first = time.perf_counter(), step
        self._spoke = -PLAIN_EVERY_S
        self._width = 0
        if path is not None:
            _drop_rows_after(path, step)

    def row(self, values: dict[str, Any]) -> None:
        """Append one row to the file; values must be plain numbers or strings, "step" among them."""
        if self.path is not None:
            try:
                with self.path.open("a") as f:
                    f.write(json.dumps(values) + "\n")
            except OSError as e:
                raise ValueError(f"cannot write {self.path}: {e.strerror}. The last state is kept.") from e

    def progress(self, values: dict[str, Any]) -> None:
        """Show the step: a line that rewrites itself on a terminal, else one at most every few seconds."""
        now = time.perf_counter()
        last = values["step"] >= self.steps
        if self.quiet or (not self.live and now - self._spoke < PLAIN_EVERY_S and not last):
            return
        self._spoke = now
        done = values["step"] - self._first
        eta = (now - self._start) / max(done, 1) * (self.steps - values["step"])
        line = (
            f"step {values['step']}/{self.steps}  loss {values['loss']:.3f}  {values['pairs_per_s']:.0f} pairs/s  "
            f"data wait {values['data_wait']:.0%}  ETA {int(eta // 60)}:{int(eta % 60):02d}"
        )
        if self.live:
            self.out.write("\r" + line.ljust(self._width))
            self._width = len(line)
            self.out.flush()
        else:
            print(line, file=self.out, flush=True)

    def say(self, sentence: str) -> None:
        """A sentence of its own line."""
        if not self.quiet:
            start = "\n" if self.live and self._width else ""
            self._width = 0
            print(start + sentence, file=self.out, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a `metrics.jsonl`; a last line that a crash cut is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _drop_rows_after(path: Path, step: int) -> None:
    """A resumed run writes the rows after its state again: drop the old ones."""
    rows = read_metrics(path)
    kept = [r for r in rows if r["step"] <= step]
    if path.is_file():
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
        temporary.replace(path)
