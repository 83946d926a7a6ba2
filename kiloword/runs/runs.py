"""A run as seen from its folder: configuration, progress, and whether it is still running."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kiloword.runs.alerts import Alerts
from kiloword.runs.rows import NAME, Columns, RowReader, absurd
from kiloword.runs.rule import About
from kiloword.terminal.progress import Pace

LEAST_SILENCE = 60.0  # seconds without a row that count as normal
MAX_JSON = 1 << 24  # bytes of a config.json
ERROR = "error.json"  # why a run ended; removed when it continues
RUN = "kiloword-run-"  # start of the format in a run's config.json


@dataclass(frozen=True)
class Config:
    """The fields of `config.json` that are shown; other versions may lack some."""

    method: str = ""
    size: str = ""
    steps: int | None = None
    batch: int = 1
    bad_share: float = 0.01
    max_scale: float | None = None
    validates: bool = False  # there are data to evaluate on


class Watched:
    """One run, read again by `update`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.config, self.error = read_config(folder), ""  # the error with which the run ended
        self.best = read_best(folder)
        self.reader = RowReader(folder / "metrics.jsonl")
        self._clear()

    def _clear(self) -> None:
        config = self.config
        self.columns, self.pace = Columns(), Pace(config.batch)
        self.alerts = Alerts(About(batch=config.batch, bad_share=config.bad_share, max_scale=config.max_scale))

    def update(self) -> bool:
        """Read new rows; returns whether anything changed."""
        before = self.config, self.error, self.best
        self.config = read_config(self.folder)  # written when a run begins, and again with --extend
        self.error = str(read_object(self.folder / ERROR).get("error", ""))
        self.best = read_best(self.folder)
        new = before != (self.config, self.error, self.best)
        if before[0] != self.config:
            self.reader = RowReader(self.reader.path)
            self._clear()
        times = self.reader.times
        for row in self.reader():
            if self.reader.times != times:  # rewritten from its start, or seen for the first time
                times = self.reader.times
                self._clear()
            if row["step"] < self.step:  # not written by a run
                continue
            self.columns.add(row)
            self.pace.add(row)
            self.alerts.add(row)
            new = True
        return new

    @property
    def step(self) -> int:
        return int(self.columns.last.get("step", 0))

    @property
    def left(self) -> float | None:
        """Seconds to the end, without validation and pauses."""
        return None if self.config.steps is None else self.pace.seconds(max(self.config.steps - self.step, 0))

    @property
    def seconds(self) -> float:
        """Time that the steps took, without validation, from the rate of every row; 0.0 without rows."""
        steps, rates = self.columns.of("pairs_per_s")
        parts = zip(pairwise([0.0, *steps.tolist()]), rates.tolist(), strict=True)
        return float(sum((b - a) * self.config.batch / rate for (a, b), rate in parts if rate > 0))

    def state(self, now: float | None = None) -> tuple[str, str]:
        """One of failed, waiting, running, finished, stopped and silent, and details."""
        now = time.time() if now is None else now
        if self.error:
            return "failed", f"{_ago(now - _changed(self.folder / ERROR))} ago"
        if not self.columns.rows:
            return "waiting", "no row yet"
        saved, last = saved_step(self.folder), self.config.steps is not None and self.step >= self.config.steps
        begun = any((self.folder / "state").glob("step-*"))  # else states were removed after the run
        written = saved >= self.step if saved is not None else not begun
        if last and written and (not self.config.validates or self.step in self._validations()):
            return "finished", ""
        if self.step in self.columns.of("stopped_early")[0]:
            return "finished", "early, by --patience"
        silent = max(now - _changed(self.reader.path, now), 0.0)
        times, restarts = (self.columns.of(name)[1][-200:] for name in ("time", "restarts"))
        gaps = np.diff(times)  # between rows, with pauses (saving, validation), but for those between two processes
        gaps = gaps[np.diff(restarts) == 0] if len(restarts) == len(times) else gaps
        usual = max(10 * float(np.median(gaps)), 2 * float(np.quantile(gaps, 0.98))) if len(gaps) else 0.0
        if silent < max(LEAST_SILENCE, usual):
            return "running", ""
        ago = _ago(silent)
        if last:
            doing = "validates" if written else "saves"
            return "silent", f"for {ago}: it still {doing}, or was stopped before; the same command goes on"
        if saved is not None and saved >= self.step:
            return "stopped", f"at step {saved}, {ago} ago; the same command goes on"
        return "silent", f"for {ago}" + (f"; the last state is of step {saved}" if saved else "")

    def _validations(self) -> set[float]:
        """Steps whose row has a metric of a validation."""
        names = [name for name in self.columns.names if name.startswith("val/")]
        return {step for name in names for step in self.columns.of(name)[0].tolist()}


def _ago(seconds: float) -> str:
    return f"{max(seconds, 0) / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _changed(path: Path, otherwise: float = 0.0) -> float:
    """When a file was written, in seconds since 1970."""
    try:
        return path.stat().st_mtime
    except OSError:
        return otherwise


def read_config(folder: Path) -> Config:
    """Read the configuration; missing or invalid fields keep their defaults."""
    raw = read_object(folder / "config.json")
    recipe = _inside(raw, "recipe")
    there = _inside(recipe, "settings") | _inside(recipe, "data") | recipe
    kinds = {"method": str, "size": str, "steps": int, "batch": int, "bad_share": float, "max_scale": float | int}
    fits = {k: there[k] for k, kind in kinds.items() if isinstance(there.get(k), kind)}
    fits = {k: value for k, value in fits.items() if isinstance(value, str) or not absurd(value)}
    return Config(**fits, validates=bool(there.get("val")))


def settings_of(folder: Path) -> dict[str, Any]:
    """The recipe of a run as `config.json` holds it; {} where it cannot be read."""
    return _inside(read_object(folder / "config.json"), "recipe")


def read_best(folder: Path) -> tuple[str, float, int] | None:
    """Metric, value and step of the model that `--keep-best` kept; None without one."""
    raw = read_object(folder / "best" / "best.json")
    metric, value, step = (raw.get(name) for name in ("metric", "value", "step"))
    if not isinstance(metric, str) or type(step) is not int or absurd(value) or absurd(step):
        return None
    return metric[:NAME], float(value or 0), step


def _inside(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    return value if isinstance(value, dict) else {}


def saved_step(folder: Path) -> int | None:
    """Step of the newest state; None without states."""
    matches = [re.fullmatch(r"step-(\d+)\.json", p.name) for p in (folder / "state").glob("step-*.json")]
    return max((int(m.group(1)) for m in matches if m), default=None)


def find(paths: Sequence[Path]) -> dict[Path, str]:
    """Folders of runs -> names to show: the paths themselves, or the runs in them.

    Raises: ValueError for a path that is not a run and contains none.
    """
    runs: dict[Path, str] = {}
    for path in paths:
        if _is_run(path):
            runs[path] = str(path)
            continue
        _check_folder(path)
        inside = sorted(p for p in path.iterdir() if p.is_dir() and _is_run(p))
        runs |= {p: p.name if len(paths) == 1 else str(p) for p in inside}
        if not inside and not any(path.iterdir()):
            runs[path] = str(path)  # a run that has just begun
        elif not inside:
            raise ValueError(f"{path} is no run and holds none: expected the --out of `kiloword train`, or its parent.")
    return runs


def _is_run(path: Path) -> bool:
    kind = str(read_object(path / "config.json").get("format", ""))
    return kind.startswith(RUN) or (path / "metrics.jsonl").is_file()


def _check_folder(path: Path) -> None:
    """Raises: ValueError, with a hint what to name instead."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: expected the --out of `kiloword train`.")
    if path.is_dir() and path.name in ("model", "state") and _is_run(path.parent):
        raise ValueError(f"{path} is a part of a run: expected its --out, {path.parent}.")
    if (path / "model.safetensors").is_file():
        raise ValueError(f"{path} is a model folder, which has no curves: expected the --out of `kiloword train`.")
    if not path.is_dir():
        hint = f", {path.parent}" if _is_run(path.parent) else ""
        raise ValueError(f"{path} is a file: expected the folder of a run, the --out of `kiloword train`{hint}.")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON:  # a pipe or a device may be endless
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
