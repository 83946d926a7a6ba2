"""The alerts' rules: what is measured, from which value an alert begins, at which it ends, and what it says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kiloword.watch.windows import Thinned, Window

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """All thresholds. Of a pair, the first begins an alert and the second ends it."""

    recent: int = 20  # rows that "the last rows" are
    before: int = 200  # rows that the gradient norm of the last ones is compared with
    loss_before: int = 11  # rows whose median a loss is compared with
    loss_moves: int = 50  # rows whose differences tell how noisy the loss is
    spike: tuple[float, float] = (8.0, 3.0)  # robust standard deviations (by MAD) of the loss above that median
    spike_floor: float = 0.01  # least standard deviation, as a share of the median
    bad_steps: tuple[float, float] = (1.0, 0.0)  # skipped steps, or rows without a loss, in the last rows
    wait: tuple[float, float] = (0.2, 0.15)  # share of the time that is waited for data
    skipped: tuple[float, float] = (0.5, 0.4)  # share of rows found bad so far, as a share of --bad-share
    skipped_least: int = 5  # fewer bad samples are no sign yet
    truncated: tuple[float, float] = (0.01, 0.005)  # share of captions that are cut
    slower: tuple[float, float] = (1 / 3, 0.2)  # loss of pairs/s against the median since the start
    at_scale: tuple[float, float] = (1.0, 0.5)  # share of the last rows whose scale is at its limit
    norm: tuple[float, float] = (3.0, 1.5)  # gradient norm against the one before
    falls: tuple[float, float] = (3.0, 0.0)  # evaluations in a row that were each worse than the one before
    memory: tuple[float, float] = (0.1, 0.0)  # growth since the first quarter, if it grew in each quarter
    memory_quarter: float = 0.02  # least growth of each quarter
    memory_rows: int = 100  # rows before memory is judged
    patience: int = 5  # rows that must be calm before an alert ends


LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class About:
    """What rows do not say of their run."""

    bad_share: float = 0.01
    batch: int = 1
    max_scale: float | None = None  # limit of the head's scale


class Rule:
    """`measure` takes every row in order and returns how bad it is, or None where the row does not tell."""

    name: str
    over: str
    begin: float
    end: float
    patience = LIMITS.patience

    def measure(self, row: Row) -> float | None:
        raise NotImplementedError

    def says(self, value: float) -> str:
        """The sentence for the row just measured."""
        raise NotImplementedError


class LossSpike(Rule):
    """Against the median of a few rows before; noise is what the loss moves from row to row, whatever its trend."""

    name, over = "loss spike", "the loss is no higher than just before."
    begin, end = LIMITS.spike

    def __init__(self) -> None:
        self.before, self.moves = Window(LIMITS.loss_before), Window(LIMITS.loss_moves)
        self.loss: float | None = None
        self.usual = 0.0

    def measure(self, row: Row) -> float | None:
        loss = number(row, "loss")
        if loss is None:
            return None
        value = self._above(loss) if len(self.moves) >= LIMITS.recent else None
        if self.loss is not None:
            self.moves.add(loss - self.loss)
        self.loss = loss
        self.before.add(loss)
        return value

    def _above(self, loss: float) -> float:
        self.usual = self.before.median
        floor = LIMITS.spike_floor * abs(self.usual) + 1e-9
        above = loss - self.usual
        if above <= self.end * floor:
            return 0.0
        return above / max(self.moves.deviation() / math.sqrt(2), floor)

    def says(self, value: float) -> str:
        return (
            f"the loss is {self.loss:.4g}, it was {self.usual:.4g} (a spike of {value:.0f} robust standard "
            "deviations). If it does not come down: a smaller --optim.lr, a longer --optim.warmup, or a lower "
            "--optim.clip."
        )


class BadSteps(Rule):
    name, over = "skipped steps", f"no step was skipped in the last {LIMITS.recent} rows."
    begin, end = LIMITS.bad_steps
    patience = 1

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=LIMITS.recent)
        self.total = 0.0

    def measure(self, row: Row) -> float | None:
        if "pairs_per_s" not in row:
            return None
        total = number(row, "skipped_steps") or 0.0
        new, self.total = max(total - self.total, 0.0), total
        self.last.append(max(new, float(number(row, "loss") is None)))
        return sum(self.last)

    def says(self, value: float) -> str:
        return (
            f"{value:.0f} of the last steps had a loss or gradient that is no number or explodes, and were skipped. "
            "If it goes on: a smaller --optim.lr, a longer --optim.warmup, or --precision fp32."
        )


class DataWait(Rule):
    name, over = "data wait", "the data keep up again."
    begin, end = LIMITS.wait

    def __init__(self) -> None:
        self.window, self.restart = Window(LIMITS.recent), Restart()

    def measure(self, row: Row) -> float | None:
        wait = number(row, "slowest_data_wait")
        wait = number(row, "data_wait") if wait is None else wait
        if wait is None:
            return None
        if self.restart.seen(row):  # workers start
            self.window = Window(LIMITS.recent)
            return None
        self.window.add(wait)
        return self.window.mean if self.window.full else None

    def says(self, value: float) -> str:
        return (
            f"{value:.0%} of the time of the last {LIMITS.recent} rows was waited for data: raise --workers, or make "
            "decoding cheaper (smaller pictures on disk, --decoder simplejpeg)."
        )


class SkippedSamples(Rule):
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
        return count / seen / self.about.bad_share if count >= LIMITS.skipped_least else 0.0

    def says(self, value: float) -> str:
        share = value * self.about.bad_share
        return (
            f"{self.count:.0f} bad samples, {share:.2%} of the rows seen so far; the run stops above "
            f"{self.about.bad_share:.2%} of the data set (--bad-share). Look with `kiloword data check`."
        )


class Truncated(Rule):
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
        of = sum(n for _, n in self.last)
        return sum(cut for cut, _ in self.last) / of if of else None

    def says(self, value: float) -> str:
        return (
            f"{value:.1%} of the captions are longer than the text tower's context and cut: raise --model.text.context."
        )


class Slower(Rule):
    """Median of the last rows against the median of such medians since the start: a resumed run may be elsewhere."""

    name, over = "slower", "pairs/s are back."
    begin, end = LIMITS.slower

    def __init__(self) -> None:
        self.restart = Restart()
        self._reset()

    def _reset(self) -> None:
        self.window, self.blocks, self.rows = Window(LIMITS.recent), Window(10_000), 0

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
        return lost

    def says(self, value: float) -> str:
        return (
            f"{self.window.median:.0f} pairs/s, {value:.0%} fewer than this run's usual {self.blocks.median:.0f}: "
            "something else uses the machine or its disk, it throttles, or the data come slower (see data wait)."
        )


class ScaleAtLimit(Rule):
    name, over = "scale", "the scale has left its limit."
    begin, end = LIMITS.at_scale

    def __init__(self, about: About) -> None:
        self.limit, self.window = about.max_scale, Window(LIMITS.recent)

    def measure(self, row: Row) -> float | None:
        scale = number(row, "scale")
        if scale is None or self.limit is None:
            return None
        self.window.add(1.0 if scale >= self.limit * 0.9999 else 0.0)
        return self.window.mean if self.window.full else None

    def says(self, value: float) -> str:
        return (
            f"the scale (inverse temperature) sits at its limit {self.limit:g}: often too high a rate for it, or pairs "
            "that are too easy; --settings.max-scale is the limit, --optim.scale-lr its rate."
        )


class GradientNorm(Rule):
    name, over = "gradient norm", "the gradient norm is steady again."
    begin, end = LIMITS.norm

    def __init__(self) -> None:
        self.last, self.before = Window(LIMITS.recent), Window(LIMITS.before)

    def measure(self, row: Row) -> float | None:
        norm = number(row, "gradient_norm")
        if norm is None:
            return None
        old = self.last.add(norm)
        if old is not None:
            self.before.add(old)
        if len(self.before) < LIMITS.before // 2 or not self.before.median:
            return None
        return self.last.median / self.before.median

    def says(self, value: float) -> str:
        return (
            f"the gradient norm has drifted to {self.last.median:.3g}, {value:.1f} times what it was: the run may be "
            "about to diverge; a smaller --optim.lr from an earlier state, or a lower --optim.clip."
        )


class Falling(Rule):
    name, over = "validation", "validation improves again."
    begin, end = LIMITS.falls
    patience = 1

    def __init__(self) -> None:
        self.peak = self.last = -math.inf
        self.what, self.falls = "", 0.0

    def measure(self, row: Row) -> float | None:
        names = [k for k in row if k == "val/accuracy" or (k.startswith("val/") and k.endswith("_recall@1"))]
        values = [v for k in names if (v := number(row, k)) is not None]
        if not values:
            return None
        self.what = names[0][4:] if len(names) == 1 else "recall@1"
        value = sum(values) / len(values)
        self.falls = self.falls + 1 if value < self.last else 0.0
        self.peak = self.last if self.falls == 1 else value if not self.falls else self.peak
        self.last = value
        return self.falls

    def says(self, value: float) -> str:
        return (
            f"{self.what} on the validation data fell {value:.0f} times in a row, from {self.peak:.3f} to "
            f"{self.last:.3f}: probably overfitting; stop here, or more data, augmentation or weight decay."
        )


class MemoryGrowth(Rule):
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


class Restart:
    """Says of each row whether it is the first of its process."""

    def __init__(self) -> None:
        self.last: object = self

    def seen(self, row: Row) -> bool:
        before, self.last = self.last, row.get("restarts", 0)
        return bool(self.last != before)


def rules(about: About) -> list[Rule]:
    """All rules, fresh."""
    return [
        BadSteps(),
        LossSpike(),
        DataWait(),
        SkippedSamples(about),
        Truncated(),
        Slower(),
        ScaleAtLimit(about),
        GradientNorm(),
        Falling(),
        MemoryGrowth(),
    ]


def number(row: Row, name: str) -> float | None:
    """A finite number of a row, or None."""
    value = row.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
