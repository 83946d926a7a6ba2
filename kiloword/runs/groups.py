"""Runs beside each other, those that differ in their seed alone as one group. No torch here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from kiloword.errors import count
from kiloword.runs.curves import evaluations, losses, main_evaluations
from kiloword.runs.runs import Watched, settings_of

SAME = ("seed", "micro", "chunk", "data.bad_share", "data.workers")  # settings in which the runs of a group may differ
DEEP, MOST, LONGEST = 8, 2000, 200  # levels of settings, their number, characters of a name
ABSENT = "\0"
SPEED = "pairs_per_s"


@dataclass(frozen=True)
class Cell:
    """A metric over runs that differ in their seed."""

    mean: float
    std: float | None  # of one run None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.std is None else f"{self.mean:.4g} +- {self.std:.2g}"


def cell(values: Sequence[float]) -> Cell:
    """Mean, standard deviation (of a sample, divided by n - 1) and number of values."""
    return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class RunGroup:
    """Runs of one recipe."""

    name: str
    runs: Sequence[Watched]
    settings: Mapping[str, Any]  # those in which the groups differ, by their place in the recipe
    cells: Mapping[str, Cell]  # the last value of each metric; losses by the name of their kind

    @property
    def loss(self) -> str:
        """The kind of its loss: losses of other methods or batches are other quantities."""
        return loss_of(self.runs[0])


def kind_of(run: Watched) -> str:
    """What a run's loss is of: runs of other methods or batches have other losses."""
    return f"{run.config.method or 'its method'}, batch {run.config.batch}"


def loss_of(run: Watched) -> str:
    """The name of a run's loss."""
    return f"loss of {kind_of(run)}"


def groups_of(runs: Sequence[Watched]) -> list[RunGroup]:
    """The runs by their recipe, in their order, each group with the settings that tell it from the others."""
    alike: dict[str, list[Watched]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for run in runs:
        settings = flat_settings(run)
        key = json.dumps(settings or str(run.folder), sort_keys=True)  # a run without its config is like no other
        flat[key] = settings
        alike.setdefault(key, []).append(run)
    paths = dict.fromkeys(path for settings in flat.values() for path in settings)
    differ = [p for p in paths if len({json.dumps(s.get(p, ABSENT)) for s in flat.values()}) > 1]
    if "size" in differ:  # a size implies all of these
        differ = [p for p in differ if not p.startswith("model.")]
    chosen = {key: {p: settings[p] for p in differ if p in settings} for key, settings in flat.items()}
    names = _names(chosen, alike)
    return [RunGroup(names[key], members, chosen[key], _cells(members)) for key, members in alike.items()]


def flat_settings(run: Watched) -> dict[str, Any]:
    """Settings by their place in the recipe, without those in which the runs of a group may differ.

    Of a stranger's folder at most MOST, their names cut: a recipe has about 200.
    """
    leaves = islice(leaves_of(settings_of(run.folder)), MOST)
    return {path[:LONGEST]: value for path, value in leaves if path and path not in SAME}


def paths_of(groups: Sequence[RunGroup]) -> list[str]:
    """The settings in which groups differ; a method lacks those of others."""
    return list(dict.fromkeys(path for group in groups for path in group.settings))


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values by dotted paths."""
    if isinstance(value, dict) and value and path.count(".") < DEEP:
        for name, inner in value.items():
            yield from leaves_of(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _names(chosen: Mapping[str, Mapping[str, Any]], alike: Mapping[str, Sequence[Watched]]) -> dict[str, str]:
    """A short name for each group: its run's where it has one, else its method, or the few settings that tell it."""
    names = {}
    for key, members in alike.items():
        values = chosen[key]
        if len(values) > 2 and "method" in values:  # whose own settings are the others
            values = {"method": values["method"]}
        words = (f"{path.rpartition('.')[2].removeprefix('method')} {value_of(v)}" for path, v in values.items())
        several = len(members) > 1 and 0 < len(values) <= 2
        names[key] = ", ".join(word.strip() for word in words) if several else members[0].name
    if len(set(names.values())) < len(names):
        return {key: members[0].name for key, members in alike.items()}
    return names


def value_of(value: Any) -> str:
    """A setting as a table shows it."""
    if isinstance(value, list | tuple):
        return " ".join(map(value_of, value)) or "none"
    if isinstance(value, dict):
        return json.dumps(value) if value else "none"
    return "none" if value is None or value == "" else f"{value:g}" if isinstance(value, float) else str(value)


def _cells(runs: Sequence[Watched]) -> dict[str, Cell]:
    """Mean and spread of the last values of the loss, its terms and validation, and of the speed over the run."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for name in (*losses([run]), *evaluations([run])):
            known = run.columns.of(name)[1]
            shown_as = loss_of(run) if name == "loss" else name.removeprefix("val/")
            if len(known):
                values.setdefault(shown_as, []).append(float(known[-1]))
        if run.seconds:
            values.setdefault(SPEED, []).append(run.step * run.config.batch / run.seconds)
    return {name: cell(each) for name, each in values.items()}


def main_metrics(every: Sequence[RunGroup]) -> list[str]:
    """The metrics of the short table: each kind of loss, the main ones of validation and recall@10, speed."""
    kinds = list(dict.fromkeys(group.loss for group in every))
    names = [name.removeprefix("val/") for name in main_evaluations([run for group in every for run in group.runs])]
    recalls = [name for group in every for name in group.cells if name.endswith("recall@10")]
    return list(dict.fromkeys([*kinds, *names, *recalls, SPEED]))


def state_of(group: RunGroup) -> str:
    """How far its runs are: "3 runs, 1000 steps"."""
    steps = sorted({run.step for run in group.runs})
    unfinished = sum(run.state()[0] != "finished" for run in group.runs)
    span = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    return f"{count(len(group.runs), 'run')}, {span} steps" + (f", {unfinished} not finished" if unfinished else "")


def as_plain(group: RunGroup) -> dict[str, Any]:
    """A group as JSON holds it."""
    runs = [{"folder": str(run.folder), "state": run.state()[0], "step": run.step} for run in group.runs]
    cells = {name: asdict(one) for name, one in group.cells.items()}
    return {"name": group.name, "runs": runs, "settings": dict(group.settings), "metrics": cells}
