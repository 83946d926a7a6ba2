"""Run the arms of a sweep one after the other, and keep their results in OUT/sweep.json."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kiloword.api import load
from kiloword.apps.sweep import stored
from kiloword.apps.sweep.arms import Arm
from kiloword.apps.sweep.stored import Stored
from kiloword.errors import count, sentence_of
from kiloword.files import write_json
from kiloword.terminal import say, warn
from kiloword.training.log import read_metrics
from kiloword.training.signals import Stopped
from kiloword.training.validation.sets import ValSet, judged

FORMAT = "kiloword-sweep-1"
Metrics = dict[str, float]


@dataclass
class Results:
    """What is known of each arm: its metrics, or why it failed."""

    out: Path
    arms: Sequence[Arm]
    evaluated: Sequence[str]  # words of --eval
    metrics: dict[str, Metrics] = field(default_factory=dict)  # by the name of the arm
    errors: dict[str, str] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)  # of earlier calls, until results of this one replace them

    def read(self) -> None:
        """Take over the results of earlier calls. Raises: ValueError where they are of other settings."""
        self.stored = stored.read(self.out / "sweep.json")
        stored.check_same(self.out, self.stored, self.arms)
        alike = {name: one for name, one in self.stored.items() if one.row.get("eval") == list(self.evaluated)}
        self.metrics |= {name: one.row["metrics"] for name, one in alike.items()}
        if other := len(self.stored) - len(alike):
            warn(f"{count(other, 'arm')} in {self.out / 'sweep.json'} of another --eval: the table omits them.")

    @property
    def every(self) -> list[Arm]:
        """The arms of earlier calls that this one does not name, and its own."""
        named = {arm.name for arm in self.arms}
        return [*(one.arm for name, one in self.stored.items() if name not in named), *self.arms]

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        rows = []
        for arm in self.every:
            row: dict[str, Any] = {"name": arm.name, "command": list(arm.words), "eval": list(self.evaluated)}
            row |= {"values": dict(arm.values), "seed": arm.seed}
            if arm.name in self.metrics:
                row["metrics"] = self.metrics[arm.name]
            elif arm.name in self.stored:
                row = dict(self.stored[arm.name].row)
            if arm.name in self.errors:
                row["error"] = self.errors[arm.name]
            rows.append(row)
        return {"format": FORMAT, "arms": rows}


def run_all(
    results: Results,
    train: Callable[[Sequence[str]], None],
    evaluate: Callable[[Path], Metrics],
    check: Callable[[], None],
) -> None:
    """Run every arm that is not finished; an arm that fails is named, and the others are run.

    Args: train: runs the command `train` with these arguments; evaluate: metrics of the model in a folder; check: looks
    at the results before the first arm and after each.
    Raises: Stopped after a signal; the errors of `check`.
    """
    check()
    todo = [arm for arm in results.arms if arm.name not in results.metrics]
    say(f"{len(results.arms) - len(todo)} of {len(results.arms)} arms are finished, {len(todo)} to do")
    for n, arm in enumerate(todo, 1):
        say(f"arm {n} of {len(todo)}: {arm.name}")
        folder = results.out / arm.name
        try:
            train(arm.words)
            results.metrics[arm.name] = logged(folder) | evaluate(folder / "model")
            results.errors.pop(arm.name, None)
        except Stopped:
            raise
        except (Exception, SystemExit) as e:
            results.errors[arm.name] = _reason(e)
            warn(f"arm {arm.name} failed: {results.errors[arm.name]}")
        write_json(results.out / "sweep.json", results.plain())
        check()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "its arguments are refused, see above"
    return sentence_of(error) or f"{type(error).__name__}: {error}"


def logged(folder: Path) -> Metrics:
    """The last loss of a run, and its last validation."""
    rows = read_metrics(folder / "metrics.jsonl")
    last = {name: value for row in rows for name, value in row.items() if name == "loss" or name.startswith("val/")}
    return {name: float(value) for name, value in last.items()}


def evaluated(folder: Path, sets: Sequence[ValSet], train: Any, device: str, **trust: Any) -> Metrics:
    """Metrics of a model on data sets, by name; of several sets "NAME/METRIC".

    Args: train: training data, for the answers that vqa may give; trust: arguments of `load`.
    """
    if not sets:
        return {}
    matcher = load(folder, device=device, precision="auto", **trust)
    metrics: Metrics = {}
    for one in sets:
        start = f"{one.name}/" if len(sets) > 1 else ""
        metrics |= {f"{start}{name}": value for name, value in judged(matcher, one, train).items()}
    return metrics
