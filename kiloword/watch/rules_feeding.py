"""Alerts about data and machine: waiting for data, bad samples, truncated captions, speed, memory."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from kiloword.terminal.progress import per_second
from kiloword.watch.rule import LIMITS, About, Restart, Row, Rule, Span, number
from kiloword.watch.windows import Thinned, Window


class DataWait(Rule):
    """Share of the time of the last rows that the run, or its slowest rank, waited for data."""

    name, over = "data wait", "the data keep up again."
    begin, end = LIMITS.wait

    def __init__(self) -> None:
        self.window, self.restart, self.span = Window(LIMITS.recent), Restart(), Span()

    def measure(self, row: Row) -> float | None:
        wait = number(row, "slowest_data_wait")
        wait = number(row, "data_wait") if wait is None else wait
        if wait is None:
            return None
        if self.restart.seen(row):  # workers start
            self.window, self.span = Window(LIMITS.recent), Span()
            return None
        self.window.add(wait)
        return self.window.mean if self.span.long(row) and self.window.full else None

    def says(self, value: float) -> str:
        return (
            f"{value:.0%} of the time of the last {LIMITS.recent} rows was waited for data: raise --workers, or make "
            "decoding cheaper (smaller images on disk, --decoder simplejpeg)."
        )


class SkippedSamples(Rule):
    """Bad samples as a share of the rows read so far, relative to `--bad-share`, at which the run stops."""

    name, over = "skipped samples", "the share of bad samples is well below --bad-share again."
    begin, end = LIMITS.skipped

    def __init__(self, about: About) -> None:
        self.about, self.count = about, 0.0

    def measure(self, row: Row) -> float | None:
        count, epoch, step = (number(row, k) for k in ("skipped", "epoch", "step"))
        if count is None or not epoch or not step or self.about.bad_share <= 0:
            return None
        seen = step * self.about.batch / epoch * min(epoch, 1.0)  # rows of the data set
        self.count = count
        return count / seen / self.about.bad_share if count >= LIMITS.few else 0.0

    def says(self, value: float) -> str:
        share = value * self.about.bad_share
        return (
            f"{self.count:.0f} bad samples, {share:.2%} of the rows seen so far; the run stops above "
            f"{self.about.bad_share:.2%} of the data set (--bad-share). Look with `kiloword data check`."
        )


class Truncated(Rule):
    """Share of the captions of the last rows that are longer than the text tower's context."""

    name, over = "truncated captions", "few captions are cut now."
    begin, end = LIMITS.truncated

    def __init__(self) -> None:
        self.last: deque[tuple[float, float]] = deque(maxlen=LIMITS.recent)
        self.total = 0.0

    def measure(self, row: Row) -> float | None:
        total, captions = number(row, "truncated"), number(row, "captions")
        if total is None or captions is None:
            return None
        self.last.append((max(total - self.total, 0.0), captions))
        self.total = total
        cut, of = (sum(column) for column in zip(*self.last, strict=True))
        return None if not of else cut / of if cut >= LIMITS.few else 0.0

    def says(self, value: float) -> str:
        return (
            f"{value:.1%} of the captions are longer than the text tower's context and cut: raise --model.text.context."
        )


class Slower(Rule):
    """Compares the median of the last rows with the median of such medians since the process began."""

    name, over = "slower", "pairs/s are back."
    begin, end = LIMITS.slower

    def __init__(self) -> None:
        self.restart = Restart()
        self._reset()

    def _reset(self) -> None:
        self.window, self.blocks, self.rows, self.span = Window(LIMITS.recent), Window(10_000), 0, Span()

    def measure(self, row: Row) -> float | None:
        rate = number(row, "pairs_per_s")
        if rate is None:
            return None
        if self.restart.seen(row):
            self._reset()
            return None
        self.window.add(rate)
        self.rows += 1
        lost = 1 - self.window.median / self.blocks.median if len(self.blocks) >= 2 and self.blocks.median else None
        if self.rows % LIMITS.recent == 0:
            self.blocks.add(self.window.median)
        return lost if self.span.long(row) else None

    def says(self, value: float) -> str:
        return (
            f"{per_second(self.window.median)} pairs/s, {value:.0%} fewer than this run's usual "
            f"{per_second(self.blocks.median)}: "
            "something else uses the machine or its disk, it throttles, or the data come slower (see data wait)."
        )


class MemoryGrowth(Rule):
    """Growth of peak memory since the first quarter of the process, if it grew in every quarter."""

    name, over = "memory", "memory has stopped growing."
    begin, end = LIMITS.memory

    def __init__(self) -> None:
        self.restart, self.peaks, self.rows = Restart(), Thinned(), 0

    def measure(self, row: Row) -> float | None:
        memory = number(row, "memory")
        if memory is None:
            return None
        if self.restart.seen(row):
            self.peaks, self.rows = Thinned(), 0
        self.peaks.add(memory)
        self.rows += 1
        return self._growth() if self.rows >= LIMITS.memory_rows else 0.0

    def _growth(self) -> float:
        values = self.peaks.values
        at = [values[(len(values) - 1) * n // 4] for n in range(1, 5)]
        steady = all(b >= a * (1 + LIMITS.memory_quarter) for a, b in pairwise(at))
        return at[-1] / at[0] - 1 if steady and at[0] else 0.0

    def says(self, value: float) -> str:
        return (
            f"peak memory has grown by {value:.0%} and still grows, to {self.peaks.values[-1]:.0f} MB: a leak ends the "
            "run when memory is full; its state is kept, and the same command goes on."
        )
