"""Alerts about learning: skipped steps, spikes of the loss, the gradient, the scale, validation."""

from __future__ import annotations

import math
from collections import deque

from kiloword.watch.rule import LIMITS, About, Row, Rule, number
from kiloword.watch.windows import Window


class BadSteps(Rule):
    """Steps of the last rows that were skipped, and rows without a finite loss."""

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
            f"{value:.0f} of the last steps had a NaN, infinite or exploding loss or gradient, and were skipped. "
            "If it goes on: a smaller --optim.lr, a longer --optim.warmup, or --precision fp32."
        )


class ManyMined(Rule):
    """Share of all pairs that were mined as positives."""

    name, over = "mined positives", "few pairs are mined as positives now."
    begin, end = LIMITS.mined

    def measure(self, row: Row) -> float | None:
        return number(row, "mined_share")

    def says(self, value: float) -> str:
        return (
            f"{value:.1%} of all pairs are mined as positives, so a positive tells the model little. Do the thresholds "
            "fit the teacher? `kiloword mine SRC --features DIR --out OUT --calibrate` proposes some."
        )


class LossSpike(Rule):
    """Compares the loss with the median of a few earlier rows; the noise is estimated from differences of rows."""

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


class GradientNorm(Rule):
    """Median gradient norm of the last rows, relative to that of the rows before them."""

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


class ScaleAtLimit(Rule):
    """Share of the last rows in which the head's scale is at its limit."""

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


class Falling(Rule):
    """Evaluations in a row that were each worse than the one before: recall@1, or accuracy of class data."""

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
