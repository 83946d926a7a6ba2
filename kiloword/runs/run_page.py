"""The page of one run: its curves, speed, data, evaluations, samples, settings, and the processes that made it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kiloword import report
from kiloword.report import Html, duration, grid, section, table
from kiloword.runs import curves, history
from kiloword.runs.groups import value_of
from kiloword.runs.plot import short
from kiloword.runs.runs import Watched, settings_of
from kiloword.terminal.progress import per_second

Differs = tuple[str, Any, Any]
"""A flag, its value in the run, and its default."""
SEEN = "The first examples of the run as training sees them: augmented, with the captions that were chosen."


def page(run: Watched, unusual: Sequence[Differs], samples: Html, method: Mapping[str, Any]) -> str:
    """The whole document. Args: unusual: settings that differ from defaults; method: the method's own settings."""
    processes = history.processes(run.folder)
    last, times = processes[-1] if processes else history.Process(), run.columns.of("time")[1]
    began = [
        [f"{p.step:,}", history.date(p.time), _version(p), p.device + (f" x {p.ranks}" if p.ranks > 1 else "")]
        for p in processes
    ]
    commands = dict.fromkeys(p.command for p in processes if p.command)
    alerts = (
        f"{a.name}, from step {a.since:,} to {'the end' if a.until is None else f'{a.until:,}'}: {a.message}"
        for a in run.alerts.all
    )
    html = report.page(
        f"Run {run.name}",
        _intro(run),
        [
            section("In short", report.headline(_figures(run))),
            section("Loss", grid(_plots(run, curves.losses([run])))),
            section("Evaluations", *_evaluations(run)),
            section("Throughput", grid(_plots(run, curves.SPEED)), table(_counts(run), ["count", "value"])),
            section("Optimization", grid(_plots(run, curves.OPTIMIZATION))),
            section("Data", table(_data(run, last.images), ["", "in this run"])),
            section("Samples", samples and SEEN, samples),
            section("Alerts", (run.alerts.all and report.bullets(alerts)) or None),
            section("Settings", *_settings(unusual, method)),
            section(
                "Processes", table(began, ["from step", "began", "version", "device"]), *map(report.code, commands)
            ),
        ],
    )
    date = history.date(float(times[-1]) if len(times) else 0.0) or history.date(last.time)
    return report.signed(html, {"Command": last.command, "Version": _version(last), "Date": date})


def _version(process: history.Process) -> str:
    return f"kiloword {process.version}, torch {process.torch}" if process.version else ""


def _intro(run: Watched) -> str:
    config, (state, details) = run.config, run.state()
    of = f" of {config.steps:,}" if config.steps else ""
    ended = {"finished": "It is finished", "failed": "It ended with an error"}.get(state, "It is not finished")
    early = f" ({details})" if state == "finished" and details else ""
    return (
        f"A {config.method} model of size {config.size}, batch {config.batch:,}, trained for {run.step:,}{of} steps. "
        f"{ended}{early}{f': {run.error}' if run.error else ''}."
    )


def _figures(run: Watched) -> Iterator[tuple[str, str]]:
    """The key figures: (value, what it is)."""
    last, seconds, seen = run.columns.last, run.seconds, run.step * run.config.batch
    if isinstance(last.get("loss"), int | float):
        yield short(float(last["loss"])), "loss of the last row"
    for name in curves.main_evaluations([run])[:3]:
        yield f"{float(last[name]):.3f}", f"{name.removeprefix('val/').replace('_', ' ')}, last"
    yield f"{seen:,}", "images seen"
    if seconds:
        yield per_second(seen / seconds), "pairs per second on average"
        yield duration(seconds), "in the loop, without validation"


def _plots(run: Watched, names: Sequence[str]) -> Iterator[Html]:
    """A plot for each metric that changes."""
    for name in names:
        points = curves.points_of([run], name)
        if len({y for _, y in points}) > 1 or (points and (name == "loss" or name.startswith("val/"))):
            yield curves.plot(name, [curves.Curve(name, points)])


def _evaluations(run: Watched) -> Iterator[str]:
    """Plots of the main metrics, the best state where one was kept, and a table of all metrics."""
    columns = {name: run.columns.of(name) for name in curves.evaluations([run])}
    yield grid(_plots(run, [name for name in curves.main_evaluations([run]) if len(columns[name][0]) > 1]))
    if run.best and columns:
        yield f"Best {run.best[0].removeprefix('val/')}: {run.best[1]:.4g} after step {run.best[2]:,}, kept as best/."
    rows = [
        [name.removeprefix("val/"), *(f"{x:.4g}" for x in (y[0], y.min(), y.max(), y[-1])), str(len(y))]
        for name, (_, y) in columns.items()
    ]
    if all(row[-1] == "1" for row in rows):
        yield table([row[:2] for row in rows], ["metric", "the only value"])
    else:
        yield table(rows, ["metric", "first", "least", "largest", "last", "n"])


def _counts(run: Watched) -> Iterator[tuple[str, str]]:
    for name, words in (("restarts", "times resumed"), ("skipped_steps", "steps skipped")):
        if isinstance(value := run.columns.last.get(name), int):
            yield words, f"{value:,}"
    if (saved := float(run.columns.of("save_s")[1].sum())) >= 1:
        yield "waited for saving", duration(saved)


def _data(run: Watched, images: int) -> Iterator[tuple[str, str]]:
    data = settings_of(run.folder).get("data") or {}
    for name, words in (("sources", "training data"), ("val", "validation")):
        yield words, " ".join(map(str, data.get(name) or ())) or "none"
    if images:
        yield "images", f"{images:,}"
    for name, words in (("epoch", "epochs"), ("skipped", "bad samples"), ("truncated", "captions cut")):
        value = run.columns.last.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            yield words, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _settings(unusual: Sequence[Differs], method: Mapping[str, Any]) -> Iterator[str]:
    """What differs from defaults; the method's own settings are shown as they are."""
    rows = [[f"--{flag}", value_of(value), value_of(default)] for flag, value, default in unusual]
    rows = [row for row in rows if row[1] != row[2]]  # "" and () are both none
    yield table(rows, ["differs from its default", "run", "default"]) or "Every setting has its default."
    own = [(name.replace("_", "-"), value_of(value)) for name, value in method.items()]
    yield table(own, ["the method's own setting", "run"])
