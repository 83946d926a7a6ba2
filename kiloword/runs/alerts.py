"""Alerts of a run: each begins once, says what to do, and ends once.

They depend only on the rows of `metrics.jsonl`, in order: the run itself and `kiloword watch` show the same alerts.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import fmean

from kiloword.runs.rows import number
from kiloword.runs.rule import LIMITS, About, Alert, AlertRule, Row, Window
from kiloword.terminal.progress import per_second


class BadSteps(AlertRule):
    """Steps of the last rows that were skipped, and rows without a finite loss."""

    name, limits, over = "skipped steps", LIMITS.bad_steps, f"no step was skipped in the last {LIMITS.recent} rows."
    patience = 1
    total = 0.0

    def measure(self, row: Row) -> tuple[float, str] | None:
        if "pairs_per_s" not in row:
            return None
        total = number(row, "skipped_steps") or 0.0
        new, self.total = max(total - self.total, 0.0), total
        self.last.add(max(new, float(number(row, "loss") is None)))
        return self.last.total, (
            f"{self.last.total:.0f} of the last steps had a NaN, infinite or exploding loss or gradient, and were "
            "skipped. If it goes on: a smaller --optim.lr, a longer --optim.warmup, or --precision fp32."
        )


class ManyMined(AlertRule):
    """Share of all pairs that were mined as positives."""

    name, limits, over = "mined positives", LIMITS.mined, "few pairs are mined as positives now."

    def measure(self, row: Row) -> tuple[float, str] | None:
        if (value := number(row, "mined_share")) is None:
            return None
        return value, (
            f"{value:.1%} of all pairs are mined as positives, so a positive tells the model little. Do the thresholds "
            "fit the teacher? `kiloword mine SRC --features DIR --out OUT --calibrate` proposes some."
        )


class LossSpike(AlertRule):
    """Compares the loss with the median of a few earlier rows; the noise is estimated from differences of rows."""

    name, limits, over = "loss spike", LIMITS.spike, "the loss is no higher than just before."

    def forget(self) -> None:
        self.before, self.moves = Window(LIMITS.loss_before), Window(LIMITS.loss_moves)
        self.loss: float | None = None

    def measure(self, row: Row) -> tuple[float, str] | None:
        if (loss := number(row, "loss")) is None:
            return None
        result = self._above(loss) if len(self.moves) >= LIMITS.recent else None
        if self.loss is not None:
            self.moves.add(loss - self.loss)
        self.loss = loss
        self.before.add(loss)
        return result

    def _above(self, loss: float) -> tuple[float, str]:
        usual = self.before.median
        above, floor = loss - usual, LIMITS.spike_floor * abs(usual) + 1e-9
        if above <= self.limits[1] * floor:
            return 0.0, ""
        value = above / max(self.moves.deviation() / math.sqrt(2), floor)
        return value, (
            f"the loss is {loss:.4g}, it was {usual:.4g} (a spike of {value:.0f} robust standard deviations). If it "
            "does not come down: a smaller --optim.lr, a longer --optim.warmup, or a lower --optim.clip."
        )


class GradientNorm(AlertRule):
    """Median gradient norm of the last rows, relative to that of the rows before them."""

    name, limits, over = "gradient norm", LIMITS.norm, "the gradient norm is steady again."

    def forget(self) -> None:
        super().forget()
        self.before = Window(LIMITS.before)

    def measure(self, row: Row) -> tuple[float, str] | None:
        if (norm := number(row, "gradient_norm")) is None:
            return None
        if (old := self.last.add(norm)) is not None:
            self.before.add(old)
        if len(self.before) < LIMITS.before // 2 or not self.before.median:
            return None
        value = self.last.median / self.before.median
        return value, (
            f"the gradient norm has drifted to {self.last.median:.3g}, {value:.1f} times what it was: the run may be "
            "about to diverge; a smaller --optim.lr from an earlier state, or a lower --optim.clip."
        )


class ScaleAtLimit(AlertRule):
    """Share of the last rows in which the head's scale is at its limit."""

    name, limits, over = "scale", LIMITS.at_scale, "the scale has left its limit."

    def measure(self, row: Row) -> tuple[float, str] | None:
        scale, limit = number(row, "scale"), self.about.max_scale
        if scale is None or limit is None:
            return None
        self.last.add(1.0 if scale >= limit * 0.9999 else 0.0)
        if not self.last.full:
            return None
        return self.last.mean, (
            f"the scale (inverse temperature) sits at its limit {limit:g}: often too high a rate for it, or pairs "
            "that are too easy; --settings.max-scale is the limit, --optim.scale-lr its rate."
        )


class Falling(AlertRule):
    """Evaluations in a row that were each worse than the one before: recall@1, or accuracy of class data."""

    name, limits, over = "validation", LIMITS.falls, "validation improves again."
    patience = 1
    peak = newest = -math.inf
    falls = 0.0

    def measure(self, row: Row) -> tuple[float, str] | None:
        names = [k for k in row if k.startswith("val/") and k.endswith(("_recall@1", "/accuracy", "/acc1"))]
        values = [v for k in names if (v := number(row, k)) is not None]
        if not values:
            return None
        kinds = {end for k in names for end in ("recall@1", "accuracy", "acc1") if k.endswith(end)}
        common = f"the mean {kinds.pop()}" if len(kinds) == 1 else f"the mean of {len(names)} metrics"
        what, value = names[0][4:] if len(names) == 1 else common, sum(values) / len(values)
        self.falls = self.falls + 1 if value < self.newest else 0.0
        self.peak = self.newest if self.falls == 1 else value if not self.falls else self.peak
        self.newest = value
        return self.falls, (
            f"{what} on the validation data fell {self.falls:.0f} times in a row, from {self.peak:.3f} to {value:.3f}: "
            "probably overfitting; stop here, or more data, augmentation or weight decay."
        )


class DataWait(AlertRule):
    """Share of the time of the last rows that the run, or its slowest rank, waited for data."""

    name, limits, over = "data wait", LIMITS.wait, "the data keep up again."

    def measure(self, row: Row) -> tuple[float, str] | None:
        wait = number(row, "slowest_data_wait")
        wait = number(row, "data_wait") if wait is None else wait
        if wait is None:
            return None
        if self.new_process(row):  # workers start
            self.forget()
            return None
        self.last.add(wait)
        if not (self.spans_enough(row) and self.last.full):
            return None
        return self.last.mean, (
            f"{self.last.mean:.0%} of the time of the last {LIMITS.recent} rows was waited for data: raise --workers, "
            "or make decoding cheaper (smaller images on disk, --decoder simplejpeg)."
        )


class Slower(AlertRule):
    """Compares the median of the last rows with the median of such medians since the process began."""

    name, limits, over = "slower", LIMITS.slower, "pairs/s are back."

    def forget(self) -> None:
        super().forget()
        self.medians, self.rows = Window(10_000), 0

    def measure(self, row: Row) -> tuple[float, str] | None:
        if (rate := number(row, "pairs_per_s")) is None:
            return None
        if self.new_process(row):
            self.forget()
            return None
        self.last.add(rate)
        self.rows += 1
        usual = self.medians.median if len(self.medians) >= 2 else 0.0
        if self.rows % LIMITS.recent == 0:
            self.medians.add(self.last.median)
        if not self.spans_enough(row) or not usual:
            return None
        lost = 1 - self.last.median / usual
        return lost, (
            f"{per_second(self.last.median)} pairs/s, {lost:.0%} fewer than this run's usual {per_second(usual)}: "
            "something else uses the machine or its disk, it throttles, or the data come slower (see data wait)."
        )


class SkippedSamples(AlertRule):
    """Bad samples as a share of the rows read so far, relative to `--bad-share`, at which the run stops."""

    name, limits = "skipped samples", LIMITS.skipped
    over = "the share of bad samples is well below --bad-share again."

    def measure(self, row: Row) -> tuple[float, str] | None:
        count, epoch, step = (number(row, k) for k in ("skipped", "epoch", "step"))
        limit = self.about.bad_share
        if count is None or not epoch or not step or limit <= 0:
            return None
        share = count / (step * self.about.batch / epoch * min(epoch, 1.0))  # of the rows of the data set seen so far
        return (share / limit if count >= LIMITS.few else 0.0), (
            f"{count:.0f} bad samples, {share:.2%} of the rows seen so far; the run stops above {limit:.2%} of the "
            "data set (--bad-share). Look with `kiloword data check`."
        )


class Truncated(AlertRule):
    """Share of the captions of the last rows that are longer than the text tower's context."""

    name, limits, over = "truncated captions", LIMITS.truncated, "few captions are cut now."
    total = 0.0

    def forget(self) -> None:
        self.counts: deque[tuple[float, float]] = deque(maxlen=LIMITS.recent)  # truncated captions and captions of rows

    def measure(self, row: Row) -> tuple[float, str] | None:
        total, captions = number(row, "truncated"), number(row, "captions")
        if total is None or captions is None:
            return None
        self.counts.append((max(total - self.total, 0.0), captions))
        self.total = total
        cut, of = (sum(column) for column in zip(*self.counts, strict=True))
        if not of:
            return None
        return (cut / of if cut >= LIMITS.few else 0.0), (
            f"{cut / of:.1%} of the captions are longer than the text tower's context and cut: raise "
            "--model.text.context."
        )


class MemoryGrowth(AlertRule):
    """Growth of peak memory since the first quarter of the process, if it grew evenly, as a leak does."""

    name, limits, over = "memory", LIMITS.memory, "memory has stopped growing."

    def forget(self) -> None:
        self.peaks: list[float] = []

    def measure(self, row: Row) -> tuple[float, str] | None:
        if (memory := number(row, "memory")) is None:
            return None
        if self.new_process(row):
            self.forget()
        self.peaks.append(memory)
        if len(self.peaks) < LIMITS.memory_rows:
            return 0.0, ""
        at = [self.peaks[(len(self.peaks) - 1) * n // 4] for n in range(1, 5)]
        moves = [after - before for before, after in pairwise(at)]
        even = at[0] and min(moves) > 0 and min(moves) >= LIMITS.memory_even * fmean(moves)
        growth = memory / at[0] - 1 if even else 0.0
        return growth, (
            f"peak memory has grown by {growth:.0%} and still grows, to {memory:.0f} MB: a leak ends the run when "
            "memory is full; its state is kept, and the same command goes on."
        )


LEARNING = (BadSteps, LossSpike, GradientNorm, ScaleAtLimit, Falling, ManyMined)
FEEDING = (DataWait, Slower, SkippedSamples, Truncated, MemoryGrowth)


class Alerts:
    """Alerts of a run whose rows are added one by one."""

    def __init__(self, about: About) -> None:
        self.all: list[Alert] = []  # in the order of their begin
        self._rules = [rule(about) for rule in (*LEARNING, *FEEDING)]

    def add(self, row: Row) -> list[str]:
        """Add the next row; returns messages about the alerts that begin or end with it."""
        messages = []
        for rule in self._rules:
            before = rule.alert
            if message := rule.add(row):
                messages.append(message)
            if before is None and rule.alert is not None:
                self.all.append(rule.alert)
        return messages

    @property
    def current(self) -> list[Alert]:
        return [rule.alert for rule in self._rules if rule.alert is not None]
