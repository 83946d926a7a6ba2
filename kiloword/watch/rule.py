"""The interface of alert rules, and the thresholds at which alerts begin and end."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """All thresholds. In a pair the first value begins an alert and the second ends it."""

    recent: int = 20  # number of "the last rows"
    before: int = 200  # number of earlier rows for comparing the gradient norm
    loss_before: int = 11  # number of rows for the median of the loss
    loss_moves: int = 50  # number of differences that estimate the noise of the loss
    spike: tuple[float, float] = (8.0, 3.0)  # robust standard deviations (by MAD) of the loss above that median
    spike_floor: float = 0.01  # least standard deviation, as a share of the median
    bad_steps: tuple[float, float] = (1.0, 0.0)  # skipped steps, or rows without a loss, in the last rows
    seconds: float = 30.0  # shortest time of the last rows for judging speed
    wait: tuple[float, float] = (0.2, 0.15)  # share of the time spent waiting for data
    skipped: tuple[float, float] = (0.5, 0.4)  # share of rows found bad so far, as a share of --bad-share
    few: int = 5  # smallest number of bad samples or truncated captions for an alert
    truncated: tuple[float, float] = (0.01, 0.005)  # share of truncated captions
    slower: tuple[float, float] = (1 / 3, 0.2)  # loss of pairs/s against the median since the start
    at_scale: tuple[float, float] = (1.0, 0.5)  # share of the last rows whose scale is at its limit
    norm: tuple[float, float] = (3.0, 1.5)  # ratio of the gradient norm to the earlier one
    falls: tuple[float, float] = (3.0, 0.0)  # number of evaluations in a row that were each worse than the previous one
    memory: tuple[float, float] = (0.1, 0.0)  # growth since the first quarter, if it grew in each quarter
    memory_quarter: float = 0.02  # least growth of each quarter
    memory_rows: int = 100  # rows before memory is judged
    mined: tuple[float, float] = (0.05, 0.04)  # share of all pairs that are mined as positives
    patience: int = 5  # number of calm rows before an alert ends


LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts about a run that rows lack."""

    bad_share: float = 0.01
    batch: int = 1
    max_scale: float | None = None  # limit of the head's scale


class Rule(ABC):
    """`measure` takes every row in order and returns its severity, or None if the row has no information."""

    name: str
    over: str
    begin: float
    end: float
    patience = LIMITS.patience

    @abstractmethod
    def measure(self, row: Row) -> float | None:
        """The severity of the row, compared with `begin` and `end`."""

    @abstractmethod
    def says(self, value: float) -> str:
        """The message for the row just measured."""


class Restart:
    """Detects the first row of each process."""

    def __init__(self) -> None:
        self.last: object = self

    def seen(self, row: Row) -> bool:
        before, self.last = self.last, row.get("restarts", 0)
        return bool(self.last != before)


class Span:
    """Detects whether the last rows took long enough to judge speed; rows without a time always do."""

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=LIMITS.recent)

    def long(self, row: Row) -> bool:
        """Whether the last rows, this one included, span at least `LIMITS.seconds`."""
        time = number(row, "time")
        if time is None:
            return True
        self.times.append(time)
        return abs(time - self.times[0]) >= LIMITS.seconds


def number(row: Row, name: str) -> float | None:
    """A finite number of a row, or None."""
    value = row.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
