"""Run the arms of a sweep one after the other, and keep their results in OUT/sweep.json."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kiloword.api import load
from kiloword.checkpoint.files import write_json
from kiloword.errors import sentence_of
from kiloword.sweep.arms import Arm
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

    def read(self) -> None:
        """Take over the results of arms that an earlier call of the same command finished."""
        stored: Any = {}
        path = self.out / "sweep.json"
        if path.is_file():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                before = {one["name"]: one for one in stored["arms"]}
            except (ValueError, KeyError, TypeError, RecursionError) as e:
                raise ValueError(f"{path} is no sweep of kiloword, or damaged: choose another --out.") from e
            for arm in self.arms:
                if before.get(arm.name, {}).items() >= self._key(arm).items() and "metrics" in before[arm.name]:
                    self.metrics[arm.name] = before[arm.name]["metrics"]

    def _key(self, arm: Arm) -> dict[str, Any]:
        """What a result belongs to."""
        return {"name": arm.name, "command": list(arm.words), "eval": list(self.evaluated)}

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        rows = []
        for arm in self.arms:
            row = {**self._key(arm), "values": dict(arm.values), "seed": arm.seed}
            if arm.name in self.metrics:
                row["metrics"] = self.metrics[arm.name]
            if arm.name in self.errors:
                row["error"] = self.errors[arm.name]
            rows.append(row)
        return {"format": FORMAT, "arms": rows}


def run_all(results: Results, train: Callable[[Sequence[str]], None], evaluate: Callable[[Path], Metrics]) -> None:
    """Run every arm that is not finished; an arm that fails is named, and the others are run.

    Args: train: runs the command `train` with these arguments; evaluate: metrics of the model in a folder.
    Raises: Stopped after a signal.
    """
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
