"""Reading of `metrics.jsonl` into growing columns; later reads take only new rows."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
LINE, NAMES, NAME = 1 << 16, 1000, 200  # limits: bytes of a line, metrics of a run, characters of a metric's name
MOST = 1e100  # limit of a step or a metric: larger values are damage, and their sums would overflow


class RowReader:
    """Yields the new rows of a file at each call; an incomplete line is read later.

    A resumed run rewrites the file: then all rows are read again, and `times` counts the reads from the start.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, 0
        self._offset, self._last = 0, b""  # offset of the next line, and the line before it

    def __call__(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():  # missing; a pipe or a device may be endless
            return
        with self.path.open("rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:  # the last line read has changed
                self._offset, self._last = 0, b""
                file.seek(0)
            while line := file.readline(LINE):  # parts of a longer line are not valid rows
                if len(line) < LINE and not line.endswith(b"\n"):
                    return
                if not self._offset:
                    self.times += 1
                self._offset, self._last = self._offset + len(line), line
                row = _parse(line)
                if row is not None:
                    yield row


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    items = islice(row.items(), NAMES) if isinstance(row, dict) else ()
    row = {name: value for name, value in items if len(name) <= NAME and not absurd(value)}
    return row if type(row.get("step")) is int and row["step"] >= 0 else None


def number(row: Mapping[str, Any], name: str) -> float | None:
    """A finite number of a row, or None."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def absurd(value: Any) -> bool:
    """Whether a value is not a number, or larger than MOST and finite."""
    return not isinstance(value, int | float) or MOST < abs(value) < math.inf


class Columns:
    """Rows as one array per name, 8 bytes per value."""

    def __init__(self) -> None:
        self.rows = 0
        self.last: dict[str, Any] = {}  # the newest value of every name
        self._columns: dict[str, tuple[array[float], array[float]]] = {}  # steps and values

    def add(self, row: dict[str, Any]) -> None:
        """Append a row: its finite numbers to their columns, its other values as the last ones."""
        self.rows += 1
        room = NAMES - len(self.last)
        row = {name: value for n, (name, value) in enumerate(row.items()) if n < room or name in self.last}
        self.last |= row
        step = float(self.last["step"])
        for name, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                steps, values = self._columns.setdefault(name, (array("d"), array("d")))
                steps.append(step)
                values.append(value)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def of(self, name: str) -> tuple[Numbers, Numbers]:
        """Steps and values [N] of the rows with `name`."""
        steps, values = self._columns.get(name, (array("d"), array("d")))
        return np.array(steps), np.array(values)


def smoothed(values: Numbers, weight: float) -> Numbers:
    """An exponential moving average that starts without bias.

    Args: values: [N]; weight: of the past, from 0 (no smoothing) to below 1.
    """
    if weight == 0:
        return values
    out, total, norm = np.empty_like(values), 0.0, 0.0
    for n, value in enumerate(values.tolist()):
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out[n] = total / norm
    return out


def thinned(steps: Numbers, values: Numbers, low: float, high: float, bins: int) -> tuple[Numbers, Numbers]:
    """Means of the values in equal bins of steps; empty bins are omitted.

    Args: steps, values: [N]; low, high: range of steps. Returns: bin numbers and means [M], M at most `bins`.
    """
    at = ((steps - low) / max(high - low, 1e-9) * (bins - 1)).round().astype(np.int64)
    counts = np.bincount(at, minlength=bins)
    sums = np.bincount(at, weights=values, minlength=bins)
    used = np.flatnonzero(counts)
    return used.astype(np.float64), sums[used] / counts[used]
