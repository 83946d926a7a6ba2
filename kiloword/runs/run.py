"""A run as its folder shows it: settings, curves, alerts, and whether it still runs. No torch here."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from kiloword.files import LOCK, held
from kiloword.runs.alerts import Alerts
from kiloword.runs.rows import ROWS, number, objects, read_object

ERROR = "error.json"  # why a run ended; removed when it continues
RECENT = 60.0  # seconds since the last row of a run that may have been killed
MAIN = ("recall@1", "/accuracy", "/acc1", "/mean_average_precision", "/cider")  # ends of the main metrics of validation
SPEED = ("pairs_per_s", "data_wait", "memory", "gradient_norm", "lr", "scale", "bias")
COUNTS = ("step", "epoch", "time", "restarts", "skipped", "truncated", "captions", "save_s", "stopped_early")
NO_LOSS = (*SPEED, *COUNTS, "skipped_steps", "slowest_data_wait", "loader_pairs_per_s", "mined_share")
Curve = tuple[Sequence[float], Sequence[float]]
"""Steps and values [N]."""


def read_best(folder: Path) -> tuple[str, float, int] | None:
    """Metric, value and step of the model that `--keep-best` kept; None without one."""
    best = read_object(folder / "best" / "best.json")
    return (best["metric"], best["value"], best["step"]) if {"metric", "value", "step"} <= best.keys() else None


class Run:
    """One run, read again by `update`."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name or folder.absolute().name
        self._file, self._end = 0, 0
        self.update()

    def update(self) -> None:
        """Read the rows that are new, all of them where a resumed run has written its file again."""
        recipe = read_object(self.folder / "config.json").get("recipe")
        self.recipe: dict[str, Any] = recipe if isinstance(recipe, dict) else {}
        self.error = str(read_object(self.folder / ERROR).get("error", ""))
        self.best = read_best(self.folder)
        path = self.folder / ROWS
        file = path.stat().st_ino if path.is_file() else 0
        if file != self._file or not file:
            self._file, self._end = file, 0
            self.last: dict[str, Any] = {}  # the newest value of every metric
            self.curves: dict[str, tuple[array[float], array[float]]] = {}
            limits = {**(self.recipe.get("data") or {}), **(self.recipe.get("settings") or {})}
            self.alerts = Alerts(self.batch, limits.get("bad_share", 0.01), limits.get("max_scale"))
        rows, self._end = objects(path, self._end)
        for row in rows:
            if type(row.get("step")) is int:
                self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        self.last |= row
        self.alerts.add(row)
        for name in row:
            if (value := number(row, name)) is not None:
                steps, values = self.curves.setdefault(name, (array("d"), array("d")))
                steps.append(row["step"])
                values.append(value)

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def batch(self) -> int:
        return int(self.recipe.get("batch", 1))

    @property
    def seconds(self) -> float:
        """Time that the steps took, without validation, from the rate of every row; 0.0 without rows."""
        steps, rates = self.curves.get("pairs_per_s", ((), ()))
        parts = zip(pairwise([0.0, *steps]), rates, strict=True)
        return float(sum((b - a) * self.batch / rate for (a, b), rate in parts if rate > 0))

    @property
    def state(self) -> str:
        """One of running, finished, stopped (by a signal, or killed) and failed."""
        if self.error:
            return "failed"
        if held(self.folder):
            return "running"
        saved = max((int(path.stem[5:]) for path in (self.folder / "state").glob("step-*.json")), default=self.step)
        ended = self.step >= (self.recipe.get("steps") or math.inf) or "stopped_early" in self.curves
        if ended and saved >= self.step:
            return "finished"
        with suppress(OSError):  # no lock, or no row
            lock, rows = (self.folder / LOCK).stat(), (self.folder / ROWS).stat()
            if time.time() - max(lock.st_mtime, rows.st_mtime) < RECENT:  # of another machine, or killed just now
                return "running"
        return "stopped"

    @property
    def losses(self) -> list[str]:
        """The loss and its terms; a pair loss that is the whole loss is not named twice."""
        names = [name for name in self.curves if name not in NO_LOSS and not name.startswith("val/")]
        if self.curves.get("pair") == self.curves.get("loss"):
            names = [name for name in names if name != "pair"]
        return sorted(names, key=lambda name: name != "loss")

    @property
    def validation(self) -> list[str]:
        """The main metrics of validation, of other tasks the first two."""
        names = [name for name in self.curves if name.startswith("val/")]
        return [n for n in names if n.endswith(MAIN) or (self.best and n == self.best[0])] or names[:2]


def find(paths: Sequence[Path]) -> dict[Path, str]:
    """Folders of runs -> names to show: the paths themselves, or the runs in them.

    Raises: ValueError for a path that is not a run and contains none.
    """
    runs: dict[Path, str] = {}
    for path in paths:
        inside = {p: p.name if len(paths) == 1 else str(p) for p in sorted(path.glob("*")) if _is_run(p)}
        if not _is_run(path) and not inside:
            raise ValueError(f"{path} is no run and holds none: expected the --out of `kiloword train`, or its parent.")
        runs |= {path: str(path)} if _is_run(path) else inside
    return runs


def _is_run(path: Path) -> bool:
    return (path / ROWS).is_file() or str(read_object(path / "config.json").get("format")).startswith("kiloword-run-")
