"""The page of one run: its curves, speed, data, evaluations, samples, settings, and the processes that made it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kiloword import report
from kiloword.config.options import RunOptions
from kiloword.report import Html, duration, grid, headline, section, table
from kiloword.terminal.progress import per_second
from kiloword.watch import curves, history
from kiloword.watch.groups import value_of
from kiloword.watch.plot import short
from kiloword.watch.runs import Watched, settings_of

Differs = tuple[str, Any, Any]
"""A flag, its value in the run, and its default."""


def page(run: Watched, unusual: Sequence[Differs], samples: Html, method: Mapping[str, Any]) -> str:
    """The whole document. Args: unusual: settings that differ from defaults; method: the method's own settings."""
    processes = history.processes(run.folder)
    last = processes[-1] if processes else history.Process()
    html = report.page(
        f"Run {run.name}",
        _intro(run),
        [
            section("In short", headline(_figures(run))),
            section("Loss", grid(_plots(run, curves.losses([run])))),
            section("Evaluations", *_evaluations(run)),
            section("Throughput", *_throughput(run)),
            section("Optimization", grid(_plots(run, curves.OPTIMIZATION))),
            section("Data", *_data(run, processes)),
            section("Samples", *_samples(samples)),
            section("Alerts", *_alerts(run)),
            section("Settings", *_settings(unusual, method, last)),
            section("Processes", *_processes(processes)),
        ],
    )
    facts = {"Command": last.command, "Version": _version(last), "Date": history.date(_newest(run) or last.time)}
    return report.signed(html, facts)


def _version(process: history.Process) -> str:
    return f"kiloword {process.version}, torch {process.torch}" if process.version else ""


def _newest(run: Watched) -> float:
    times = run.columns.of("time")[1]
    return float(times[-1]) if len(times) else 0.0


def _intro(run: Watched) -> str:
    config, (state, details) = run.config, run.state()
    of = f" of {config.steps:,}" if config.steps else ""
    ended = {"finished": "It is finished", "failed": "It ended with an error"}.get(state, "It is not finished")
    early = f" ({details})" if state == "finished" and details else ""
    why = f": {run.error}" if run.error else ""
    return (
        f"A {config.method} model of size {config.size}, batch {config.batch:,}, trained for {run.step:,}{of} steps. "
        f"{ended}{early}{why}."
    )


def _figures(run: Watched) -> Iterator[tuple[str, str]]:
    """The key figures: (value, what it is)."""
    last, seconds = run.columns.last, run.seconds
    if isinstance(last.get("loss"), int | float):
        yield short(float(last["loss"])), "loss of the last row"
    for name in curves.main_evaluations([run])[:3]:
        yield f"{float(last[name]):.3f}", f"{name.removeprefix('val/').replace('_', ' ')}, last"
    yield f"{run.step * run.config.batch:,}", "images seen"
    if seconds:
        yield per_second(run.step * run.config.batch / seconds), "pairs per second on average"
        yield duration(seconds), "in the loop, without validation"


def _plots(run: Watched, names: Sequence[str]) -> list[Html]:
    """A plot for each metric that changes."""
    made = []
    for name in names:
        points = curves.points_of([run], name)
        if len({y for _, y in points}) > 1 or (points and (name == "loss" or name.startswith("val/"))):
            made.append(curves.plot(name, [curves.Curve(name, points)]))
    return made


def _evaluations(run: Watched) -> Iterator[str]:
    """Plots of the main metrics, the best state where one was kept, and a table of all metrics."""
    names = curves.evaluations([run])
    if not names:
        return
    main = [name for name in curves.main_evaluations([run]) if len(run.columns.of(name)[0]) > 1]
    yield grid(_plots(run, main))
    if run.best:
        yield f"Best {run.best[0].removeprefix('val/')}: {run.best[1]:.4g} after step {run.best[2]:,}, kept as best/."
    rows = []
    for name in names:
        steps, values = run.columns.of(name)
        shown = (f"{float(v):.4g}" for v in (values[0], values.min(), values.max(), values[-1]))
        rows.append([name.removeprefix("val/"), *shown, str(len(steps))])
    if all(row[-1] == "1" for row in rows):
        yield table([row[:2] for row in rows], ["metric", "the only value"])
    else:
        yield table(rows, ["metric", "first", "least", "largest", "last", "n"])


def _throughput(run: Watched) -> Iterator[str]:
    yield grid(_plots(run, curves.SPEED))
    last = run.columns.last
    words = {"restarts": "times resumed", "skipped_steps": "steps skipped"}
    rows = [[words[name], f"{last[name]:,}"] for name in words if isinstance(last.get(name), int)]
    saved = float(run.columns.of("save_s")[1].sum()) if "save_s" in run.columns else 0.0
    rows += [["waited for saving", duration(saved)]] if saved >= 1 else []
    yield table(rows, ["count", "value"])


def _data(run: Watched, processes: Sequence[history.Process]) -> Iterator[str]:
    config, last = settings_of(run.folder), run.columns.last
    data = config.get("data") or {}
    images = processes[-1].images if processes else 0
    rows: list[list[Any]] = [["training data", _listed(data.get("sources"))], ["validation", _listed(data.get("val"))]]
    rows += [["images", f"{images:,}"]] if images else []
    for name, words in (("epoch", "epochs"), ("skipped", "bad samples"), ("truncated", "captions cut")):
        value = last.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            rows.append([words, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"])
    yield table(rows, ["", "in this run"])


def _listed(values: Any) -> str:
    """Names of data sets."""
    values = [values] if isinstance(values, str) else values
    return " ".join(str(v if isinstance(v, str) else "=".join(map(str, v))) for v in values or ()) or "none"


def _samples(samples: Html) -> Iterator[str]:
    if samples:
        yield "The first examples of the run as training sees them: augmented, with the captions that were chosen."
        yield samples


def _alerts(run: Watched) -> Iterator[str]:
    if run.alerts.all:
        yield report.bullets(
            f"{a.name}, from step {a.since:,} {f'to {a.until:,}' if a.until is not None else 'to the end'}: {a.message}"
            for a in run.alerts.all
        )


def _settings(unusual: Sequence[Differs], method: Mapping[str, Any], last: history.Process) -> Iterator[str]:
    """What differs from defaults; the method's own settings are shown as they are."""
    usual = {name.replace("_", "-"): value for name, value in asdict(RunOptions()).items()}
    options = [(flag, value, usual.get(flag)) for flag, value in last.options.items()]
    rows = [[f"--{flag}", value_of(value), value_of(default)] for flag, value, default in (*unusual, *options)]
    rows = [row for row in rows if row[1] != row[2]]  # "" and () are both none
    yield table(rows, ["differs from its default", "run", "default"]) or "Every setting has its default."
    rows = [[name.replace("_", "-"), value_of(value)] for name, value in method.items()]
    yield table(rows, ["the method's own setting", "run"])


def _processes(processes: Sequence[history.Process]) -> Iterator[str]:
    rows = [
        [f"{p.step:,}", history.date(p.time), _version(p), f"{p.device}" + (f" x {p.ranks}" if p.ranks > 1 else "")]
        for p in processes
    ]
    yield table(rows, ["from step", "began", "version", "device"])
    for command in dict.fromkeys(p.command for p in processes if p.command):
        yield report.code(command)
