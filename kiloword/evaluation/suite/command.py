"""The verb `eval suite`: models on all data sets of a suite, in one table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(kw_only=True)
class DataSet(Evaluation):
    """A data set of a suite, and what came of it."""

    entry: Entry
    places: list[str]  # where it was looked for

    @property
    def state(self) -> str:
        """ "missing", "failed" (for a model or more) or "evaluated"."""
        return "missing" if self.source is None else "failed" if self.errors else "evaluated"

    @property
    def metric(self) -> str:
        """What counts, as it is shown."""
        return " and ".join(self.counts)


@dataclass(frozen=True)
class GroupMean:
    """The mean of a group over the data sets that all models have."""

    group: str
    n: int  # data sets in the mean
    of: int  # data sets in the group
    values: Mapping[str, float]  # model -> mean; empty for n = 0

    @property
    def covers(self) -> str:
        """How much of the group it covers: "mean of 38", or "3 of 38, incomplete"."""
        return f"mean of {self.of}" if self.n == self.of else f"{self.n} of {self.of}, incomplete"


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
        rows += [((mean.group, mean.covers), dict(mean.values)) for mean in means if mean.n]
        say(*columns(rows, list(folders)), *_problems(every))
        if output.json is not None:
            write_json(output.json, _json(suite, data, every, means))
        if output.csv is not None:
            write_atomic(output.csv, _csv(every, means, list(folders)))
        if output.html is not None:
            write_page(output.html, _page(suite, data, every, means, folders))

    evaluate_all(models, every, execution, finish, output.out)
    if any(one.errors for one in every):
        raise SystemExit(1)


def data_sets(suite: Suite, root: Path, only: Sequence[str] = ()) -> list[DataSet]:
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


def _located(suite: Suite, root: Path, entry: Entry) -> DataSet:
    """A data set with the files that its options name; without one of them it is missing."""
    source, places, options = entry.located(root, suite.split), entry.places(root, suite.split), dict(entry.options)
    for option, names in entry.files.items():
        wanted = [str(root / name) for name in ([names] if isinstance(names, str) else names)]
        options[option] = next(filter(exists, wanted), None)
        if options[option] is None:
            return DataSet(
                entry.name, evaluation.find(entry.task), None, None, entry.metrics, entry=entry, places=wanted
            )
    chosen = replace(entry, options=options)
    task, options = evaluation.find(entry.task), chosen.task_options()
    return DataSet(entry.name, task, options, source, entry.metrics, entry=chosen, places=places)


def averages(suite: Suite, every: Sequence[DataSet], models: Sequence[str]) -> list[GroupMean]:
    """The mean of each group, in the order of the suite; the last is that of all data sets, whichever were chosen."""
    values = {one.name: one.values() for one in every if set(one.results) >= set(models)}
    out = []
    for group, entries in suite.groups().items():
        with_values = [values[entry.name] for entry in entries if entry.name in values]
        n = len(with_values)
        means = {model: sum(one[model] for one in with_values) / n for model in models} if n else {}
        out.append(GroupMean(group, n, len(entries), means))
    return out


def _problems(every: Sequence[DataSet]) -> Iterator[str]:
    """A line per data set that is missing or failed."""
    for one in every:
        if one.state == "missing":
            rest = ", ..." if len(one.places) > NAMED else ""
            yield f"missing: {one.name} (looked for {', '.join(one.places[:NAMED])}{rest})"
        for model, why in one.errors.items():
            yield f"failed: {one.name} with {model}: {why}"


def _json(suite: Suite, root: Path, every: Sequence[DataSet], means: Sequence[GroupMean]) -> dict[str, Any]:
    """All metrics and averages; docs/suites.md describes the keys."""
    sets = {
        one.name: {
            "state": one.state,
            "task": one.task.name,
            "metric": list(one.counts),
            "groups": list(one.entry.groups),
            "source": one.source,
            "values": one.values(),
            "metrics": one.results,
            **({"errors": one.errors} if one.errors else {}),
            **({"looked_for": one.places} if one.source is None else {}),
        }
        for one in every
    }
    groups = {m.group: {"n": m.n, "of": m.of, "complete": m.n == m.of, "values": dict(m.values)} for m in means}
    return {"suite": suite.name, "data": str(root), "data_sets": sets, "averages": groups}


def _csv(every: Sequence[DataSet], means: Sequence[GroupMean], models: Sequence[str]) -> bytes:
    """A row per data set and per average, a column per model."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["data_set", "state", "task", "metric", "groups", *models, "source"])
    for one in every:
        numbers = [one.values().get(model, "") for model in models]
        groups = "; ".join(one.entry.groups)
        writer.writerow([one.name, one.state, one.task.name, one.metric, groups, *numbers, one.source or ""])
    for mean in means:
        numbers = [mean.values.get(model, "") for model in models]
        writer.writerow([mean.group, f"{mean.n} of {mean.of}", "average", "", "", *numbers, ""])
    return text.getvalue().encode(errors="backslashreplace")


def _page(
    suite: Suite, root: Path, every: Sequence[DataSet], means: Sequence[GroupMean], folders: Mapping[str, str]
) -> Page:
    """Averages, the metric that counts of every data set, what is missing or failed, all metrics."""
    models, evaluated = list(folders), [one for one in every if one.state == "evaluated"]
    average_rows = [[mean.group, mean.covers, *map(mean.values.get, models)] for mean in means]
    set_rows = [[one.name, one.task.name, one.metric, *map(one.values().get, models)] for one in evaluated]
    metric_rows = [
        [one.name, name, *map(values.get, models)] for one in evaluated for name, values in one.rows().items()
    ]
    problems = [
        *([one.name, "missing", "looked for " + ", ".join(one.places)] for one in every if one.source is None),
        *([one.name, "failed", f"{model}: {why}"] for one in every for model, why in one.errors.items()),
    ]
    sections = {
        "Averages": [Table(average_rows, ["group", "data sets", *models], digits=4)],
        "Data sets": [Table(set_rows, ["data set", "task", "metric that counts", *models], digits=4)],
        "Missing and failed": [Table(problems, ["data set", "state", "reason"])],
        "All metrics": [Table(metric_rows, ["data set", "metric", *models], digits=4)],
    }
    states = [one.state for one in every]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("evaluated", "missing", "failed"))
    intro = [suite.source, f"Data sets of {root}: {counts}."]
    facts = made_by(list(folders.values()), str(root))
    return Page(suite.title or suite.name, "\n\n".join(filter(None, intro)), sections, facts)
