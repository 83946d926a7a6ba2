"""Box plots: how values are spread, a box a group, drawn as SVG that stretches with the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kiloword.report.plot import Axis, linear_axis, scales

BoxValues = tuple[str, Sequence[float]]
"""A group's name, and five numbers that ascend: ends of the whiskers, of the box, and its middle line."""

WIDE = 0.5  # share of a group's room that its box takes


def box_plot(boxes: Sequence[BoxValues], x_label: str, y_label: str) -> str:
    """A box for every group, in their order, its name below.

    Errors: ValueError for no group, or for numbers that are not five, do not ascend or are not finite.
    """
    _check(boxes)
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


def _check(boxes: Sequence[BoxValues]) -> None:
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
