"""Scatter plots as SVG whose dots keep their shape while the plot stretches with the page; optionally with ellipses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from kiloword.report.plot import Axis, Points, legend, linear_axis, log_axis, scales
from kiloword.report.style import SERIES

CORNERS = 48  # of an ellipse


@dataclass(frozen=True)
class Ellipse:
    """An ellipse around (x, y): x + a cos t + b sin t, y + c cos t + d sin t, with (a, c) and (b, d) its half axes."""

    x: float
    y: float
    a: float
    b: float
    c: float
    d: float

    def outline(self) -> list[tuple[float, float]]:
        """Points on it, once around."""
        turns = [2 * math.pi * n / CORNERS for n in range(CORNERS)]
        return [
            (
                self.x + self.a * math.cos(t) + self.b * math.sin(t),
                self.y + self.c * math.cos(t) + self.d * math.sin(t),
            )
            for t in turns
        ]


@dataclass(frozen=True)
class Dots:
    """One series: round dots, square ones, and ellipses, all in its colour."""

    dots: Points = ()
    squares: Points = ()
    ellipses: Sequence[Ellipse] = field(default=())


def scatter(
    series: Mapping[str, Points | Dots],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    faint: bool = False,
    joined: bool = False,
) -> str:
    """Points of at most 6 series, with a legend for more than one.

    Args: series name -> (x, y) points, or `Dots`; log_x makes the x axis logarithmic; faint: for many points, that lie
    over each other; joined: a line through the dots in their order.
    Errors: ValueError for no point, a non-finite one, x of 0 or less on a logarithmic axis, or too many series.
    """
    given = {name: one if isinstance(one, Dots) else Dots(one) for name, one in series.items()}
    _check(given, log_x)
    reach = [p for one in given.values() for p in (*one.dots, *one.squares, *_outlines(one))]
    x = (log_axis if log_x else linear_axis)([p[0] for p in reach])
    y = linear_axis([p[1] for p in reach])
    bodies = "".join(_marks(i, one, x, y, faint, joined) for i, one in enumerate(given.values()))
    label = escape(_summary(given, x_label, y_label))
    return (
        f'<figure class="plot">{legend(list(given), _dot_sample)}<div class="frame">'
        f'<svg class="axes" role="img" aria-label="{label}">{scales(x, y, x_label, y_label)}'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
        f"{bodies}</svg></svg></div></figure>"
    )


def _check(series: Mapping[str, Dots], log_x: bool) -> None:
    if len(series) > SERIES:
        raise ValueError(f"a plot has room for {SERIES} series, got {len(series)}: split them over several plots")
    points = [p for one in series.values() for p in (*one.dots, *one.squares, *_outlines(one))]
    if not points:
        raise ValueError("nothing to plot: no series has a point")
    if not all(math.isfinite(value) for point in points for value in point):
        raise ValueError("a scatter plot got points that are not finite")
    if log_x and min(point[0] for point in points) <= 0:
        raise ValueError("a scatter plot got values of 0 or less, which a logarithmic axis cannot show")


def _outlines(one: Dots) -> list[tuple[float, float]]:
    return [point for ellipse in one.ellipses for point in ellipse.outline()]


def _marks(index: int, one: Dots, x: Axis, y: Axis, faint: bool, joined: bool) -> str:
    """Ellipses below, dots above: paths of no length, whose round or square ends do not stretch."""
    colour = f"stroke:var(--s{index})"
    rings = "".join(
        f'<path class="ring" style="{colour};fill:var(--s{index})" d="M{"L".join(_places(e.outline(), x, y))}Z"/>'
        for e in one.ellipses
    )
    line = f'<path class="line" style="{colour}" d="M{"L".join(_places(one.dots, x, y))}"/>' if joined else ""
    kind = "dot faint" if faint else "dot"
    return f"{rings}{line}" + "".join(
        f'<path class="{kind}{shape}" style="{colour}" d="{"".join(f"M{at}h0" for at in _places(points, x, y))}"/>'
        for points, shape in ((one.dots, ""), (one.squares, " square"))
        if points
    )


def _places(points: Points, x: Axis, y: Axis) -> list[str]:
    return [f"{1000 * x.place(a):.1f} {1000 - 1000 * y.place(b):.1f}" for a, b in points]


def _dot_sample(number: int) -> str:
    return f'<path class="dot" d="M14 5h0" style="stroke:var(--s{number})"/>'


def _summary(series: Mapping[str, Dots], x_label: str, y_label: str) -> str:
    parts = (f"{name} {len(one.dots) + len(one.squares)} points" for name, one in series.items())
    return f"{y_label} against {x_label}: " + "; ".join(parts)
