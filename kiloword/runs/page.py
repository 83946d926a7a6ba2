"""The page of one run: its curves, evaluations, data, settings, alerts, and the processes that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kiloword.config.settings import shown
from kiloword.report import Beside, Block, Page, Plot, Table, Text, utc
from kiloword.runs.rows import HISTORY, objects
from kiloword.runs.run import OPTIMIZATION, SPEED, Curve, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Differs = tuple[str, Any, Any]
"""A flag, its value in the run, and its default."""
POINTS = 300  # of a line; of more points it shows means


def curve_plot(name: str, lines: Mapping[str, Curve]) -> Plot:
    """A metric over the steps, a line for each name."""
    label = name.removeprefix("val/").replace("_", " ")

    def draw(axes: Axes) -> None:
        for line, curve in lines.items():
            parts = (np.array_split(np.asarray(of), max(min(len(of), POINTS), 1)) for of in curve)
            steps, values = ([part.mean() for part in of if len(part)] for of in parts)
            axes.plot(steps, values, "o" if len(steps) == 1 else "-", label=line if len(lines) > 1 else None)
        axes.set(xlabel="step", ylabel=label)
        if name in SPEED:
            axes.set_ylim(bottom=0)

    return Plot(draw, f"{label} over the steps")


def page(run: Run, finished: bool, unusual: Sequence[Differs], samples: Sequence[Block]) -> Page:
    """Args: finished: what the run itself knows; unusual: settings that differ from their defaults."""
    processes, recipe = objects(run.folder / HISTORY), run.recipe
    last, data = processes[-1] if processes else {}, recipe.get("data") or {}
    ended = "finished" if finished else f"ended by an error: {run.error}" if run.error else "not finished"
    intro = (
        f"A {recipe.get('method')} model ({recipe.get('init') or recipe.get('size')}), batch {run.batch:,}, "
        f"trained for {run.step:,} of {recipe.get('steps', 0):,} steps. It is {ended}."
    )
    facts = {
        "training data": shown(data.get("sources")),
        "validation": shown(data.get("val")),
        "images": f"{last.get('images', 0):,}",
        "pairs a second, without validation": f"{run.speed:,.3g}",
    }
    known = [name for name in ("epoch", "skipped", "truncated") if name in run.curves]
    facts |= {name: f"{run.curves[name][1][-1]:,.4g}" for name in known}
    metrics = [
        [name.removeprefix("val/"), *(f"{x:.4g}" for x in (v[0], min(v), max(v), v[-1])), len(v)]
        for name, (_, v) in run.curves.items()
        if name.startswith("val/")
    ]
    best = f"Best {run.best[0].removeprefix('val/')} after step {run.best[2]:,}, kept as best/." if run.best else ""
    changed = [[f"--{flag}", shown(value), shown(default)] for flag, value, default in unusual]
    columns = ("step", "time", "version", "torch", "device", "ranks")
    began = [[utc(p["time"]) if name == "time" else p.get(name) for name in columns] for p in processes]
    sections: dict[str, Sequence[Block]] = {
        "Loss": _plots(run, run.losses),
        "Evaluations": [
            *_plots(run, run.validation),
            Table(metrics, ["metric", "first", "least", "largest", "last", "n"], best),
        ],
        "Throughput": _plots(run, SPEED),
        "Optimization": _plots(run, OPTIMIZATION),
        "Data": [Table([*facts.items()], ["", "in this run"])],
        "Samples": samples,
        "Alerts": [Table([[a.name, a.since, a.until, a.message] for a in run.alerts.all], ["alert", "from", "to", ""])],
        "Settings": [
            Table([row for row in changed if row[1] != row[2]], ["differs from its default", "run", "default"])
        ],
        "Processes": [Table(began, columns), Text("\n".join(dict.fromkeys(p["command"] for p in processes)), "code")],
    }
    return Page(f"Run {run.name}", intro, sections)


def _plots(run: Run, names: Sequence[str]) -> list[Block]:
    """A plot for each metric that changes."""
    changing = [name for name in names if name in run.curves and len(set(run.curves[name][1])) > 1]
    return [Beside([curve_plot(name, {run.name: run.curves[name]}) for name in changing])]
