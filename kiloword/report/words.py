"""Numbers as reports write them."""

from __future__ import annotations


def percent(share: float) -> str:
    """0.125 -> "12.5%", 0.999 -> "99.9%": what nearly all of a thousand are does not read as all."""
    return f"{round(100 * share, 1):g}%"


def duration(seconds: float) -> str:
    """95 -> "1 min 35 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
