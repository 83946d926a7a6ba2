"""Axes of SVG plots that scale with the page, with text of constant size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from kiloword.report.page import Html

Points = Sequence[tuple[float, float]]
DASHES = ("none", "8 5", "2 5", "10 4 2 4", "5 3", "14 4")  # lines differ without colour, too


@dataclass(frozen=True)
class Axis:
    """One axis: its ends and the values that get a tick."""

    low: float
    high: float
    ticks: tuple[float, ...] = ()
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(values: Sequence[float], widen: bool = True, whole: bool = False) -> Axis:
    """An axis over the values with about five ticks at 1, 2 or 5 times a power of ten; widen it to whole ticks.

    Args: whole: ticks at whole numbers only.
    """
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs((high - low) / s - 5))
    step = max(step, 1.0) if whole else step
    if widen:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(n * step for n in range(first, last + 1)))


NARROW = 0.25  # least height of an axis of values, as a share of the largest


def value_axis(values: Sequence[float], least: float = NARROW) -> Axis:
    """A linear axis over values that are compared: values that hardly differ do not fill its height.

    Args: least: its least height as a share of the largest value, so that 3% do not look like a cliff.
    """
    low, high = min(values), max(values)
    lacking = least * max(abs(low), abs(high)) - (high - low)
    if high > low and lacking > 0:
        below = min(lacking / 2, low) if low >= 0 else lacking / 2
        low, high = low - below, high + lacking - below
        if max(values) <= 1 < high and min(values) >= 0:  # shares
            low, high = low - (high - 1), 1.0
    return linear_axis([low, high])


def log_axis(values: Sequence[float]) -> Axis:
    """A logarithmic axis over positive values; a range too short for powers of ten gets ticks in between."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low / 1.5, high * 1.5
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1,), (1, 2, 5)):
        ticks = tuple(m * 10.0**k for k in decades for m in mantissas if low <= m * 10.0**k <= high)
        if len(ticks) >= 3:
            return Axis(low, high, ticks, log=True)
    between = linear_axis([low, high], widen=False).ticks
    return Axis(low, high, tuple(t for t in between if t > 0), log=True)


def number(value: float) -> str:
    """A tick as it is written."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def line_sample(index: int) -> str:
    """A short line in the colour and dashes of a series, for the legend."""
    return f'<path class="line" d="M1 5H27" style="stroke:var(--s{index});stroke-dasharray:{DASHES[index]}"/>'


@dataclass(frozen=True)
class Frame:
    """Two labelled axes, and the square of 1000 units a side between them, in which marks are drawn."""

    x: Axis
    y: Axis
    x_label: str
    y_label: str

    def across(self, value: float) -> str:
        """Horizontal coordinate of a value."""
        return f"{1000 * self.x.place(value):.1f}"

    def down(self, value: float) -> str:
        """Vertical coordinate of a value."""
        return f"{1000 - 1000 * self.y.place(value):.1f}"

    def at(self, points: Points) -> list[str]:
        """Coordinates of points, "x y"."""
        return [f"{self.across(a)} {self.down(b)}" for a, b in points]

    def below(self, value: float, text: str, line: int = 0) -> str:
        """A text under the x axis at a value, on one of the lines there."""
        place = round(100 * self.x.place(value), 2)
        return f'<text x="{place}%" y="100%" dy="{1.6 + 1.3 * line:.1f}em" text-anchor="middle">{escape(text)}</text>'

    def beside(self, point: tuple[float, float], text: str) -> str:
        """A text at the upper right of a point."""
        x, y = round(100 * self.x.place(point[0]), 2), round(100 - 100 * self.y.place(point[1]), 2)
        return f'<text class="name" x="{x}%" y="{y}%" dx=".45em" dy="-.35em">{escape(text)}</text>'

    def drawn(
        self,
        marks: str,
        summary: str,
        names: Sequence[str] = (),
        sample: Callable[[int], str] = line_sample,
        below: str = "",
        lines: int = 1,
    ) -> Html:
        """The plot.

        Args: summary: for screen readers; names: of the series, two or more get a legend; below: SVG of the frame, such
        as texts under the x axis; lines: of these.
        """
        legend = "".join(
            f'<li><svg aria-hidden="true" viewBox="0 0 28 10">{sample(i)}</svg>{escape(name)}</li>'
            for i, name in enumerate(names)
        )
        legend = f'<ul class="legend">{legend}</ul>' if len(names) > 1 else ""
        return Html(
            f'<figure class="plot">{legend}<div class="frame">'
            f'<svg class="axes" role="img" aria-label="{escape(summary)}">{self._scales(lines)}{below}'
            f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
            f"{marks}</svg></svg></div></figure>"
        )

    def _scales(self, lines: int = 1) -> str:
        """Rules, ticks, numbers and labels of both axes."""
        rows = "".join(
            f'<line class="rule" x1="0" x2="100%" y1="{place}%" y2="{place}%"/>'
            f'<text x="0" dx="-10" y="{place}%" dy=".33em" text-anchor="end">{number(tick)}</text>'
            for tick in self.y.ticks
            for place in [round(100 - 100 * self.y.place(tick), 2)]
        )
        columns = "".join(
            f'<rect class="tick" x="{round(100 * self.x.place(tick), 2)}%" y="100%" width="1" height="5"/>'
            f"{self.below(tick, number(tick))}"
            for tick in self.x.ticks
        )
        down = f"{1.8 + 1.3 * lines:.1f}em"
        labels = (
            f'<text class="name" x="0" dx="-3.2em" y="0" dy="-1.2em">{escape(self.y_label)}</text>'
            f'<text class="name" x="100%" y="100%" dy="{down}" text-anchor="end">{escape(self.x_label)}</text>'
        )
        return rows + columns + labels
