"""The verb `eval suite`: models on all data sets of a suite, in one table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kiloword import evaluation
from kiloword.evaluation.command import Evaluation, Execution, columns, evaluate_all, labels
from kiloword.evaluation.suite import Entry, Output, Suite, exists, read_suite
from kiloword.files import write_atomic, write_json
from kiloword.report import made_by, write_page
from kiloword.report.blocks import Page, Table
from kiloword.terminal import say

NAMED = 3  # places of a missing data set that are printed; the JSON has all


def main(
    name: str,
    models: Sequence[str],
    data: Path,
    only: Sequence[str],
    output: Output,
    execution: Execution,
    dry_run: bool,
) -> None:
    """Evaluate the models, print the table, write what is asked for. Exits with 1 where a data set failed."""
    suite = read_suite(name)
    every = data_sets(suite, data, only)
    if dry_run:
        say(*(f"{one.name}: {one.task.name} on {one.source}, {one.metric}" for one in every if one.source is not None))
        say(*_problems(every))
        return
    folders = dict(zip(labels(models), models, strict=True))

    def finish() -> None:
        means = averages(suite, every, list(folders))
        rows = [((one.name, one.metric), one.values()) for one in every if one.state == "evaluated"]
        rows += [((group, covered(mean)), mean["values"]) for group, mean in means.items() if mean["n"]]
        say(*columns(rows, list(folders)), *_problems(every))
        if output.json is not None:
            write_json(output.json, _json(suite, data, every, means))
        if output.csv is not None:
            write_atomic(output.csv, _csv(every, means, list(folders)))
        if output.html is not None:
            intro = f"{suite.source}\n\nData sets of {data}." if suite.source else f"Data sets of {data}."
            facts = made_by(models, str(data))
            write_page(output.html, Page(suite.title or suite.name, intro, _tables(every, means, list(folders)), facts))

    evaluate_all(models, every, execution, finish, output.out)
    if any(one.errors for one in every):
        raise SystemExit(1)


def data_sets(suite: Suite, root: Path, only: Sequence[str] = ()) -> list[Evaluation]:
    """The data sets of a suite, located below the root and not evaluated yet.

    Raises: ValueError for a root that is not there, unknown names in `only`, and where nothing is found.
    """
    chosen = suite.selected(only)
    if not root.is_dir():
        raise ValueError(
            f"--data {root}: no such folder. Expected the folder that holds the data sets of {suite.name}."
        )
    every = [_located(suite, root, entry) for entry in chosen]
    if all(one.source is None for one in every):
        names = [str(Path(place).relative_to(root)) for place in every[0].places[:3]]
        raise ValueError(
            f"--data {root} has none of the {len(every)} data sets of {suite.name}: {every[0].name}, for example, "
            f"was looked for as {', '.join(names)}, ... (docs/suites.md)."
        )
    return every


def _located(suite: Suite, root: Path, entry: Entry) -> Evaluation:
    """A data set with the files that its options name; without one of them it is missing."""
    source, places, options = entry.located(root, suite.split), entry.places(root, suite.split), dict(entry.options)
    for option, names in entry.files.items():
        wanted = [str(root / name) for name in ([names] if isinstance(names, str) else names)]
        options[option] = next(filter(exists, wanted), "")
        if not options[option]:
            source, places = None, wanted
    task, chosen = evaluation.find(entry.task), replace(entry, options=options).task_options()
    return Evaluation(entry.name, task, chosen, source, entry.metrics, entry.groups, places)


def averages(suite: Suite, every: Sequence[Evaluation], models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The mean of each group over the data sets that all models have, in the order of the suite; the last is that of
    all data sets, whichever were chosen: n data sets in the mean, of so many, whether it is complete, values by model.
    """
    values = {one.name: one.values() for one in every if set(one.results) >= set(models)}
    means = {}
    for group, entries in suite.groups().items():
        found = [values[entry.name] for entry in entries if entry.name in values]
        n, of = len(found), len(entries)
        mean = {model: sum(one[model] for one in found) / n for model in models} if n else {}
        means[group] = {"n": n, "of": of, "complete": n == of, "values": mean}
    return means


def covered(mean: Mapping[str, Any]) -> str:
    """How much of a group a mean covers: "mean of 38", or "3 of 38, incomplete"."""
    return f"mean of {mean['of']}" if mean["complete"] else f"{mean['n']} of {mean['of']}, incomplete"


def _problems(every: Sequence[Evaluation]) -> Iterator[str]:
    """A line per data set that is missing or failed."""
    for one in every:
        if one.state == "missing":
            rest = ", ..." if len(one.places) > NAMED else ""
            yield f"missing: {one.name} (looked for {', '.join(one.places[:NAMED])}{rest})"
        for model, why in one.errors.items():
            yield f"failed: {one.name} with {model}: {why}"


def _json(suite: Suite, root: Path, every: Sequence[Evaluation], means: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics and averages; docs/suites.md describes the keys."""
    sets = {
        one.name: {
            "state": one.state,
            "task": one.task.name,
            "metric": list(one.counts),
            "groups": list(one.groups),
            "source": one.source,
            "values": one.values(),
            "metrics": one.results,
            **({"errors": one.errors} if one.errors else {}),
            **({"looked_for": one.places} if one.source is None else {}),
        }
        for one in every
    }
    return {"suite": suite.name, "data": str(root), "data_sets": sets, "averages": means}


def _csv(every: Sequence[Evaluation], means: Mapping[str, Any], models: Sequence[str]) -> bytes:
    """A row per data set and per average, a column per model."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["data_set", "state", "task", "metric", "groups", *models, "source"])
    for one in every:
        numbers = [one.values().get(model, "") for model in models]
        groups = "; ".join(one.groups)
        writer.writerow([one.name, one.state, one.task.name, one.metric, groups, *numbers, one.source or ""])
    for group, mean in means.items():
        numbers = [mean["values"].get(model, "") for model in models]
        writer.writerow([group, f"{mean['n']} of {mean['of']}", "average", "", "", *numbers, ""])
    return text.getvalue().encode(errors="backslashreplace")


def _tables(every: Sequence[Evaluation], means: Mapping[str, Any], models: Sequence[str]) -> dict[str, list[Table]]:
    """Averages, the metric that counts of every data set, what is missing or failed, all metrics."""
    evaluated = [one for one in every if one.state == "evaluated"]
    mean_rows = [[group, covered(mean), *map(mean["values"].get, models)] for group, mean in means.items()]
    set_rows = [[one.name, one.task.name, one.metric, *map(one.values().get, models)] for one in evaluated]
    all_rows = [[one.name, name, *map(of.get, models)] for one in evaluated for name, of in one.rows().items()]
    problems = [line.split(": ", 1) for line in _problems(every)]
    return {
        "Averages": [Table(mean_rows, ["group", "data sets", *models], digits=4)],
        "Data sets": [Table(set_rows, ["data set", "task", "metric that counts", *models], digits=4)],
        "Missing and failed": [Table(problems, ["state", "data set"])],
        "All metrics": [Table(all_rows, ["data set", "metric", *models], digits=4)],
    }
