"""What of a run's rows deserves a word: each alert begins once, says what to do, and ends once.

Everything follows from the rows of `metrics.jsonl`, in order: the run that trains and whoever watches it see the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kiloword.watch.rule import About, Rule
from kiloword.watch.rules_feeding import DataWait, MemoryGrowth, SkippedSamples, Slower, Truncated
from kiloword.watch.rules_learning import BadSteps, Falling, GradientNorm, LossSpike, ManyMined, ScaleAtLimit

__all__ = ["About", "Alert", "Alerts", "alerts"]


@dataclass
class Alert:
    """One spell of something wrong."""

    name: str
    since: int  # step of the row that began it
    sentence: str  # as it was said when it began
    until: int | None = None  # step of the row that ended it; None: it goes on


class Alerts:
    """Alerts of a run whose rows come one by one."""

    def __init__(self, about: About) -> None:
        self.all: list[Alert] = []
        self._states = [_RuleState(rule) for rule in _rules(about)]

    def add(self, row: Mapping[str, Any]) -> list[str]:
        """Take the next row; returns the sentences to say: what began with it and what ended."""
        return [s for state in self._states if (s := state.add(row, self.all))]

    @property
    def current(self) -> list[Alert]:
        return [state.alert for state in self._states if state.alert is not None]


def alerts(rows: Iterable[Mapping[str, Any]], about: About) -> list[Alert]:
    """All alerts of a run, in the order in which they began."""
    found = Alerts(about)
    for row in rows:
        found.add(row)
    return found.all


class _RuleState:
    """One rule and whether it is broken: begins at one threshold, ends only well below it and for some rows."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.alert: Alert | None = None
        self._calm = 0

    def add(self, row: Mapping[str, Any], every: list[Alert]) -> str | None:
        value = self.rule.measure(row)
        if value is None:
            return None
        if self.alert is None:
            return self._begin(row, value, every) if value >= self.rule.begin else None
        self._calm = self._calm + 1 if value <= self.rule.end else 0
        return self._end(row) if self._calm >= self.rule.patience else None

    def _begin(self, row: Mapping[str, Any], value: float, every: list[Alert]) -> str:
        self.alert, self._calm = Alert(self.rule.name, int(row["step"]), self.rule.says(value)), 0
        every.append(self.alert)
        return f"alert at step {self.alert.since}: {self.alert.sentence}"

    def _end(self, row: Mapping[str, Any]) -> str:
        assert self.alert is not None
        self.alert.until = int(row["step"])
        self.alert = None
        return f"over at step {row['step']}: {self.rule.over}"


def _rules(about: About) -> list[Rule]:
    learning = [BadSteps(), LossSpike(), GradientNorm(), ScaleAtLimit(about), Falling(), ManyMined()]
    return [*learning, DataWait(), Slower(), SkippedSamples(about), Truncated(), MemoryGrowth()]
