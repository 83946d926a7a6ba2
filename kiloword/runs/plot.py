"""Curves in characters: braille dots if the terminal supports them, else one mark per run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
from rich.text import Text

from kiloword.runs.rows import Numbers, thinned

Dots = Literal["braille", "marks"]
STYLES = ("cyan", "yellow", "magenta", "green", "red", "blue", "bright_white", "bright_black")
MARKS = "*+ox#@%&ABCDEFGHIJKLMNPQRSTUVWXYZ"
LABEL = 8  # columns left of a plot
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of a dot: [4 rows, 2 columns]


@dataclass(frozen=True)
class Series:
    """One run's curve."""

    steps: Numbers  # [N], ascending
    values: Numbers  # [N], finite
    place: int  # of the run: its style and mark


def plot(title: str, series: Sequence[Series], steps: tuple[float, float], width: int, height: int, dots: Dots) -> Text:
    """A title, `height` rows of curves with the range of values beside them, and the range of steps below.

    Args: series: with at least one value in total; steps: range of steps; width: number of columns in total.
    """
    inner = max(width - LABEL, 4)
    fine = (2, 4) if dots == "braille" else (1, 1)
    curves = [thinned(s.steps, s.values, *steps, inner * fine[0]) for s in series]
    low, high, cut = _range(np.concatenate([means for _, means in curves]))
    cells = _cells(series, curves, (low, high), (inner, height), fine)
    text = Text(no_wrap=True, overflow="crop")
    text.append(title[:width] + "\n", "bold")
    top, bottom = _labels(low, high)
    top = ">" + top if cut else top
    for row in range(height):
        label = top if row == 0 else bottom if row == height - 1 else ""
        text.append(f"{label:>{LABEL - 1}}|", "dim")
        line = [cells.get((row, column)) for column in range(inner)]
        for place, group in groupby(line, lambda cell: None if cell is None else cell[1]):
            style = None if place is None else STYLES[place % len(STYLES)]
            mark = " " if place is None else MARKS[place % len(MARKS)]
            text.append("".join(chr(0x2800 + cell[0]) if cell and dots == "braille" else mark for cell in group), style)
        text.append("\n")
    first, last = (f"{step:,.0f}" for step in steps)
    text.append(" " * LABEL + first + last.rjust(max(inner - len(first), len(last) + 1)), "dim")
    return text


def _cells(
    series: Sequence[Series],
    curves: Sequence[tuple[Numbers, Numbers]],
    values: tuple[float, float],
    size: tuple[int, int],
    fine: tuple[int, int],
) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, column) -> dots, and the run that drew last."""
    high, tall = values[1], size[1] * fine[1]
    scale = (tall - 1) / max(values[1] - values[0], 1e-300)
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for curve, (at, means) in zip(series, curves, strict=True):
        down = np.clip((high - means) * scale, 0, tall - 1)
        for x, y in _line(at, down):
            key = (y // fine[1], x // fine[0])
            bit = _BRAILLE[y % 4][x % 2] if fine[1] == 4 else 1
            before = out.get(key)
            out[key] = (bit if before is None or before[1] != curve.place else before[0] | bit, curve.place)
    return out


def _line(at: Numbers, down: Numbers) -> Iterator[tuple[int, int]]:
    """Dots (x, y) of the points and of straight lines between them."""
    points = list(zip(at.tolist(), down.tolist(), strict=True))
    if points:
        yield round(points[0][0]), round(points[0][1])
    for (x0, y0), (x1, y1) in pairwise(points):
        steps = max(round(abs(x1 - x0)), round(abs(y1 - y0)), 1)
        for n in range(1, steps + 1):
            yield round(x0 + (x1 - x0) * n / steps), round(y0 + (y1 - y0) * n / steps)


def _range(values: Numbers) -> tuple[float, float, bool]:
    """Lowest and highest value shown, and whether rare higher values are cut, as one spike would flatten the curve."""
    low, high = float(values.min()), float(values.max())
    usual = float(np.quantile(values, 0.98))
    cut = len(values) >= 20 and high - low > 5 * (usual - low) > 0
    high = usual + 0.5 * (usual - low) if cut else high
    if high - low <= 1e-3 * abs(high):  # constant up to noise
        margin = abs(high) * 0.1 or 1.0
        return low - margin, high + margin, False
    return low, high, cut


def _labels(low: float, high: float) -> tuple[str, str]:
    """Labels of both ends, with more digits if they would look equal."""
    top, bottom = short(high), short(low)
    return (top, bottom) if top != bottom else (f"{high:.6g}", f"{low:.6g}")


def short(value: float) -> str:
    """A number with three or four digits in at most six characters: 0.12, 12.3, 1234, 56.7k, 1.2e-5."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-2:
        return f"{value:.1e}".replace("e-0", "e-")
    if size < 1e4:
        return f"{value:.{max(0, 2 - max(0, math.floor(math.log10(size))))}f}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.3g}{letter}" if size < 999.5 * unit else f"{value / unit:.0f}{letter}"
    return f"{value:.3g}"
