"""The page of one run: its curves, evaluations, data, settings, alerts, and the processes that made it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kiloword.report import Beside, Block, Figures, Page, Plot, Table, Text, duration
from kiloword.runs.rows import HISTORY, objects
from kiloword.runs.run import SPEED, Curve, Run

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
    processes, recipe = objects(run.folder / HISTORY)[0], run.recipe
    last, data, settings = processes[-1] if processes else {}, recipe.get("data") or {}, recipe.get("settings") or {}
    seen, known = run.step * run.batch, {name: values for name, (_, values) in run.curves.items()}
    ended = "finished" if finished else f"ended by an error: {run.error}" if run.error else "not finished"
    intro = (
        f"A {recipe.get('method')} model of size {recipe.get('size')}, batch {run.batch:,}, trained for "
        f"{run.step:,} of {recipe.get('steps', 0):,} steps. It is {ended}."
    )
    figures = {
        name.removeprefix("val/"): f"{known[name][-1]:.4g}" for name in ("loss", *run.validation[:3]) if name in known
    }
    figures["images seen"] = f"{seen:,}"
    if run.seconds:
        figures["pairs per second on average"] = f"{seen / run.seconds:,.3g}"
        figures["in the loop, without validation"] = duration(run.seconds)
    facts = {"training data": value_of(data.get("sources")), "validation": value_of(data.get("val"))}
    facts |= {"images": f"{last.get('images', 0):,}"}
    facts |= {words: f"{known[name][-1]:,.4g}" for name, words in COUNTS.items() if name in known}
    metrics = [
        [name.removeprefix("val/"), *(f"{x:.4g}" for x in (v[0], min(v), max(v), v[-1])), len(v)]
        for name, v in known.items()
        if name.startswith("val/")
    ]
    best = f"Best {run.best[0].removeprefix('val/')} after step {run.best[2]:,}, kept as best/." if run.best else ""
    changed = [[f"--{flag}", value_of(value), value_of(default)] for flag, value, default in unusual]
    sections: dict[str, Sequence[Block]] = {
        "In short": [Figures(figures)],
        "Loss": _plots(run, run.losses),
        "Evaluations": [
            *_plots(run, run.validation),
            Table(metrics, ["metric", "first", "least", "largest", "last", "n"], best),
        ],
        "Throughput": _plots(run, SPEED[:3]),
        "Optimization": _plots(run, SPEED[3:]),
        "Data": [Table(list(facts.items()), ["", "in this run"])],
        "Samples": samples,
        "Alerts": [Table([[a.name, a.since, a.until, a.message] for a in run.alerts.all], ["alert", "from", "to", ""])],
        "Settings": [
            Table([row for row in changed if row[1] != row[2]], ["differs from its default", "run", "default"]),
            Table([[name, value_of(value)] for name, value in settings.items()], ["the method's own setting", "run"]),
        ],
        "Processes": [
            Table(
                [
                    [
                        p["step"],
                        _date(p["time"]),
                        f"kiloword {p['version']}, torch {p['torch']}",
                        p["device"],
                        p["ranks"],
                    ]
                    for p in processes
                ],
                ["from step", "began", "version", "device", "ranks"],
            ),
            *(Text(command, "code") for command in dict.fromkeys(p["command"] for p in processes) if command),
        ],
    }
    made_by = {"Command": last.get("command", ""), "Date": _date(run.last.get("time", last.get("time", 0)))}
    return Page(f"Run {run.name}", intro, sections, made_by)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _plots(run: Run, names: Sequence[str]) -> list[Block]:
    """A plot for each metric that changes."""
    changing = [name for name in names if name in run.curves and len(set(run.curves[name][1])) > 1]
    return [Beside([curve_plot(name, {run.name: run.curves[name]}) for name in changing])]
