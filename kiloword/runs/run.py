"""A run as its folder shows it: settings, curves, alerts, and whether it still runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from kiloword.files import LOCK, held
from kiloword.runs.alerts import Alerts
from kiloword.runs.rows import ROWS, numbers, read_metrics, read_object

ERROR = "error.json"  # why a run ended; removed when it continues
RECENT = 60.0  # seconds since the last row of a run on another machine
MAIN = ("recall@1", "/accuracy", "/acc1", "/mean_average_precision", "/cider")  # ends of the main metrics of validation
SPEED = ("pairs_per_s", "data_wait", "memory")
OPTIMIZATION = ("gradient_norm", "lr", "scale", "bias")
COUNTS = ("step", "epoch", "time", "restarts", "skipped", "truncated", "captions", "save_s", "stopped_early")
NO_LOSS = {*SPEED, *OPTIMIZATION, *COUNTS, "skipped_steps", "slowest_data_wait", "loader_pairs_per_s", "mined_share"}
Curve = tuple[Sequence[float], Sequence[float]]
"""Steps and values [N]."""


def read_best(folder: Path) -> tuple[str, float, int] | None:
    """Metric, value and step of the model that `--keep-best` kept; None without one."""
    best = read_object(folder / "best" / "best.json")
    return (best["metric"], best["value"], best["step"]) if {"metric", "value", "step"} <= best.keys() else None


class Run:
    """One run as its folder is now."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self.folder, self.name = folder, name or folder.absolute().name
        config = read_object(folder / "config.json")
        recipe = config.get("recipe")
        self.recipe: dict[str, Any] = recipe if isinstance(recipe, dict) else {}
        self.digests = {name: config[name] for name in ("code", "data_fingerprint") if config.get(name)}
        self.batch, self.step = int(self.recipe.get("batch", 1)), 0
        self.error = str(read_object(folder / ERROR).get("error", ""))
        self.best = read_best(folder)
        self.curves: dict[str, tuple[list[float], list[float]]] = {}
        self.alerts = Alerts(self.batch, (self.recipe.get("data") or {}).get("bad_share", 0.01))
        for row in read_metrics(folder / ROWS):
            self.step = row["step"]
            self.alerts.add(row)
            for name, value in numbers(row).items():
                steps, values = self.curves.setdefault(name, ([], []))
                steps.append(self.step)
                values.append(value)

    @property
    def speed(self) -> float:
        """Pairs a second over the whole run without validation; 0.0 without rows."""
        rates = self.curves.get("pairs_per_s", ((), ()))[1]
        return harmonic_mean(rates) if rates else 0.0

    @property
    def state(self) -> str:
        """One of running, finished, stopped (by a signal, or killed) and failed."""
        if self.error:
            return "failed"
        if held(self.folder):
            return "running"
        if self.step >= (self.recipe.get("steps") or math.inf) or "stopped_early" in self.curves:
            return "finished"
        lock, rows = self.folder / LOCK, self.folder / ROWS
        there = lock.exists() and rows.exists() and time.time() - rows.stat().st_mtime < RECENT
        return "running" if there else "stopped"

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


def find(paths: Sequence[Path]) -> list[Run]:
    """The runs of the paths themselves, or in them, with names to show.

    Raises: ValueError for a path that is not a run and contains none.
    """
    names: dict[Path, str] = {}
    for path in paths:
        inside = {p: p.name if len(paths) == 1 else str(p) for p in sorted(path.glob("*")) if _is_run(p)}
        if not _is_run(path) and not inside:
            raise ValueError(f"{path} is no run and holds none: expected the --out of `kiloword train`, or its parent.")
        names |= {path: str(path)} if _is_run(path) else inside
    return [Run(folder, name) for folder, name in names.items()]


def _is_run(path: Path) -> bool:
    return (path / ROWS).is_file() or str(read_object(path / "config.json").get("format")).startswith("kiloword-run-")
