"""Line plots as SVG that scales with the page, with text of constant size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from kiloword.report.style import SERIES

Points = Sequence[tuple[float, float]]
DASHES = ("none", "8 5", "2 5", "10 4 2 4", "5 3", "14 4")  # so that lines differ without colour


@dataclass(frozen=True)
class Axis:
    """One axis: its ends and the values that get a tick."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def line_plot(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    log_y: bool = False,
    *,
    log_x: bool = False,
    whole_x: bool = False,
    smooth: int = 0,
) -> str:
    """A line plot with axes, ticks and, for more than one series, a legend.

    Args: series name -> (x, y) points in the order of drawing, at most 6 series; a non-finite y breaks its line;
    log_x and log_y make an axis logarithmic; whole_x has ticks at whole numbers only (levels, counts); smooth > 1
    draws the mean of that many neighbours over a faint line of the points.
    Errors: ValueError for no finite point, too many series, or values of 0 or less on a logarithmic axis.
    """
    _check(series, log_x, log_y)
    finite = [point for points in series.values() for point in points if math.isfinite(point[1])]
    across = [p[0] for p in finite]
    x = log_axis(across) if log_x else linear_axis(across, widen=False, whole=whole_x)
    y = (log_axis if log_y else linear_axis)([p[1] for p in finite])
    lines = "".join(_series(i, points, x, y, smooth) for i, points in enumerate(series.values()))
    label = escape(_summary(series, x_label, y_label))
    return (
        f'<figure class="plot">{legend(list(series))}<div class="frame">'
        f'<svg class="axes" role="img" aria-label="{label}">{scales(x, y, x_label, y_label)}'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
        f"{lines}</svg></svg></div></figure>"
    )


def linear_axis(values: Sequence[float], widen: bool = True, whole: bool = False) -> Axis:
    """An axis over the values with about five ticks at 1, 2 or 5 times a power of ten; widen it to whole ticks.

    Args: whole: ticks at whole numbers only.
    """
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = max(_step(high - low), 1.0) if whole else _step(high - low)
    if widen:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return Axis(low, high, tuple((first + i) * step for i in range(count)))


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


def _step(span: float) -> float:
    power = 10.0 ** math.floor(math.log10(span / 5))
    return min((m * power for m in (1, 2, 5, 10)), key=lambda step: abs(span / step - 5))


def _check(series: Mapping[str, Points], log_x: bool, log_y: bool) -> None:
    if len(series) > SERIES:
        raise ValueError(f"a plot has room for {SERIES} series, got {len(series)}: split them over several plots")
    if not any(math.isfinite(y) for points in series.values() for _, y in points):
        raise ValueError("nothing to plot: no series has a point with a finite value")
    for name, points in series.items():
        if any((log_x and x <= 0) or (log_y and y <= 0) for x, y in points):
            raise ValueError(f"series {name!r} has values of 0 or less, which a logarithmic axis cannot show")


def scales(x: Axis, y: Axis, x_label: str, y_label: str) -> str:
    """Rules, ticks, numbers and names of both axes."""
    rows = "".join(
        f'<line class="rule" x1="0" x2="100%" y1="{at}%" y2="{at}%"/>'
        f'<text x="0" dx="-10" y="{at}%" dy=".33em" text-anchor="end">{number(tick)}</text>'
        for tick in y.ticks
        for at in [round(100 - 100 * y.place(tick), 2)]
    )
    columns = "".join(
        f'<rect class="tick" x="{at}%" y="100%" width="1" height="5"/>'
        f'<text x="{at}%" y="100%" dy="1.6em" text-anchor="middle">{number(tick)}</text>'
        for tick in x.ticks
        for at in [round(100 * x.place(tick), 2)]
    )
    names = (
        f'<text class="name" x="0" dx="-3.2em" y="0" dy="-1.2em">{escape(y_label)}</text>'
        f'<text class="name" x="100%" y="100%" dy="3.1em" text-anchor="end">{escape(x_label)}</text>'
    )
    return rows + columns + names


def _series(index: int, points: Points, x: Axis, y: Axis, smooth: int) -> str:
    if smooth <= 1:
        return _line(index, points, x, y, "line")
    return _line(index, points, x, y, "line raw") + _line(index, _means(points, smooth), x, y, "line")


def _line(index: int, points: Points, x: Axis, y: Axis, kind: str) -> str:
    dash = "none" if "raw" in kind else DASHES[index]
    path = "".join(
        # A path of one point draws nothing; a line of no length draws its round end.
        f"M{'L'.join(at)}" + ("h0" if len(at) == 1 else "")
        for run in _runs(points)
        for at in [[f"{1000 * x.place(a):.1f} {1000 - 1000 * y.place(b):.1f}" for a, b in run]]
    )
    return f'<path class="{kind}" style="stroke:var(--s{index});stroke-dasharray:{dash}" d="{path}"/>'


def _runs(points: Points) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _means(points: Points, width: int) -> list[tuple[float, float]]:
    """The mean of up to `width` neighbours around each point; ends average what there is."""
    half = width // 2
    means = []
    for i, (x, y) in enumerate(points):
        near = [b for _, b in points[max(0, i - half) : i + half + 1] if math.isfinite(b)]
        means.append((x, sum(near) / len(near) if math.isfinite(y) else math.nan))
    return means


def line_sample(number: int) -> str:
    """A bit of a line, in the colour and dashes of its number."""
    return f'<path class="line" d="M1 5H27" style="stroke:var(--s{number});stroke-dasharray:{DASHES[number]}"/>'


def legend(names: Sequence[str], sample: Callable[[int], str] = line_sample) -> str:
    """Names beside samples of what is drawn, `sample` of their numbers; nothing for a single one."""
    if len(names) < 2:
        return ""
    items = "".join(
        f'<li><svg aria-hidden="true" viewBox="0 0 28 10">{sample(i)}</svg>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def _summary(series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    parts = []
    for name, points in series.items():
        finite = [y for _, y in points if math.isfinite(y)]
        if finite:
            parts.append(f"{name} from {finite[0]:.3g} to {finite[-1]:.3g}")
    return f"{y_label} over {x_label}: " + "; ".join(parts)


def number(value: float) -> str:
    """A tick as it is written."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
