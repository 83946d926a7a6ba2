"""Line plots, histograms, box plots and scatter plots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kiloword.report.axes import DASHES, Axis, Frame, Points, linear_axis, log_axis, number, value_axis
from kiloword.report.page import SERIES, Html

Spread = float | tuple[float, float]
"""Half the height of a bar, or both its ends."""


def line_plot(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    whole_x: bool = False,
    smooth: int = 0,
    spread: Mapping[str, Sequence[Spread]] | None = None,
    ends: tuple[tuple[float, float], tuple[float, float]] | None = None,
) -> Html:
    """A line plot with axes, ticks and, for more than one series, a legend.

    Args: series name -> (x, y) points in the order of drawing, at most 6 series; a non-finite y breaks its line;
    log_x and log_y make an axis logarithmic; whole_x has ticks at whole numbers only (levels, counts); smooth > 1
    draws the mean of that many neighbours over a faint line of the points; spread: series name -> half the height of a
    bar at each of its points, such as a standard deviation, or both its ends; the points are dots;
    ends: least and largest x, least and largest y that the axes hold in any case, so that plots share them.
    Errors: ValueError for no finite point, too many series, or values of 0 or less on a logarithmic axis.
    """
    _check_count(series)
    finite = {name: [p for p in points if math.isfinite(p[1])] for name, points in series.items()}
    every = [point for points in finite.values() for point in points]
    if not every:
        raise ValueError("nothing to plot: no series has a point with a finite value")
    for name, points in series.items():
        if any((log_x and x <= 0) or (log_y and y <= 0) for x, y in points):
            raise ValueError(f"series {name!r} has values of 0 or less, which a logarithmic axis cannot show")
    xs, ys = zip(*every, strict=True)
    bars = {name: _ends(points, (spread or {}).get(name, ())) for name, points in finite.items()}
    ys += tuple(end for ends in bars.values() for _, *pair in ends for end in pair)
    xs, ys = (xs + ends[0], ys + ends[1]) if ends else (xs, ys)
    x = log_axis(xs) if log_x else linear_axis(xs, widen=False, whole=whole_x)
    frame = Frame(x, (log_axis if log_y else value_axis)(ys), x_label, y_label)
    lines = ""
    for i, points in enumerate(series.values()):
        if smooth > 1:
            lines += _line(i, points, frame, "line raw", "none")
            points = _means(points, smooth)
        lines += _line(i, points, frame, "line", DASHES[i])
    for i, (name, bar) in enumerate(bars.items()):
        path = "".join(f"M{frame.across(x)} {frame.down(low)}V{frame.down(high)}" for x, low, high in bar)
        lines += f'<path class="line" style="stroke:var(--s{i})" d="{path}"/>' if path else ""
        dots = "".join(f"M{place}h0" for place in frame.at(finite[name])) if spread else ""
        lines += f'<path class="line dot" style="stroke:var(--s{i})" d="{dots}"/>' if dots else ""
    spans = (f"{name} from {points[0][1]:.3g} to {points[-1][1]:.3g}" for name, points in finite.items() if points)
    return frame.drawn(lines, f"{y_label} over {x_label}: {'; '.join(spans)}", list(series))


def _ends(points: Points, spread: Sequence[Spread]) -> list[tuple[float, float, float]]:
    """Where bars begin and end: (x, low, high)."""
    both = ((x, (y - s, y + s) if isinstance(s, int | float) else s) for (x, y), s in zip(points, spread, strict=False))
    return [(x, low, high) for x, (low, high) in both if high > low]


def _check_count(series: Mapping[str, object]) -> None:
    if len(series) > SERIES:
        raise ValueError(f"a plot has room for {SERIES} series, got {len(series)}: split them over several plots")


def _line(index: int, points: Points, frame: Frame, kind: str, dashes: str) -> str:
    path = dots = ""
    for finite, run in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
        places = frame.at(list(run)) if finite else []
        if len(places) == 1:
            dots += f"M{places[0]}h0"  # a line of no length draws its round end
        elif places:
            path += f"M{'L'.join(places)}"
    line = f'<path class="{kind}" style="stroke:var(--s{index});stroke-dasharray:{dashes}" d="{path}"/>'
    return line + (f'<path class="{kind} dot" style="stroke:var(--s{index})" d="{dots}"/>' if dots else "")


def _means(points: Points, width: int) -> list[tuple[float, float]]:
    """The mean of up to `width` neighbours around each point; ends average what there is."""
    half = width // 2
    means = []
    for i, (x, y) in enumerate(points):
        near = [b for _, b in points[max(0, i - half) : i + half + 1] if math.isfinite(b)]
        means.append((x, sum(near) / len(near) if math.isfinite(y) else math.nan))
    return means


def distribution(
    series: Mapping[str, npt.ArrayLike],
    x_label: str,
    y_label: str,
    *,
    edges: Sequence[float] | None = None,
    most: int = 60,
    total: float | None = None,
    even: bool = False,
) -> Html:
    """A histogram of values; series without values are omitted.

    Args: series name -> values [N]; edges of the bins, None: at most `most` of round width; total: what the heights
    of a series sum to, None: they are counts; even: see `histogram`.
    """
    values = {name: v for name, each in series.items() if len(v := np.asarray(each))}
    if not values:
        return Html()
    if edges is None:
        edges = bins([float(end) for v in values.values() for end in (v.min(), v.max())], most)
    counts = {name: np.histogram(v, edges)[0] for name, v in values.items()}
    heights = {n: (c if total is None else total * c / len(values[n])).tolist() for n, c in counts.items()}
    return histogram(heights, edges, x_label, y_label, even=even)


def histogram(
    series: Mapping[str, Sequence[float]], edges: Sequence[float], x_label: str, y_label: str, *, even: bool = False
) -> Html:
    """Histograms over the same bins, drawn as outlines with a faint filling; a legend for more than one.

    Args: series name -> heights of the bins, at least 0, at most 6 series; edges, ascending, one more than heights;
    even gives all bins the same width, whatever their edges, which are then written under their ends.
    Errors: ValueError for heights that do not fit the edges, negative or non-finite ones, or too many series.
    """
    _check_histogram(series, edges)
    last = len(edges) - 1
    places = [float(n) for n in range(last + 1)] if even else list(edges)
    x = Axis(places[0], places[-1], () if even else linear_axis(places, widen=False).ticks)
    y = linear_axis([0.0, *(height for heights in series.values() for height in heights)])
    frame = Frame(x, y, x_label, y_label)
    marks = "".join(_steps(i, heights, places, frame) for i, heights in enumerate(series.values()))
    every = max(1, -(-last // 8))  # a phone has room for eight numbers
    ends = "".join(frame.below(n, number(edges[n])) for n in range(0, last + 1, every)) if even else ""
    tops = {name: max(range(last), key=heights.__getitem__) for name, heights in series.items()}
    highest = (f"{name} highest from {edges[top]:.3g} to {edges[top + 1]:.3g}" for name, top in tops.items())
    return frame.drawn(marks, f"{y_label} by {x_label}: {'; '.join(highest)}", list(series), below=ends)


def _check_histogram(series: Mapping[str, Sequence[float]], edges: Sequence[float]) -> None:
    _check_count(series)
    if len(edges) < 2 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"the edges of a histogram must ascend, got {list(edges)[:8]}")
    for name, heights in series.items():
        if len(heights) != len(edges) - 1:
            raise ValueError(f"series {name!r} has {len(heights)} heights for {len(edges) - 1} bins: make them equal")
        if not all(math.isfinite(h) and h >= 0 for h in heights):
            raise ValueError(f"series {name!r} has heights that are negative or not finite: give counts or shares")


def _steps(index: int, heights: Sequence[float], places: Sequence[float], frame: Frame) -> str:
    """One outline: up, along and down every bin, from the floor to the floor."""
    tops = (f"V{frame.down(h)}H{frame.across(right)}" for h, right in zip(heights, places[1:], strict=True))
    return (
        f'<path class="line step" style="stroke:var(--s{index});fill:var(--s{index});'
        f'stroke-dasharray:{DASHES[index]}" d="M{frame.across(places[0])} 1000.0{"".join(tops)}V1000.0"/>'
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
    return [n * step for n in range(math.floor(low / step), math.floor(high / step) + 2)]


def doubling(largest: int) -> list[float]:
    """Edges of the bins 0, 1, 2 to 3, 4 to 7, ... up to a largest whole number."""
    return [0.0, *(2.0**n for n in range(max(largest.bit_length(), 1) + 1))]


WIDE = 0.5  # share of a group's room that its box takes
FEW = 10  # values of a group below which they are drawn themselves, as five numbers of them would say too much


def box_plot(
    boxes: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    *,
    counts: Mapping[str, int] | None = None,
    few: Mapping[str, Sequence[float]] | None = None,
) -> Html:
    """A box for every group, in their order, its name below.

    Args: group -> five numbers that ascend: ends of the whiskers, of the box, and its middle line; counts: group ->
    number of its values, written below its name; the width of its box grows with the root of it; few: group -> its
    values, of groups that are drawn as dots in place of a box.
    Errors: ValueError for no group, or for numbers that are not five, do not ascend or are not finite.
    """
    if not boxes:
        raise ValueError("a box plot got no groups: it needs at least one")
    for name, five in boxes.items():
        if len(five) != 5 or not all(map(math.isfinite, five)) or list(five) != sorted(five):
            raise ValueError(f"the box {name!r} needs five finite numbers that ascend, got {list(five)}")
    few, counts = few or {}, counts or {}
    shown = [value for name, five in boxes.items() for value in few.get(name, five)]
    frame = Frame(Axis(0.0, float(len(boxes))), value_axis(shown), x_label, y_label)
    widths = {name: WIDE * math.sqrt(n / max(counts.values())) for name, n in counts.items()}
    marks = "".join(
        _points(n, few[name], frame) if name in few else _box(n, five, frame, max(widths.get(name, WIDE), 0.1))
        for n, (name, five) in enumerate(boxes.items())
    )
    names = "".join(frame.below(n + 0.5, name) for n, name in enumerate(boxes))
    names += "".join(frame.below(n + 0.5, f"n {counts[g]:,}", 1) for n, g in enumerate(boxes) if g in counts)
    medians = (f"{name} median {five[2]:.3g}" for name, five in boxes.items())
    return frame.drawn(marks, f"{y_label} by {x_label}: {'; '.join(medians)}", below=names, lines=2 if counts else 1)


def _points(n: int, values: Sequence[float], frame: Frame) -> str:
    """The values of a group as dots."""
    places = "".join(f"M{frame.across(n + 0.5)} {frame.down(value)}h0" for value in values)
    return f'<path class="dot" style="stroke:var(--s0)" d="{places}"/>'


def _box(n: int, five: Sequence[float], frame: Frame, wide: float) -> str:
    left, middle, right = (frame.across(n + at) for at in ((1 - wide) / 2, 0.5, (1 + wide) / 2))
    low, first, median, third, high = map(frame.down, five)
    whiskers = f"M{middle} {low}V{first}M{middle} {third}V{high}"
    return (
        f'<path class="line" style="stroke:var(--s0)" d="{whiskers}"/>'
        f'<path class="line step" style="stroke:var(--s0);fill:var(--s0)" '
        f'd="M{left} {first}H{right}V{third}H{left}Z"/>'
        f'<path class="line" style="stroke:var(--s0)" d="M{left} {median}H{right}"/>'
    )


@dataclass(frozen=True)
class Dots:
    """One series of a scatter plot, all in its colour: round dots, square ones, and closed outlines."""

    dots: list[tuple[float, float]]
    squares: list[tuple[float, float]] = field(default_factory=list)
    outlines: list[list[tuple[float, float]]] = field(default_factory=list)


def scatter(
    series: Mapping[str, Points | Dots],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    faint: bool = False,
    joined: bool = False,
    labels: Sequence[tuple[float, float, str]] = (),
) -> Html:
    """Points of at most 6 series, with a legend for more than one.

    Args: series name -> (x, y) points, or `Dots`; log_x makes the x axis logarithmic; faint: for many points, that lie
    over each other; joined: a line through the dots in their order; labels: (x, y, text) to write beside points.
    Errors: ValueError for no point, a non-finite one, x of 0 or less on a logarithmic axis, or too many series.
    """
    _check_count(series)
    drawn = {name: one if isinstance(one, Dots) else Dots(list(one)) for name, one in series.items()}
    points = [p for one in drawn.values() for p in itertools.chain(one.dots, one.squares, *one.outlines)]
    if not points:
        raise ValueError("nothing to plot: no series has a point")
    if not all(math.isfinite(value) for point in points for value in point):
        raise ValueError("a scatter plot got points that are not finite")
    xs, ys = zip(*points, strict=True)
    if log_x and min(xs) <= 0:
        raise ValueError("a scatter plot got values of 0 or less, which a logarithmic axis cannot show")
    frame = Frame((log_axis if log_x else linear_axis)(xs), value_axis(ys), x_label, y_label)
    marks = "".join(_dots(i, one, frame, faint, joined) for i, one in enumerate(drawn.values()))
    texts = "".join(frame.beside((x, y), text) for x, y, text in labels)
    squares = [bool(one.squares) and not one.dots for one in drawn.values()]

    def sample(index: int) -> str:
        shape = " square" if squares[index] else ""
        return f'<path class="dot{shape}" d="M14 5h0" style="stroke:var(--s{index})"/>'

    counts = (f"{name} {len(one.dots) + len(one.squares)} points" for name, one in drawn.items())
    return frame.drawn(marks, f"{y_label} against {x_label}: {'; '.join(counts)}", list(drawn), sample, texts)


def _dots(index: int, one: Dots, frame: Frame, faint: bool, joined: bool) -> str:
    """Outlines below, dots above: paths of no length, whose round or square ends do not stretch."""
    colour = f"stroke:var(--s{index})"
    marks = "".join(
        f'<path class="ring" style="{colour};fill:var(--s{index})" d="M{"L".join(frame.at(outline))}Z"/>'
        for outline in one.outlines
    )
    if joined:
        marks += f'<path class="line" style="{colour}" d="M{"L".join(frame.at(one.dots))}"/>'
    kind = "dot faint" if faint else "dot"
    return marks + "".join(
        f'<path class="{kind}{shape}" style="{colour}" d="{"".join(f"M{at}h0" for at in frame.at(points))}"/>'
        for points, shape in ((one.dots, ""), (one.squares, " square"))
        if points
    )
