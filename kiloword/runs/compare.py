"""The verb compare: runs beside each other, those that differ in their seed alone as one group. No torch at import."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kiloword.config.execution import Some
from kiloword.errors import count
from kiloword.files import write_json
from kiloword.report import Beside, Block, Page, Plot, Table, made_by, say_blocks, write_page
from kiloword.runs.page import curve_plot, value_of
from kiloword.runs.run import SPEED, Curve, Run, find
from kiloword.runs.trackers import leaves_of
from kiloword.terminal import say, warn

FORMAT = "kiloword-compare-1"
SAME = ("seed", "micro", "chunk", "data.bad_share", "data.workers")  # settings in which the runs of a group may differ
INTRO = (
    "Runs that differ in their seed alone are one group, named by its first run: its figures are means ± the standard "
    "deviation of the sample over its n runs, its curves are means. Losses of different methods or batch sizes are "
    "different quantities: compare the metrics."
)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare runs, over seeds where they differ in nothing else.

    Examples:
      kiloword compare runs/a runs/b --html compare.html
      kiloword compare runs/k
    """

    runs: Some[Path]  # folders of runs (--out of train), or folders that contain runs
    json: Path | None = None  # write settings that differ and metrics to this file
    html: Path | None = None  # write a page with tables and curves

    def run(self) -> None:
        """Raises: ValueError for paths without runs, and for fewer than two runs."""
        every = [Run(folder, name) for folder, name in find(self.runs).items()]
        runs = [run for run in every if run.curves]
        if empty := [run.name for run in every if not run.curves]:
            warn(f"without a row yet, and omitted: {', '.join(empty)}")
        if len(runs) < 2:
            raise ValueError(f"compare found {count(len(runs), 'run')} with rows: expected at least two.")
        groups = groups_of(runs)
        names = [group.name for group in groups]
        paths = dict.fromkeys(path for group in groups for path in group.settings)
        settings = [[p, *(value_of(g.settings[p]) if p in g.settings else None for g in groups)] for p in paths]
        main = list(dict.fromkeys([*map(loss_of, runs), *(name for run in runs for name in main_metrics(run))]))
        sections: dict[str, list[Block]] = {
            "Runs": [Table([_about(group) for group in groups], ["group", "n", "steps", "not finished", "runs"])],
            "Settings that differ": [Table(settings, ["setting", *names])],
            "Last values": [table(groups, main)],
        }
        for title, blocks in sections.items():
            say("", title)
            say_blocks(blocks)
        if self.json is not None:
            write_json(self.json, {"format": FORMAT, "groups": [as_plain(group) for group in groups]})
        if self.html is not None:
            sections["Last values"] = [table(groups, list(dict.fromkeys(m for group in groups for m in group.cells)))]
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
    known = {name: [run[name] for run in runs if name in run] for name in dict.fromkeys(n for run in runs for n in run)}
    return {
        name: Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))
        for name, values in known.items()
    }


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, or of one combination of a sweep."""

    name: str
    settings: Mapping[str, Any]  # those in which the groups differ, by their place in the recipe
    cells: Mapping[str, Cell]  # of each metric the last value; losses by the name of their kind
    runs: Sequence[Run] = ()


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """The runs by their recipe, in their order, each group with the settings that tell it from the others."""
    alike: dict[str, list[Run]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for run in runs:
        settings = {path: value for path, value in leaves_of(run.recipe) if path and path not in SAME}
        key = json.dumps(settings or str(run.folder))  # a run without its settings is like no other
        flat[key] = settings
        alike.setdefault(key, []).append(run)
    paths = dict.fromkeys(path for settings in flat.values() for path in settings)
    differ = [p for p in paths if len({json.dumps(s[p]) if p in s else "" for s in flat.values()}) > 1]
    if "size" in differ:  # a size implies all of these
        differ = [p for p in differ if not p.startswith("model.")]
    every = ((members, {p: flat[key][p] for p in differ if p in flat[key]}) for key, members in alike.items())
    return [Group(of[0].name, settings, cells_of([last_values(run) for run in of]), of) for of, settings in every]


def loss_of(run: Run) -> str:
    """The name of a run's loss: losses of other methods or batches are other quantities."""
    return f"loss of {run.recipe.get('method', 'its method')}, batch {run.batch}"


def last_values(run: Run) -> dict[str, float]:
    """The last values of the loss, its terms and validation, and the speed over the whole run."""
    names = [*run.losses, *(name for name in run.curves if name.startswith("val/"))]
    values = {loss_of(run) if n == "loss" else n.removeprefix("val/"): run.curves[n][1][-1] for n in names}
    return values | ({"pairs_per_s": run.step * run.batch / run.seconds} if run.seconds else {})


def main_metrics(run: Run) -> list[str]:
    """Those of the short table: the main metrics of validation and recall@10, speed."""
    recalls = [name for name in run.curves if name.endswith("recall@10")]
    return [*(name.removeprefix("val/") for name in [*run.validation, *recalls]), "pairs_per_s"]


def table(groups: Sequence[Group], metrics: Sequence[str]) -> Table:
    """Metrics of groups: a row a group, or a row a metric where there are more of these."""
    rows = [[g.name, *(str(g.cells[m]) if m in g.cells else None for m in metrics)] for g in groups]
    if len(metrics) < len(groups):
        return Table(rows, ["", *metrics])
    return Table(list(zip(metrics, *(row[1:] for row in rows), strict=True)), ["", *(group.name for group in groups)])


def _about(group: Group) -> list[object]:
    steps, unfinished = sorted({run.step for run in group.runs}), sum(run.state != "finished" for run in group.runs)
    span = " to ".join(f"{step:,}" for step in dict.fromkeys([steps[0], steps[-1]]))
    return [group.name, len(group.runs), span, unfinished, ", ".join(run.name for run in group.runs)]


def as_plain(group: Group) -> dict[str, Any]:
    """A group as JSON holds it."""
    runs = [{"folder": str(run.folder), "state": run.state, "step": run.step} for run in group.runs]
    cells = {name: asdict(one) for name, one in group.cells.items()}
    return {"name": group.name, "runs": runs, "settings": dict(group.settings), "metrics": cells}


def _curves(groups: Sequence[Group]) -> Iterator[Plot]:
    """A plot a metric with a line a group: each kind of loss with its terms, validation, speed."""
    runs = [run for group in groups for run in group.runs]
    for kind in dict.fromkeys(map(loss_of, runs)):
        alike = [group for group in groups if loss_of(group.runs[0]) == kind]
        for name in dict.fromkeys(name for group in alike for run in group.runs for name in run.losses):
            yield curve_plot(
                name, {group.name: mean_curve(group.runs, name) for group in alike}, f"{name} of {kind[8:]}"
            )
    for name in dict.fromkeys([*(name for run in runs for name in run.validation), *SPEED]):
        yield curve_plot(name, {group.name: mean_curve(group.runs, name) for group in groups})


def mean_curve(runs: Sequence[Run], name: str) -> Curve:
    """The mean of those runs that have a metric, at the steps that all of them have so far."""
    curves = [dict(zip(*run.curves[name], strict=True)) for run in runs if name in run.curves]
    steps = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    return steps, [statistics.fmean(curve[step] for curve in curves) for step in steps]
