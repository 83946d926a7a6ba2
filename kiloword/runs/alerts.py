"""Alerts of a run, from the rows of `metrics.jsonl` in their order: the run and `kiloword watch` show the same ones."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from kiloword.runs.rows import Row, numbers

RECENT, BEFORE = 20, 200  # number of "the last rows", and of those before them that speed is compared with
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


class Alerts:
    """Alerts of a run whose rows are added one by one. Args: batch, bad_share: of the run."""

    def __init__(self, batch: int = 1, bad_share: float = 0.01) -> None:
        self.batch, self.bad_share = batch, bad_share
        self.all: list[Alert] = []  # in the order of their begin
        self.now: dict[str, float] = {}  # numbers of the newest row
        self._last: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=BEFORE + RECENT))
        self._process: object = None

    @property
    def current(self) -> list[Alert]:
        return [alert for alert in self.all if alert.until is None]

    def last(self, name: str, count: int = RECENT) -> list[float]:
        """At most `count` of the last values of a metric, the newest one last."""
        return list(self._last[name])[-count:]

    def add(self, row: Row) -> list[str]:
        """Add the next row; returns messages about the alerts that begin or end with it."""
        self._take(row)
        messages, step = [], int(row["step"])
        current = {alert.name: alert for alert in self.current}
        for name, reads, begin, end, measure, message in RULES:
            measured = measure(self) if reads in self.now else ()
            if measured and name not in current and measured[0] >= begin:
                self.all.append(Alert(name, step, message.format(*measured)))
                messages.append(f"alert at step {step}: {self.all[-1].message}")
            elif measured and name in current and measured[0] <= end:
                current[name].until = step
                messages.append(f"over at step {step}: {name}")
        return messages

    def _take(self, row: Row) -> None:
        """Keep the row's numbers, and what they add to those of the row before."""
        now = numbers(row)
        main = ("_recall@1", "/accuracy", "/acc1")
        if validation := [value for name, value in now.items() if name.startswith("val/") and name.endswith(main)]:
            now["validation"] = fmean(validation)
        if "pairs_per_s" in row:
            now["bad"] = max(self._growth("skipped_steps", now), float("loss" not in now))
        if {"truncated", "captions"} <= now.keys():
            now["cut"] = self._growth("truncated", now)
        if "pairs_per_s" in now and self._process != (process := row.get("restarts", 0)):
            self._process = process  # in its first row workers start
            for name in ("rate", "wait", "when"):
                self._last[name].clear()
        elif "pairs_per_s" in now:
            wait = now.get("slowest_data_wait", now.get("data_wait", 0.0))
            now |= {"rate": now["pairs_per_s"], "when": now.get("time", 0.0), "wait": wait}
        for name, value in now.items():
            self._last[name].append(value)
        self.now = now

    def _growth(self, name: str, now: dict[str, float]) -> float:
        return max(now.get(name, 0.0) - (self.last(name, 1) or [0.0])[0], 0.0)

    @property
    def long_enough(self) -> bool:
        """Whether there are enough rows, over enough time, to judge speed."""
        times = self.last("when")
        return len(times) == RECENT and times[-1] - times[0] >= SECONDS


Measured = tuple[float, ...]
"""The severity, and what else the message says; () where nothing can be said yet."""


def _spike(run: Alerts) -> Measured:
    """The loss above the median of 11 rows, in robust standard deviations estimated from 50 differences of rows."""
    *before, loss = run.last("loss", 52)
    moves = [b - a for a, b in pairwise(before)]
    if len(moves) < RECENT:
        return ()
    usual = median(before[-11:])
    deviation = 1.4826 * median(abs(move - median(moves)) for move in moves) / math.sqrt(2)  # of one row
    return (loss - usual) / max(deviation, 0.01 * abs(usual) + 1e-9), loss, usual


def _falls(run: Alerts) -> Measured:
    """Evaluations in a row that were each worse than the one before."""
    values = run.last("validation", BEFORE)
    falls = next((n for n in range(len(values) - 1) if values[-1 - n] >= values[-2 - n]), len(values) - 1)
    return falls, values[-1 - falls], values[-1]


def _slower(run: Alerts) -> Measured:
    """The last rows against those before them, by medians."""
    rates = run.last("rate", BEFORE + RECENT)
    if len(rates) < 3 * RECENT or not run.long_enough:
        return ()
    now, usual = median(rates[-RECENT:]), median(rates[:-RECENT])
    return 1 - now / max(usual, 1e-9), now, usual


def _skipped(run: Alerts) -> Measured:
    """Bad samples as a share of the rows read so far, relative to `--bad-share`, at which the run stops."""
    bad, epoch, step = (run.now.get(name, 0.0) for name in ("skipped", "epoch", "step"))
    if not epoch or not step or run.bad_share <= 0:
        return ()
    share = bad / (step * run.batch / epoch * min(epoch, 1.0))  # of the rows of the data set seen so far
    return share / run.bad_share if bad >= FEW else 0.0, bad, share, run.bad_share


def _cut(run: Alerts) -> Measured:
    cut, captions = sum(run.last("cut")), sum(run.last("captions"))
    return (cut / captions if cut >= FEW else 0.0,) if captions else ()


# Name, metric of the rows that are measured, severity at which an alert begins, and ends, and its message.
RULES: tuple[tuple[str, str, float, float, Callable[[Alerts], Measured], str], ...] = (
    (
        "skipped steps", "bad", 1, 0, lambda run: (sum(run.last("bad")),),
        "{:.0f} of the last steps had a NaN, infinite or exploding loss or gradient, and were skipped. If it goes on: "
        "a smaller --optim.lr, a longer --optim.warmup, or --precision fp32.",
    ),
    (
        "loss spike", "loss", 8, 3, _spike,
        "the loss is {1:.4g}, it was {2:.4g} (a spike of {0:.0f} robust standard deviations). If it does not come "
        "down: a smaller --optim.lr, a longer --optim.warmup, or a lower --optim.clip.",
    ),
    (
        "validation", "validation", 3, 0, _falls,
        "the validation (recall@1 or accuracy, their mean) fell {0:.0f} times in a row, from {1:.3f} to {2:.3f}: "
        "probably overfitting; stop here, or more data, augmentation or weight decay.",
    ),
    (
        "mined positives", "mined_share", MINED, 0.04, lambda run: (run.now["mined_share"],),
        "{:.1%} of all pairs are mined as positives, so a positive tells the model little. Do the thresholds fit the "
        "teacher? `kiloword mine SRC --features DIR --out OUT --calibrate` proposes some.",
    ),
    (
        "data wait", "wait", 0.2, 0.15, lambda run: (fmean(run.last("wait")),) if run.long_enough else (),
        f"{{:.0%}} of the time of the last {RECENT} rows was waited for data: raise --workers, or make decoding "
        "cheaper (smaller images on disk, --decoder simplejpeg).",
    ),
    (
        "slower", "rate", 1 / 3, 0.2, _slower,
        "{1:,.4g} pairs/s, {0:.0%} fewer than this run's usual {2:,.4g}: something else uses the machine or its disk, "
        "it throttles, or the data come slower (see data wait).",
    ),
    (
        "skipped samples", "skipped", 0.5, 0.4, _skipped,
        "{1:.0f} bad samples, {2:.2%} of the rows seen so far; the run stops above {3:.2%} of the data set "
        "(--bad-share). Look with `kiloword data check`.",
    ),
    (
        "truncated captions", "cut", 0.01, 0.005, _cut,
        "{:.1%} of the captions are longer than the text tower's context and cut: raise --model.text.context.",
    ),
)  # fmt: skip
