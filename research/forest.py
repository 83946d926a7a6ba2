"""A plot of decisions: effects with their intervals, and the least effect that counts. An SVG that stands alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from matplotlib.ticker import MaxNLocator

from research.evidence import Decision

WIDTH, LEFT, RIGHT, ROW, TOP, FOOT = 760, 28, 28, 62, 14, 30  # a label of the axis is 50 wide
COLOURS = {"shown": "#1a7f5a", "refuted": "#b3372f", "undecided": "#767676"}
STYLE = "font:13px system-ui,sans-serif"


def forest(decisions: Sequence[Decision]) -> str:
    """One row for every decision, on one axis of effects. Raises: ValueError for none."""
    if not decisions:
        raise ValueError("nothing is decided: there is nothing to plot.")
    ends = [end for d in decisions for end in (d.effect.low, d.effect.high, d.least, 0.0)]
    axis = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(min(ends), max(ends))
    height = TOP + ROW * len(decisions) + FOOT

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - axis[0]) / (axis[-1] - axis[0]), 1)

    bottom = height - FOOT
    ticks = "".join(
        f'<path d="M{x(tick)} {TOP}V{bottom}" stroke="#8886" stroke-width="{2 if tick == 0 else 1}"/>'
        f'<text x="{x(tick)}" y="{bottom + 18}" text-anchor="middle" fill="#767676">{tick:.8g}</text>'
        for tick in map(float, axis)
    ).replace(">-", ">−")
    rows = "".join(
        _row(d, TOP + ROW * n, x(d.effect.low), x(d.effect.value), x(d.effect.high), x(d.least))
        for n, d in enumerate(decisions)
    )
    words = "; ".join(map(str, decisions))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(words)}" style="{STYLE};background:#fff">{ticks}{rows}</svg>\n'
    )


def _row(decision: Decision, top: int, low: float, value: float, high: float, least: float) -> str:
    """The words of a decision above its interval; a dashed tick is the least effect that counts."""
    colour, middle = COLOURS[decision.verdict], top + 46
    return (
        f'<text x="{LEFT}" y="{top + 16}" fill="#222">{escape(decision.says)}: {escape(decision.of)}</text>'
        f'<text x="{LEFT}" y="{top + 32}" fill="{colour}">{decision.verdict}, {decision.effect}, '
        f"least {decision.least:g}</text>"
        f'<path d="M{low} {middle}H{high}" stroke="{colour}" stroke-width="3"/>'
        f'<circle cx="{value}" cy="{middle}" r="5" fill="{colour}"/>'
        f'<path d="M{least} {middle - 9}v18" stroke="#222" stroke-width="2" stroke-dasharray="3 2"/>'
    )
