"""Alerts of a run: each begins once, says what to do, and ends once.

They depend only on the rows of `metrics.jsonl`, in order: the run itself and `kiloword watch` show the same alerts.
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
    """One alert, from its begin to its end."""

    name: str
    since: int  # step of the row that began it
    message: str  # printed when it began
    until: int | None = None  # step of the row that ended it; None: it continues


class Alerts:
    """Alerts of a run whose rows are added one by one."""

    def __init__(self, about: About) -> None:
        self.all: list[Alert] = []
        self._states = [_RuleState(rule) for rule in _rules(about)]

    def add(self, row: Mapping[str, Any]) -> list[str]:
        """Add the next row; returns messages about the alerts that begin or end with it."""
        return [s for state in self._states if (s := state.add(row, self.all))]

    @property
    def current(self) -> list[Alert]:
        return [state.alert for state in self._states if state.alert is not None]


def alerts(rows: Iterable[Mapping[str, Any]], about: About) -> list[Alert]:
    """All alerts of a run, in the order of their begin."""
    state = Alerts(about)
    for row in rows:
        state.add(row)
    return state.all


class _RuleState:
    """State of one rule: an alert begins at one threshold, and ends after some rows well below it."""

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
        return f"alert at step {self.alert.since}: {self.alert.message}"

    def _end(self, row: Mapping[str, Any]) -> str:
        assert self.alert is not None
        self.alert.until = int(row["step"])
        self.alert = None
        return f"over at step {row['step']}: {self.rule.over}"


def _rules(about: About) -> list[Rule]:
    learning = [BadSteps(), LossSpike(), GradientNorm(), ScaleAtLimit(about), Falling(), ManyMined()]
    return [*learning, DataWait(), Slower(), SkippedSamples(about), Truncated(), MemoryGrowth()]
