"""How long a run still takes, by its recent rate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

RECENT = 20  # rows


class Pace:
    """Pairs a second over the last rows; validation is no part of them. Args: batch, pairs a step."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._rates: deque[float] = deque(maxlen=RECENT)

    def add(self, row: Mapping[str, Any]) -> None:
        rate = row.get("pairs_per_s")
        if isinstance(rate, int | float) and 1e-9 < rate < math.inf:
            self._rates.append(float(rate))

    @property
    def rate(self) -> float | None:
        """Pairs a second: the harmonic mean, as rows hold equally many pairs."""
        return len(self._rates) / sum(1 / r for r in self._rates) if self._rates else None

    def seconds(self, steps: int) -> float | None:
        """What `steps` steps take."""
        return None if self.rate is None else steps * self.batch / self.rate


def per_second(rate: float) -> str:
    """1,234, 56, 7.8, 0.4 or 0.012: two digits where the rate is below 10, as of a large model on a CPU."""
    return f"{rate:,.0f}" if rate >= 9.95 else f"{rate:.2g}"


def duration(seconds: float | None) -> str:
    """7:05, 3:07:05 or 12d 03h; "?" where it is not known."""
    if seconds is None:
        return "?"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours < 1:
        return f"{m}:{s:02d}"
    return f"{hours}:{m:02d}:{s:02d}" if hours < 24 else f"{hours // 24}d {hours % 24:02d}h"
