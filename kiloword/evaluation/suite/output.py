"""The results of a suite as lines, JSON, CSV and a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kiloword import evaluation
from kiloword.evaluation.command import number
from kiloword.evaluation.suite import Suite
from kiloword.evaluation.suite.outcomes import GroupMean, Outcome
from kiloword.report import page, section, table
from kiloword.report.page import Section

NAMED = 3  # places of a missing data set that are printed; the JSON has all


def lines(every: Sequence[Outcome], means: Sequence[GroupMean], models: Sequence[str]) -> Iterator[str]:
    """A line per data set with a column per model, then the averages, then what is missing or failed."""
    rows = [
        (one.entry.name, " and ".join(one.entry.metrics), one.values()) for one in every if one.state == "evaluated"
    ]
    rows += [(average.group, counted(average), dict(average.values)) for average in means if average.n]
    first, second = (max((len(row[i]) for row in rows), default=0) for i in range(2))
    width = max(10, *map(len, models))
    if len(models) > 1:
        yield " ".join([" " * (first + second + 1), *(f"{model:>{width}s}" for model in models)])
    for name, metric, values in rows:
        shown = (f"{number(values[model]):>{width}s}" for model in models)
        yield " ".join([f"{name:{first}s}", f"{metric:{second}s}", *shown])
    yield from problems(every)


def problems(every: Sequence[Outcome]) -> Iterator[str]:
    """A line per data set that is missing or failed."""
    for one in every:
        if one.state == "missing":
            rest = ", ..." if len(one.places) > NAMED else ""
            yield f"missing: {one.entry.name} (looked for {', '.join(one.places[:NAMED])}{rest})"
        for model, why in one.errors.items():
            yield f"failed: {one.entry.name} with {model}: {why}"


def counted(average: GroupMean) -> str:
    """How much of a group a mean covers: "mean of 38", or "3 of 38, incomplete"."""
    return f"mean of {average.of}" if average.complete else f"{average.n} of {average.of}, incomplete"


def as_json(suite: Suite, root: Path, every: Sequence[Outcome], means: Sequence[GroupMean]) -> dict[str, Any]:
    """All metrics and averages; docs/suites.md describes the keys."""
    data_sets = {
        one.entry.name: {
            "state": one.state,
            "task": one.entry.task,
            "metric": list(one.entry.metrics),
            "groups": list(one.entry.groups),
            "source": one.source,
            "values": one.values(),
            "metrics": one.results,
            **({"errors": one.errors} if one.errors else {}),
            **({"looked_for": one.places} if one.source is None else {}),
        }
        for one in every
    }
    groups = {m.group: {"n": m.n, "of": m.of, "complete": m.complete, "values": dict(m.values)} for m in means}
    return {"suite": suite.name, "data": str(root), "data_sets": data_sets, "averages": groups}


def as_csv(every: Sequence[Outcome], means: Sequence[GroupMean], models: Sequence[str]) -> bytes:
    """A row per data set and per average, a column per model."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["data_set", "state", "task", "metric", "groups", *models, "source"])
    for one in every:
        values, metric = one.values(), " and ".join(one.entry.metrics)
        numbers = [values.get(model, "") for model in models]
        row = [
            one.entry.name,
            one.state,
            one.entry.task,
            metric,
            "; ".join(one.entry.groups),
            *numbers,
            one.source or "",
        ]
        writer.writerow(row)
    for average in means:
        numbers = [average.values.get(model, "") for model in models]
        writer.writerow([average.group, f"{average.n} of {average.of}", "average", "", "", *numbers, ""])
    return text.getvalue().encode(errors="backslashreplace")


def report(
    suite: Suite, root: Path, every: Sequence[Outcome], means: Sequence[GroupMean], models: Sequence[str]
) -> str:
    """The page: averages, the metric that counts of every data set, what is missing or failed, all metrics."""
    states = [one.state for one in every]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("evaluated", "missing", "failed"))
    evaluated = [one for one in every if one.state == "evaluated"]
    sections: list[Section] = [
        section("Averages", table([_mean_row(m, models) for m in means], ["group", "data sets", *models], digits=4)),
        section(
            "Data sets",
            table(
                [
                    [one.entry.name, one.entry.task, " and ".join(one.entry.metrics), *map(one.values().get, models)]
                    for one in evaluated
                ],
                ["data set", "task", "metric that counts", *models],
                digits=4,
            ),
        ),
        section("Missing and failed", table(_problem_rows(every), ["data set", "state", "reason"])),
        section("All metrics", table(_metric_rows(evaluated, models), ["data set", "metric", *models], digits=4)),
    ]
    intro = f"{suite.source}\n\nData sets of {root}: {counts}." if suite.source else f"Data sets of {root}: {counts}."
    return page(suite.title or suite.name, intro, sections)


def _mean_row(average: GroupMean, models: Sequence[str]) -> list[object]:
    return [average.group, counted(average), *map(average.values.get, models)]


def _problem_rows(every: Sequence[Outcome]) -> Iterator[list[object]]:
    for one in every:
        if one.state == "missing":
            yield [one.entry.name, "missing", "looked for " + ", ".join(one.places)]
        for model, why in one.errors.items():
            yield [one.entry.name, "failed", f"{model}: {why}"]


def _metric_rows(evaluated: Sequence[Outcome], models: Sequence[str]) -> Iterator[list[object]]:
    for one in evaluated:
        task = evaluation.find(one.entry.task)
        for name in dict.fromkeys(name for metrics in one.results.values() for name in metrics if task.prints(name)):
            yield [one.entry.name, name, *(one.results[model].get(name) for model in models)]
