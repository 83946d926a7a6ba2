"""Alerts of a run: each begins once, says what to do, and ends once.

They depend only on the rows of `metrics.jsonl`, in order: the run itself and `kiloword watch` show the same alerts.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from kiloword.runs.rows import Row, number
from kiloword.terminal.progress import per_second

RECENT, BEFORE = 20, 200  # number of "the last rows", and of those before them that the gradient norm is compared with
SECONDS = 30.0  # shortest time of the last rows for judging speed
FEW = 5  # smallest number of bad samples or truncated captions for an alert
MINED = 0.05  # share of all pairs that are mined as positives


@dataclass
class Alert:
    """One alert, from its begin to its end."""

    name: str
    since: int  # step of the row that began it
    message: str  # printed when it began
    until: int | None = None  # step of the row that ended it; None: it continues


class History:
    """What the rules read: the last values of each metric, and a few of the whole process."""

    def __init__(self, batch: int, bad_share: float, max_scale: float | None) -> None:
        self.batch, self.bad_share, self.max_scale = batch, bad_share, max_scale
        self.now: dict[str, float] = {}  # the newest row
        self._last: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=BEFORE + RECENT))
        self._process: object = self
        self._begin()

    def _begin(self) -> None:
        """Forget the speed and the memory of an earlier process."""
        self.rates, self.usual_rates, self.peaks = 0, list[float](), list[float]()
        for name in ("rate", "wait", "when"):
            self._last[name].clear()

    def last(self, name: str, count: int = RECENT) -> list[float]:
        """At most `count` of the last values of a metric, the newest one last."""
        return list(self._last[name])[-count:]

    def add(self, row: Row) -> None:
        """Take the next row, and derive from it what was bad or truncated since the row before."""
        now = {name: value for name in row if (value := number(row, name)) is not None}
        if validation := [value for name, value in now.items() if is_main(name)]:
            now["validation"] = fmean(validation)
        if "pairs_per_s" in row:
            now["bad"] = max(self._growth("skipped_steps", now), float("loss" not in now))
        if {"truncated", "captions"} <= now.keys():
            now["cut"] = self._growth("truncated", now)
        if "pairs_per_s" in now and self._process == (process := row.get("restarts", 0)):
            self.rates += 1
            now["rate"], now["wait"] = now["pairs_per_s"], now.get("slowest_data_wait", now.get("data_wait", 0.0))
            now |= {"when": now["time"]} if "time" in now else {}
        elif "pairs_per_s" in now:  # the first row of a process, in which workers start
            self._process = process
            self._begin()
        if "memory" in now:
            self.peaks.append(now["memory"])
        for name, value in now.items():
            self._last[name].append(value)
        self.now = now

    def _growth(self, name: str, now: dict[str, float]) -> float:
        return max(now.get(name, 0.0) - (self.last(name, 1) or [0.0])[0], 0.0)

    @property
    def long_enough(self) -> bool:
        """Whether the last rows took long enough to judge speed; rows without a time always do."""
        times = self.last("when")
        return not times or abs(times[-1] - times[0]) >= SECONDS


def is_main(name: str) -> bool:
    """Whether a metric of a row is recall@1 or an accuracy of the validation."""
    return name.startswith("val/") and name.endswith(("_recall@1", "/accuracy", "/acc1"))


Measured = tuple[Any, ...]
"""The severity, and what else the message says; () where nothing can be said yet."""


def _spike(run: History) -> Measured:
    """The loss above the median of 11 rows, in robust standard deviations estimated from 50 differences of rows."""
    *before, loss = run.last("loss", 52)
    moves = [b - a for a, b in pairwise(before)]
    if len(moves) < RECENT:
        return ()
    usual = median(before[-11:])
    least = 0.01 * abs(usual) + 1e-9
    if loss - usual <= 3 * least:
        return 0.0, loss, usual
    deviation = 1.4826 * median(abs(move - median(moves)) for move in moves) / math.sqrt(2)  # of one row
    return (loss - usual) / max(deviation, least), loss, usual


def _norm(run: History) -> Measured:
    norms = run.last("gradient_norm", BEFORE + RECENT)
    before, now = norms[:-RECENT], median(norms[-RECENT:])
    return (now / median(before), now) if len(before) >= BEFORE // 2 and median(before) else ()


def _scale(run: History) -> Measured:
    scales, limit = run.last("scale"), run.max_scale
    if limit is None or len(scales) < RECENT:
        return ()
    return fmean(scale >= limit * 0.9999 for scale in scales), limit


def _falls(run: History) -> Measured:
    """Evaluations in a row that were each worse than the one before: recall@1, or accuracy of class data."""
    values = run.last("validation", BEFORE)
    falls = next((n for n in range(len(values) - 1) if values[-1 - n] >= values[-2 - n]), len(values) - 1)
    names = [name for name in run.now if is_main(name)]
    kinds = {name[max(name.rfind("_"), name.rfind("/")) + 1 :] for name in names}
    mean = f"the mean {kinds.pop()}" if len(kinds) == 1 else f"the mean of {len(names)} metrics"
    return falls, names[0][4:] if len(names) == 1 else mean, values[-1 - falls], values[-1]


def _wait(run: History) -> Measured:
    waits = run.last("wait")
    return (fmean(waits),) if len(waits) == RECENT and run.long_enough else ()


def _slower(run: History) -> Measured:
    """The median of the last rows against the median of such medians since the process began."""
    now, usual = median(run.last("rate")), median(run.usual_rates) if len(run.usual_rates) >= 2 else 0.0
    if run.rates % RECENT == 0:
        insort(run.usual_rates, now)
    return (1 - now / usual, per_second(now), per_second(usual)) if usual and run.long_enough else ()


def _skipped(run: History) -> Measured:
    """Bad samples as a share of the rows read so far, relative to `--bad-share`, at which the run stops."""
    bad, epoch, step = (run.now.get(name, 0.0) for name in ("skipped", "epoch", "step"))
    if not epoch or not step or run.bad_share <= 0:
        return ()
    share = bad / (step * run.batch / epoch * min(epoch, 1.0))  # of the rows of the data set seen so far
    return share / run.bad_share if bad >= FEW else 0.0, bad, share, run.bad_share


def _cut(run: History) -> Measured:
    cut, captions = sum(run.last("cut")), sum(run.last("captions"))
    return (cut / captions if cut >= FEW else 0.0,) if captions else ()


def _memory(run: History) -> Measured:
    """Growth of peak memory since the first quarter of the process, if it grew evenly, as a leak does."""
    peaks = run.peaks
    if len(peaks) < BEFORE:
        return 0.0, 0.0
    quarters = [peaks[(len(peaks) - 1) * n // 4] for n in range(1, 5)]
    moves = [b - a for a, b in pairwise(quarters)]
    even = quarters[0] and min(moves) > 0 and min(moves) >= 0.75 * fmean(moves)  # caches and fragments settle
    return peaks[-1] / quarters[0] - 1 if even else 0.0, peaks[-1]


@dataclass(frozen=True)
class Rule:
    """An alert begins at one severity, and ends after `patience` measured rows at or below another one."""

    name: str
    reads: str  # measured at rows with this metric
    measure: Callable[[History], Measured]
    begin: float
    end: float
    says: str  # a format of what is measured
    patience: int = 5


RULES = (
    Rule(
        "skipped steps", "bad", lambda run: (sum(run.last("bad")),), 1, 0,
        "{:.0f} of the last steps had a NaN, infinite or exploding loss or gradient, and were skipped. If it goes on: "
        "a smaller --optim.lr, a longer --optim.warmup, or --precision fp32.",
        patience=1,
    ),
    Rule(
        "loss spike", "loss", _spike, 8, 3,
        "the loss is {1:.4g}, it was {2:.4g} (a spike of {0:.0f} robust standard deviations). If it does not come "
        "down: a smaller --optim.lr, a longer --optim.warmup, or a lower --optim.clip.",
    ),
    Rule(
        "gradient norm", "gradient_norm", _norm, 3, 1.5,
        "the gradient norm has drifted to {1:.3g}, {0:.1f} times what it was: the run may be about to diverge; a "
        "smaller --optim.lr from an earlier state, or a lower --optim.clip.",
    ),
    Rule(
        "scale", "scale", _scale, 1, 0.5,
        "the scale (inverse temperature) sits at its limit {1:g}: often too high a rate for it, or pairs that are too "
        "easy; --settings.max-scale is the limit, --optim.scale-lr its rate.",
    ),
    Rule(
        "validation", "validation", _falls, 3, 0,
        "{1} on the validation data fell {0} times in a row, from {2:.3f} to {3:.3f}: probably overfitting; stop here, "
        "or more data, augmentation or weight decay.",
        patience=1,
    ),
    Rule(
        "mined positives", "mined_share", lambda run: (run.now["mined_share"],), MINED, 0.04,
        "{:.1%} of all pairs are mined as positives, so a positive tells the model little. Do the thresholds fit the "
        "teacher? `kiloword mine SRC --features DIR --out OUT --calibrate` proposes some.",
    ),
    Rule(
        "data wait", "wait", _wait, 0.2, 0.15,
        f"{{:.0%}} of the time of the last {RECENT} rows was waited for data: raise --workers, or make decoding "
        "cheaper (smaller images on disk, --decoder simplejpeg).",
    ),
    Rule(
        "slower", "rate", _slower, 1 / 3, 0.2,
        "{1} pairs/s, {0:.0%} fewer than this run's usual {2}: something else uses the machine or its disk, it "
        "throttles, or the data come slower (see data wait).",
    ),
    Rule(
        "skipped samples", "skipped", _skipped, 0.5, 0.4,
        "{1:.0f} bad samples, {2:.2%} of the rows seen so far; the run stops above {3:.2%} of the data set "
        "(--bad-share). Look with `kiloword data check`.",
    ),
    Rule(
        "truncated captions", "cut", _cut, 0.01, 0.005,
        "{:.1%} of the captions are longer than the text tower's context and cut: raise --model.text.context.",
    ),
    Rule(
        "memory", "memory", _memory, 0.3, 0,
        "peak memory has grown by {:.0%} and still grows, to {:.0f} MB: a leak ends the run when memory is full; its "
        "state is kept, and the same command goes on.",
    ),
)  # fmt: skip


class Alerts:
    """Alerts of a run whose rows are added one by one.

    Args: batch, bad_share: of the run; max_scale: limit of the head's scale.
    """

    def __init__(self, batch: int = 1, bad_share: float = 0.01, max_scale: float | None = None) -> None:
        self.all: list[Alert] = []  # in the order of their begin
        self._history = History(batch, bad_share, max_scale)
        self._calm: dict[str, int] = {}  # rows since each current alert was last severe

    def add(self, row: Row) -> list[str]:
        """Add the next row; returns messages about the alerts that begin or end with it."""
        self._history.add(row)
        messages, step = [], int(row["step"])
        current = {alert.name: alert for alert in self.current}
        for rule in RULES:
            measured = rule.measure(self._history) if rule.reads in self._history.now else ()
            if not measured:
                continue
            if rule.name not in current:
                if measured[0] >= rule.begin:
                    self.all.append(Alert(rule.name, step, rule.says.format(*measured)))
                    self._calm[rule.name] = 0
                    messages.append(f"alert at step {step}: {self.all[-1].message}")
                continue
            self._calm[rule.name] = self._calm[rule.name] + 1 if measured[0] <= rule.end else 0
            if self._calm[rule.name] >= rule.patience:
                current[rule.name].until = step
                messages.append(f"over at step {step}: {rule.name}")
        return messages

    @property
    def current(self) -> list[Alert]:
        return [alert for alert in self.all if alert.until is None]
