"""Robust statistics of the last values of a series, fast enough for 100,000 rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from statistics import median


class Window:
    """The last values of a series, with their median."""

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
        if len(self._values) <= self.size:
            return None
        old = self._values.popleft()
        del self._sorted[bisect_left(self._sorted, old)]
        return old

    @property
    def full(self) -> bool:
        return len(self) == self.size

    @property
    def mean(self) -> float:
        return sum(self._sorted) / len(self)

    @property
    def median(self) -> float:
        half = len(self) // 2
        return self._sorted[half] if len(self) % 2 else (self._sorted[half - 1] + self._sorted[half]) / 2

    def deviation(self) -> float:
        """A robust standard deviation: 1.4826 times the median absolute deviation."""
        middle = self.median
        return 1.4826 * median(abs(v - middle) for v in self._sorted)


class Thinned:
    """A series reduced to a bounded number of evenly spaced values."""

    def __init__(self, most: int = 256) -> None:
        assert most % 2 == 0
        self.most, self.values = most, list[float]()
        self._stride, self._skip = 1, 0

    def add(self, value: float) -> None:
        """Keep the value if one is due; when the list is full, every second one is dropped."""
        if self._skip:
            self._skip -= 1
            return
        self.values.append(value)
        self._skip = self._stride - 1
        if len(self.values) == self.most:
            del self.values[1::2]  # including the newest, so that the next is one stride later
            self._stride *= 2
