"""The verb compare: runs beside each other, those that differ in their seed alone as one group."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from kiloword.config.execution import Some
from kiloword.config.settings import leaves_of, shown
from kiloword.errors import count
from kiloword.files import write_json
from kiloword.report import Beside, Block, Page, Plot, Table, made_by, say_blocks, write_page
from kiloword.runs.page import curve_plot
from kiloword.runs.run import SPEED, Curve, Run, find
from kiloword.terminal import say, warn

FORMAT = "kiloword-compare-1"
SAME = ("seed", "micro", "chunk", "data.bad_share", "data.workers")  # settings in which the runs of a group may differ
INTRO = (
    "Runs that differ in their seed alone are one group: means over n runs ± the standard "
    "deviation of the sample. Losses of different methods or batch sizes are different quantities."
)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare the settings and metrics of runs. Runs that differ only in their seed are averaged.

    Examples:
      kiloword compare runs/a runs/b --html compare.html
      kiloword compare runs/k
    """

    runs: Some[Path]  # folders of runs (--out of train), or folders that contain runs
    json: Path | None = None  # write the metrics and the settings that differ to this file
    html: Path | None = None  # write a page with tables and curves

    def run(self) -> None:
        """Raises: ValueError for paths without runs, and for fewer than two runs."""
        every = find(self.runs)
        runs = [run for run in every if run.curves]
        if empty := [run.name for run in every if not run.curves]:
            warn(f"without a row yet, and omitted: {', '.join(empty)}")
        if len(runs) < 2:
            raise ValueError(f"compare found {count(len(runs), 'run')} with rows: expected at least two.")
        groups = groups_of(runs)
        names = [group.name for group in groups]
        states = [[g.name, r.name, r.state, r.step] for g in groups for r in g.runs]
        sections: dict[str, list[Block]] = {"Runs": [Table(states, ["group", "run", "state", "step"])]}
        if differ := dict.fromkeys(path for group in groups for path in group.settings):
            rows = [[p, *(shown(g.settings[p]) if p in g.settings else None for g in groups)] for p in differ]
            sections["Settings that differ"] = [Table(rows, ["setting", *names])]
        metrics = dict.fromkeys(name for group in groups for name in group.cells)
        values = [[name, *(str(g.cells[name]) if name in g.cells else None for g in groups)] for name in metrics]
        sections["Last values"] = [Table([["n", *(len(g.runs) for g in groups)], *values], ["", *names])]
        for title, blocks in sections.items():
            say("", title)
            say_blocks(blocks)
        if self.json is not None:
            plain = [
                {
                    "name": group.name,
                    "runs": [{"folder": str(run.folder), "state": run.state, "step": run.step} for run in group.runs],
                    "settings": dict(group.settings),
                    "metrics": {name: asdict(cell) for name, cell in group.cells.items()},
                }
                for group in groups
            ]
            write_json(self.json, {"format": FORMAT, "groups": plain})
        if self.html is not None:
            sections["Curves"] = [Beside(list(_curves(groups)))]
            write_page(self.html, Page(f"{len(runs)} runs beside each other", INTRO, sections, made_by()))


@dataclass(frozen=True)
class Cell:
    """A metric over runs that differ in their seed."""

    mean: float
    std: float | None  # of a sample, divided by n - 1; of one run None
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.std is None else f"{self.mean:.4g} ± {self.std:.2g}"


def cells_of(runs: Sequence[Mapping[str, float]]) -> dict[str, Cell]:
    """Each metric over those runs that have it."""
    known: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.items():
            known.setdefault(name, []).append(value)
    return {n: Cell(statistics.fmean(v), statistics.stdev(v) if len(v) > 1 else None, len(v)) for n, v in known.items()}


@dataclass(frozen=True)
class Group:
    """Runs of one recipe."""

    name: str
    settings: Mapping[str, Any]  # those in which the groups differ, by their place in the recipe
    cells: Mapping[str, Cell]  # of each metric the last value; losses by the name of their kind
    runs: Sequence[Run]


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """The runs by their recipe, in their order, each group with the settings that tell it from the others."""
    flat = [{p: value for p, value in leaves_of(run.recipe | run.digests) if p and p not in SAME} for run in runs]
    differ = [p for p in dict.fromkeys(chain(*flat)) if any(one.get(p, ...) != flat[0].get(p, ...) for one in flat)]
    if "size" in differ:  # a size implies all of these
        differ = [path for path in differ if not path.startswith("model.")]
    alike: dict[str, list[int]] = {}
    for n, settings in enumerate(flat):  # a run without settings is like no other
        alike.setdefault(json.dumps(settings) if settings else str(n), []).append(n)
    groups = []
    for members in alike.values():
        chosen, some = {p: flat[members[0]][p] for p in differ if p in flat[members[0]]}, [runs[n] for n in members]
        last = [
            {name: curve[1][-1] for name, curve in series(run).items()} | {"pairs_per_s": run.speed} for run in some
        ]
        name = some[0].name + f" and {len(some) - 1} more" * (len(some) > 1)
        groups.append(Group(name, chosen, cells_of(last), some))
    return groups


def series(run: Run) -> dict[str, Curve]:
    """Losses, validation and speed of a run. The loss of another method or batch size has a name of its own."""
    loss = f"loss of {run.recipe.get('method', 'its method')}, batch {run.batch}"
    names = [*run.losses, *(name for name in run.curves if name.startswith("val/")), *SPEED]
    return {
        loss if name == "loss" else name.removeprefix("val/"): run.curves[name] for name in names if name in run.curves
    }


def _curves(groups: Sequence[Group]) -> Iterator[Plot]:
    """A plot a metric with a line a group: losses with their terms, the main metrics of validation, speed."""
    runs = [run for group in groups for run in group.runs]
    rest = {name[4:] for run in runs for name in run.curves if name.startswith("val/") and name not in run.validation}
    for name in dict.fromkeys(name for run in runs for name in series(run) if name not in rest):
        lines = {group.name: mean_curve(group.runs, name) for group in groups}
        yield curve_plot(name, {group: curve for group, curve in lines.items() if len(curve[0])})


def mean_curve(runs: Sequence[Run], name: str) -> Curve:
    """The mean of those runs that have a metric, at the steps that all of them have so far."""
    curves = [dict(zip(*of[name], strict=True)) for of in map(series, runs) if name in of]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    return steps, [statistics.fmean(curve[step] for curve in curves) for step in steps]
