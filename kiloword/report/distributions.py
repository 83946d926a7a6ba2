"""Histograms and box plots as SVG that scales with the page, with text of constant size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape

from kiloword.report.plot import DASHES, Axis, legend, linear_axis, number, scales
from kiloword.report.style import SERIES


def histogram(
    series: Mapping[str, Sequence[float]], edges: Sequence[float], x_label: str, y_label: str, *, even: bool = False
) -> str:
    """Histograms over the same bins, drawn as outlines with a faint filling; a legend for more than one.

    Args: series name -> heights of the bins, at least 0, at most 6 series; edges, ascending, one more than heights;
    even gives all bins the same width, whatever their edges, which are then written under their ends.
    Errors: ValueError for heights that do not fit the edges, negative or non-finite ones, or too many series.
    """
    _check(series, edges)
    at = [float(n) for n in range(len(edges))] if even else list(edges)
    x = Axis(at[0], at[-1], () if even else linear_axis(at, widen=False).ticks)
    y = linear_axis([0.0, *(h for heights in series.values() for h in heights)])
    bodies = "".join(_steps(i, heights, at, x, y) for i, heights in enumerate(series.values()))
    below = _ends(edges) if even else ""
    label = escape(_summary(series, edges, x_label, y_label))
    return (
        f'<figure class="plot">{legend(list(series))}<div class="frame">'
        f'<svg class="axes" role="img" aria-label="{label}">{scales(x, y, x_label, y_label)}{below}'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
        f"{bodies}</svg></svg></div></figure>"
    )


def bins(values: Sequence[float], most: int = 60) -> list[float]:
    """Edges of at most `most` equal bins with round widths (1, 2 or 5 times a power of ten) that hold the values.

    Errors: ValueError without values.
    """
    if not len(values):
        raise ValueError("no values to put into bins")
    low, high = float(min(values)), float(max(values))
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    steps = [m * power for m in (1, 2, 5, 10, 20)]
    step = next(s for s in steps if math.floor(high / s) - math.floor(low / s) < most)
    first, last = math.floor(low / step), math.floor(high / step) + 1
    return [n * step for n in range(first, last + 1)]


def doubling(largest: float) -> list[float]:
    """Edges of the bins 0, 1, 2 to 3, 4 to 7, ... up to a largest whole number."""
    edges = [0.0, 1.0, 2.0]
    while edges[-1] <= largest:
        edges.append(2 * edges[-1])
    return edges


def _check(series: Mapping[str, Sequence[float]], edges: Sequence[float]) -> None:
    if len(series) > SERIES:
        raise ValueError(f"a histogram has room for {SERIES} series, got {len(series)}: split them over several")
    if len(edges) < 2 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"the edges of a histogram must ascend, got {list(edges)[:8]}")
    for name, heights in series.items():
        if len(heights) != len(edges) - 1:
            raise ValueError(f"series {name!r} has {len(heights)} heights for {len(edges) - 1} bins: make them equal")
        if not all(math.isfinite(h) and h >= 0 for h in heights):
            raise ValueError(f"series {name!r} has heights that are negative or not finite: give counts or shares")


def _steps(index: int, heights: Sequence[float], at: Sequence[float], x: Axis, y: Axis) -> str:
    """One outline: up, along and down every bin, from the floor to the floor."""
    places = [f"{1000 * x.place(edge):.1f}" for edge in at]
    levels = [f"{1000 - 1000 * y.place(height):.1f}" for height in heights]
    tops = "".join(f"V{level}H{right}" for level, right in zip(levels, places[1:], strict=True))
    path = f"M{places[0]} 1000.0{tops}V1000.0"
    return (
        f'<path class="line step" style="stroke:var(--s{index});fill:var(--s{index});'
        f'stroke-dasharray:{DASHES[index]}" d="{path}"/>'
    )


def _ends(edges: Sequence[float]) -> str:
    last = len(edges) - 1
    every = max(1, -(-last // 8))  # a phone has room for eight
    return "".join(
        f'<text x="{round(100 * n / last, 2)}%" y="100%" dy="1.6em" text-anchor="middle">{number(edges[n])}</text>'
        for n in range(0, last + 1, every)
    )


def _summary(series: Mapping[str, Sequence[float]], edges: Sequence[float], x_label: str, y_label: str) -> str:
    parts = []
    for name, heights in series.items():
        top = max(range(len(heights)), key=heights.__getitem__)
        parts.append(f"{name} highest from {edges[top]:.3g} to {edges[top + 1]:.3g}")
    return f"{y_label} by {x_label}: " + "; ".join(parts)


BoxValues = tuple[str, Sequence[float]]
"""A group's name, and five numbers that ascend: ends of the whiskers, of the box, and its middle line."""

WIDE = 0.5  # share of a group's room that its box takes


def box_plot(boxes: Sequence[BoxValues], x_label: str, y_label: str) -> str:
    """A box for every group, in their order, its name below.

    Errors: ValueError for no group, or for numbers that are not five, do not ascend or are not finite.
    """
    _check_boxes(boxes)
    y = linear_axis([value for _, five in boxes for value in five])
    x = Axis(0.0, float(len(boxes)), ())
    bodies = "".join(_box(n, five, x, y) for n, (_, five) in enumerate(boxes))
    names = "".join(
        f'<text x="{round(100 * x.place(n + 0.5), 2)}%" y="100%" dy="1.6em" text-anchor="middle">{escape(name)}</text>'
        for n, (name, _) in enumerate(boxes)
    )
    label = escape(f"{y_label} by {x_label}: " + "; ".join(f"{name} median {five[2]:.3g}" for name, five in boxes))
    return (
        f'<figure class="plot"><div class="frame">'
        f'<svg class="axes" role="img" aria-label="{label}">{scales(x, y, x_label, y_label)}{names}'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" overflow="visible">'
        f"{bodies}</svg></svg></div></figure>"
    )


def _check_boxes(boxes: Sequence[BoxValues]) -> None:
    if not boxes:
        raise ValueError("a box plot got no groups: it needs at least one")
    for name, five in boxes:
        if len(five) != 5 or not all(map(math.isfinite, five)) or list(five) != sorted(five):
            raise ValueError(f"the box {name!r} needs five finite numbers that ascend, got {list(five)}")


def _box(n: int, five: Sequence[float], x: Axis, y: Axis) -> str:
    left, middle, right = (round(1000 * x.place(n + at), 1) for at in ((1 - WIDE) / 2, 0.5, (1 + WIDE) / 2))
    low, first, median, third, high = (round(1000 - 1000 * y.place(value), 1) for value in five)
    whiskers = f"M{middle} {low}V{first}M{middle} {third}V{high}"
    return (
        f'<path class="line" style="stroke:var(--s0)" d="{whiskers}"/>'
        f'<path class="line step" style="stroke:var(--s0);fill:var(--s0)" '
        f'd="M{left} {first}H{right}V{third}H{left}Z"/>'
        f'<path class="line" style="stroke:var(--s0)" d="M{left} {median}H{right}"/>'
    )
