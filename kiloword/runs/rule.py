"""What alert rules build upon: their thresholds, the interface, medians of the last rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from kiloword.runs.rows import number

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
    memory: tuple[float, float] = (0.3, 0.0)  # growth since the first quarter, if it grew evenly in the others
    memory_even: float = 0.75  # least growth of a quarter, as a share of their mean: caches and fragments settle
    memory_rows: int = 200  # rows before memory is judged
    mined: tuple[float, float] = (0.05, 0.04)  # share of all pairs that are mined as positives
    patience: int = 5  # number of calm rows before an alert ends


LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts about a run that rows lack."""

    bad_share: float = 0.01
    batch: int = 1
    max_scale: float | None = None  # limit of the head's scale


@dataclass
class Alert:
    """One alert, from its begin to its end."""

    name: str
    since: int  # step of the row that began it
    message: str  # printed when it began
    until: int | None = None  # step of the row that ended it; None: it continues


class Window:
    """The last values of a series, sorted, so that their median costs little at 100,000 rows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> float | None:
        """Add a value; returns the value that leaves the window, if any."""
        self._values.append(value)
        insort(self._sorted, value)
        if len(self) <= self.size:
            return None
        old = self._values.popleft()
        del self._sorted[bisect_left(self._sorted, old)]
        return old

    @property
    def full(self) -> bool:
        return len(self) == self.size

    @property
    def total(self) -> float:
        return sum(self._sorted)

    @property
    def mean(self) -> float:
        return self.total / len(self)

    @property
    def median(self) -> float:
        half = len(self) // 2
        return self._sorted[half] if len(self) % 2 else (self._sorted[half - 1] + self._sorted[half]) / 2

    def deviation(self) -> float:
        """A robust standard deviation: 1.4826 times the median absolute deviation."""
        middle = self.median
        return 1.4826 * median(abs(v - middle) for v in self._sorted)


class AlertRule(ABC):
    """One rule: an alert begins at one threshold, and ends after `patience` rows well below it."""

    name: str
    over: str  # printed when an alert ends
    limits: tuple[float, float]  # severities that begin and end an alert
    patience = LIMITS.patience

    def __init__(self, about: About) -> None:
        self.about = about
        self.alert: Alert | None = None
        self._calm = 0
        self._process: object = self  # number of the process, before the first row none
        self.forget()

    def forget(self) -> None:
        """Forget the rows so far."""
        self.last = Window(LIMITS.recent)
        self._times: deque[float] = deque(maxlen=LIMITS.recent)

    @abstractmethod
    def measure(self, row: Row) -> tuple[float, str] | None:
        """Severity and message of a row; called with all rows in order. None: the row has no information."""

    def add(self, row: Row) -> str | None:
        """Add the next row; returns a message when an alert begins or ends with it."""
        if (measured := self.measure(row)) is None:
            return None
        (value, message), (begin, end), step = measured, self.limits, int(row["step"])
        if self.alert is None:
            if value < begin:
                return None
            self.alert, self._calm = Alert(self.name, step, message), 0
            return f"alert at step {step}: {message}"
        self._calm = self._calm + 1 if value <= end else 0
        if self._calm < self.patience:
            return None
        self.alert.until, self.alert = step, None
        return f"over at step {step}: {self.over}"

    def new_process(self, row: Row) -> bool:
        """Whether the row is the first of a process."""
        before, self._process = self._process, row.get("restarts", 0)
        return bool(self._process != before)

    def spans_enough(self, row: Row) -> bool:
        """Whether the last rows took long enough to judge speed; rows without a time always do."""
        time = number(row, "time")
        if time is None:
            return True
        self._times.append(time)
        return abs(time - self._times[0]) >= LIMITS.seconds
