"""The page of one run: its curves, evaluations, data, settings, alerts, and the processes that made it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kiloword.report import Beside, Block, Figures, Page, Plot, Table, Text, duration
from kiloword.runs.rows import HISTORY, objects
from kiloword.runs.run import SPEED, Curve, Run
from kiloword.terminal.progress import per_second

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Differs = tuple[str, Any, Any]
"""A flag, its value in the run, and its default."""
POINTS = 300  # of a line; of more points it shows means
LABELS = {  # of amounts, whose axes begin at zero
    "pairs_per_s": "image-text pairs per second",
    "data_wait": "share of time waited for data",
    "memory": "peak memory, MB",
}
COUNTS = {"epoch": "epochs", "skipped": "bad samples", "truncated": "captions cut", "skipped_steps": "steps skipped"}


def curve_plot(name: str, lines: Mapping[str, Curve], title: str = "") -> Plot:
    """A metric over the steps, a line for each name."""
    label = title or LABELS.get(name, name.removeprefix("val/").replace("_", " "))

    def draw(axes: Axes) -> None:
        for line, curve in lines.items():
            parts = (np.array_split(np.asarray(of), max(min(len(of), POINTS), 1)) for of in curve)
            steps, values = ([part.mean() for part in of if len(part)] for of in parts)
            axes.plot(steps, values, label=line if len(lines) > 1 else None)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        if name in LABELS:
            axes.set_ylim(bottom=0)

    return Plot(draw, f"{label} over the steps")


def value_of(value: Any) -> str:
    """A setting as a table shows it."""
    if isinstance(value, list | tuple):
        return " ".join(map(value_of, value)) or "none"
    return "none" if value in (None, "", {}) else f"{value:g}" if isinstance(value, float) else str(value)


def page(run: Run, finished: bool, unusual: Sequence[Differs], samples: Sequence[Block]) -> Page:
    """Args: finished: what the run itself knows; unusual: settings that differ from their defaults."""
    processes = objects(run.folder / HISTORY)[0]
    last, settings = processes[-1] if processes else {}, run.recipe.get("settings") or {}
    ended = (
        "It is finished" if finished else f"It ended with an error: {run.error}" if run.error else "It is not finished"
    )
    intro = (
        f"A {run.recipe.get('method')} model of size {run.recipe.get('size')}, batch {run.batch:,}, trained for "
        f"{run.step:,} of {run.recipe.get('steps', 0):,} steps. {ended}."
    )
    changed = [[f"--{flag}", value_of(value), value_of(default)] for flag, value, default in unusual]
    sections: dict[str, Sequence[Block]] = {
        "In short": [Figures(_figures(run))],
        "Loss": _plots(run, run.losses),
        "Evaluations": [*_plots(run, run.validation), _evaluations(run)],
        "Throughput": _plots(run, SPEED[:3]),
        "Optimization": _plots(run, SPEED[3:]),
        "Data": [Table(_data(run, last.get("images")), ["", "in this run"])],
        "Samples": samples,
        "Alerts": [Table([[a.name, a.since, a.until, a.message] for a in run.alerts.all], ["alert", "from", "to", ""])],
        "Settings": [
            Table([row for row in changed if row[1] != row[2]], ["differs from its default", "run", "default"]),
            Table([[name, value_of(value)] for name, value in settings.items()], ["the method's own setting", "run"]),
        ],
        "Processes": [
            Table([_process(p) for p in processes], ["from step", "began", "version", "device"]),
            *(Text(command, "code") for command in dict.fromkeys(p["command"] for p in processes) if command),
        ],
    }
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.last.get("time", last.get("time", 0))))
    return Page(f"Run {run.name}", intro, sections, {"Command": last.get("command", ""), "Date": when})


def _figures(run: Run) -> dict[str, str]:
    seen, seconds = run.step * run.batch, run.seconds
    figures = {"loss of the last row": f"{run.curves['loss'][1][-1]:.4g}"} if "loss" in run.curves else {}
    figures |= {
        f"{n.removeprefix('val/').replace('_', ' ')}, last": f"{run.curves[n][1][-1]:.3f}" for n in run.validation[:3]
    }
    figures["images seen"] = f"{seen:,}"
    if seconds:
        figures |= {"pairs per second on average": per_second(seen / seconds)}
        figures |= {"in the loop, without validation": duration(seconds)}
    return figures


def _plots(run: Run, names: Sequence[str]) -> list[Block]:
    """A plot for each metric that changes."""
    plots = [
        curve_plot(n, {run.name: run.curves[n]}) for n in names if n in run.curves and len(set(run.curves[n][1])) > 1
    ]
    return [Beside(plots)]


def _evaluations(run: Run) -> Table:
    values = {name.removeprefix("val/"): curve[1] for name, curve in run.curves.items() if name.startswith("val/")}
    rows = [[name, *(f"{x:.4g}" for x in (v[0], min(v), max(v), v[-1])), len(v)] for name, v in values.items()]
    best = f"Best {run.best[0].removeprefix('val/')} after step {run.best[2]:,}, kept as best/." if run.best else ""
    return Table(rows, ["metric", "first", "least", "largest", "last", "n"], best)


def _data(run: Run, images: int | None) -> list[list[object]]:
    data = run.recipe.get("data") or {}
    rows: list[list[object]] = [
        ["training data", value_of(data.get("sources"))],
        ["validation", value_of(data.get("val"))],
    ]
    rows += [["images", f"{images:,}"]] if images else []
    return rows + [[words, f"{run.curves[name][1][-1]:,.4g}"] for name, words in COUNTS.items() if name in run.curves]


def _process(process: Mapping[str, Any]) -> list[object]:
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(process["time"]))
    ranks = f" x {process['ranks']}" if process["ranks"] > 1 else ""
    return [
        f"{process['step']:,}",
        began,
        f"kiloword {process['version']}, torch {process['torch']}",
        f"{process['device']}{ranks}",
    ]
