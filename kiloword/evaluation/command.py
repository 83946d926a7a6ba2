"""The loop of all evaluations, which opens each model once and runs it on one data set or on those of a suite; what it
prints and writes."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiloword import evaluation
from kiloword.__version__ import __version__
from kiloword.config import execution as common
from kiloword.config.execution import Flat
from kiloword.errors import sentence_of, suggestion
from kiloword.evaluation.suite import Entry, Suite, exists, read_suite
from kiloword.evaluation.task import TOKEN_TASKS, Inputs, Task
from kiloword.files import SaveError, write_atomic, write_json
from kiloword.models.trust import NONE, Trust
from kiloword.report import made_by, write_page
from kiloword.report.blocks import Block, Page, Table
from kiloword.terminal import say, warn

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.types import Source


@dataclass(frozen=True, kw_only=True)
class Execution(common.Execution):
    """How a model is opened and fed: flags of every task."""

    batch: int = 256  # images in a batch
    image_features: tuple[str, ...] = ()  # tokens of the images (`kiloword embed --tokens`): retrieval, zeroshot
    text_features: tuple[str, ...] = ()  # tokens of the captions: retrieval
    dim: int | None = None  # evaluate the first N numbers of the embedding, normalised again; default: all
    trust: Flat[Trust] = NONE  # --method is of the first model, and of others where it is the same


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the results of a suite are written."""

    out: Path | None = None  # folder of finished data sets: the same command again continues there
    json: Path | None = None  # write all metrics to this file
    csv: Path | None = None  # write the table to this file
    html: Path | None = None  # write a page


@dataclass
class Evaluation:
    """One task on one data set, and what came of it."""

    name: str
    task: Task
    options: Any
    source: str | None  # SRC; None: it is not there
    counts: tuple[str, ...] = ()  # the metrics whose mean counts in a suite
    groups: tuple[str, ...] = ()  # of the suite
    places: Sequence[str] = ()  # where a suite looks for it
    results: dict[str, dict[str, float]] = field(default_factory=dict)  # model -> metrics
    blocks: dict[str, list[Block]] = field(default_factory=dict)  # model -> blocks of its page
    errors: dict[str, str] = field(default_factory=dict)  # model -> why it has no metrics

    @property
    def metric(self) -> str:
        """What counts, as it is shown."""
        return " and ".join(self.counts)

    @property
    def state(self) -> str:
        """ "missing", "failed" (for a model or more) or "evaluated"."""
        return "missing" if self.source is None else "failed" if self.errors else "evaluated"

    def value(self, metrics: Mapping[str, float]) -> float:
        """The value that counts. Raises: ValueError for a metric that the task did not yield."""
        for name in self.counts:
            if name not in metrics:
                reported, hint = ", ".join(list(metrics)[:12]), suggestion(name, metrics)
                raise ValueError(f"the task {self.task.name} yields no {name} on {self.name}, only {reported}.{hint}")
        return sum(metrics[name] for name in self.counts) / len(self.counts)

    def values(self) -> dict[str, float]:
        """Model -> the value that counts."""
        return {model: self.value(metrics) for model, metrics in self.results.items()}

    def rows(self) -> dict[str, dict[str, float]]:
        """Every metric that is printed, by model."""
        names = filter(self.task.prints, dict.fromkeys(name for metrics in self.results.values() for name in metrics))
        return {n: {model: values[n] for model, values in self.results.items() if n in values} for n in names}

    def without_model(self, folder: str) -> Any:
        """Options of a task that takes what is named in place of a model, else None."""
        return None if self.task.without_model is None else self.task.without_model(folder, self.options)


def main(
    task: Task,
    models: Sequence[str],
    data: str,
    options: Any,
    execution: Execution,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Evaluate models on one data set, print, and write what is asked for, also of the models before an error.

    Args: models: their folders, or what the task takes in place of one (a table of captions); options of the task;
    json: file for the metrics, of one model by name, of several `{model: metrics}`; html: file for the page.
    """
    if len(models) > 1 and getattr(options, "results", None) is not None:
        raise ValueError("--results is one file: give one model at a time.")
    one = Evaluation(data, task, options, data)

    def finish() -> None:
        rows, labelled = one.rows(), list(one.results)
        say(*columns([((name,), values) for name, values in rows.items()], labelled))
        if json is not None:
            write_json(json, one.results if len(models) > 1 else one.results[labelled[0]])
        if html is not None:
            cells = [[n, *(number(of[model]) if model in of else None for model in labelled)] for n, of in rows.items()]
            metrics: dict[str, Sequence[Block]] = {"Metrics": [Table(cells, ["metric", *labelled])]}
            shown = {label: blocks for label, blocks in one.blocks.items() if blocks}
            sections = shown | metrics if len(cells) > LONG else metrics | shown
            intro = f"{evaluation.TASKS[task.name]}\n\nData: {data}"
            write_page(html, Page(task.name.capitalize(), intro, sections, made_by(models, data)))

    evaluate_all(models, [one], execution, finish, page=html is not None)


def run_suite(
    name: str,
    models: Sequence[str],
    data: Path,
    only: Sequence[str],
    output: Output,
    execution: Execution,
    dry_run: bool,
) -> None:
    """Evaluate models on the data sets of a suite, print the table, write what is asked for.

    Exits with 1 where a data set failed.
    """
    suite = read_suite(name)
    every, labelled = data_sets(suite, data, only), labels(models)
    problems = [
        f"missing: {one.name} (looked for {', '.join(one.places[:3])}{', ...' if len(one.places) > 3 else ''})"
        for one in every
        if one.source is None
    ]
    if dry_run:
        say(*(f"{one.name}: {one.task.name} on {one.source}, {one.metric}" for one in every if one.source is not None))
        say(*problems)
        return

    def finish() -> None:
        means = averages(suite, every, labelled)
        rows = [((one.name, one.metric), one.values()) for one in every if one.state == "evaluated"]
        rows += [
            (
                (group, f"mean of {mean['of']}" if mean["complete"] else f"{mean['n']} of {mean['of']}, incomplete"),
                mean["values"],
            )
            for group, mean in means.items()
            if mean["n"]
        ]
        failed = [f"failed: {one.name} with {model}: {why}" for one in every for model, why in one.errors.items()]
        say(*columns(rows, labelled), *problems, *failed)
        table = [[*names, *map(values.get, labelled)] for names, values in rows]
        if output.json is not None:
            sets = {  # docs/suites.md describes the keys
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
            write_json(output.json, {"suite": suite.name, "data": str(data), "data_sets": sets, "averages": means})
        if output.csv is not None:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([["data_set", "metric", *labelled], *table])
            write_atomic(output.csv, text.getvalue().encode(errors="backslashreplace"))
        if output.html is not None:
            every_metric = [
                [one.name, metric, *map(values.get, labelled)] for one in every for metric, values in one.rows().items()
            ]
            sections = {
                "Results": [Table(table, ["data set", "metric that counts", *labelled], digits=4)],
                "Missing and failed": [
                    Table([line.split(": ", 1) for line in problems + failed], ["state", "data set"])
                ],
                "All metrics": [Table(every_metric, ["data set", "metric", *labelled], digits=4)],
            }
            intro = f"{suite.source}\n\nData sets of {data}."
            write_page(output.html, Page(suite.title or suite.name, intro, sections, made_by(models, str(data))))

    evaluate_all(models, every, execution, finish, output.out)
    if any(one.errors for one in every):
        raise SystemExit(1)


def data_sets(suite: Suite, root: Path, only: Sequence[str] = ()) -> list[Evaluation]:
    """The data sets of a suite, located below the root and not evaluated yet.

    Raises: ValueError for a root that is not there, unknown names in `only`, and where nothing is found.
    """
    every = [_located(root, entry) for entry in suite.selected(only)]
    if not root.is_dir() or all(one.source is None for one in every):
        raise ValueError(
            f"--data {root} has none of the {len(every)} data sets of {suite.name}: {every[0].name}, for example, "
            f"was looked for as {', '.join(every[0].places[:3])}, ... (docs/suites.md)."
        )
    return every


def _located(root: Path, entry: Entry) -> Evaluation:
    """A data set with the files that its options name; without one of them it is missing."""
    source, places, options = entry.located(root), entry.places(root), dict(entry.options)
    for option, names in entry.files.items():
        wanted = [str(root / name) for name in ([names] if isinstance(names, str) else names)]
        options[option] = next(filter(exists, wanted), "")
        if not options[option]:
            source, places = None, wanted
    counts = (entry.metric,) if isinstance(entry.metric, str) else entry.metric
    chosen = replace(entry, options=options).task_options()
    return Evaluation(entry.name, evaluation.find(entry.task), chosen, source, counts, entry.groups, places)


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


def evaluate_all(
    models: Sequence[str],
    every: Sequence[Evaluation],
    execution: Execution,
    finish: Callable[[], None],
    out: Path | None = None,
    page: bool = False,
) -> None:
    """Evaluate each model on all data sets that are there; ranks share the work.

    What `out` holds of the same model, data and options is not repeated. In a suite, a data set that fails does not end
    the others; with several ranks it does, since they may fail at other places. The first rank calls `finish` at the
    end, and before an error where there are results.
    """
    from kiloword.distributed.device import choose
    from kiloword.distributed.sharing import is_first, together
    from kiloword.interop.names import is_foreign
    from kiloword.models.model_folder import model_files, read_model_file
    from kiloword.terminal.progress import showing

    execution, trust = replace(execution, device=choose(execution.device)), execution.trust
    folders, every = dict(zip(labels(models), models, strict=True)), [one for one in every if one.source is not None]
    label = ""
    with together(execution.device), showing():
        try:
            for label in folders:  # before the first model is evaluated
                folder = folders[label]
                if not is_foreign(folder) and not all(one.without_model(folder) for one in every):
                    read_model_file(model_files(folder)[0].parent)
            for label, folder in folders.items():
                _evaluate_model(label, folder, every, replace(execution, trust=trust), out, page)
                trust = Trust(named=trust.method or trust.named, trust_code=trust.trust_code)
        except Exception as error:
            if is_first() and any(one.results for one in every):
                finish()  # an evaluation may have taken hours
            if isinstance(error, ValueError) and len(models) > 1:
                raise ValueError(f"{label}: {error}") from error
            raise
        if is_first():
            finish()


def _evaluate_model(
    label: str, folder: str, every: Sequence[Evaluation], execution: Execution, out: Path | None, page: bool
) -> None:
    from kiloword.distributed.sharing import is_first, share

    model = None if all(one.without_model(folder) for one in every) else opened(folder, execution)
    for n, one in enumerate(every, start=1):
        where, blocks = f"[{n} of {len(every)}] {label}: {one.name}", list[Block]()
        try:
            metrics, note = _metrics(one, folder, model, execution, out, blocks if page else None)
            if one.counts and is_first():
                warn(f"{where} {one.metric} {one.value(metrics):.4f}{note}")
        except Exception as error:
            message = sentence_of(error)
            if message is None or not one.counts or isinstance(error, SaveError) or share()[1] > 1:
                raise
            one.errors[label] = message
            warn(f"{where} failed: {message}")
            continue
        one.results[label], one.blocks[label] = metrics, blocks


def _metrics(
    one: Evaluation,
    folder: str,
    model: tuple[Matcher, int] | None,
    execution: Execution,
    out: Path | None,
    blocks: list[Block] | None,
) -> tuple[dict[str, float], str]:
    """The metrics of one model on one data set, " (stored)" where they were; skipped rows are named on stderr."""
    from kiloword.api import Matcher
    from kiloword.data.open import open_source
    from kiloword.data.reading import left_out
    from kiloword.distributed.sharing import is_first
    from kiloword.stores.runs import reading_tokens

    options = one.without_model(folder)
    matcher, workers = (None, 0) if options is not None or model is None else model
    size = None if matcher is None else matcher.model.config.image.size
    source, options = open_source(str(one.source), size=size), options or one.options
    path = None
    if out is not None:
        path = out / f"{one.name}-{_key(one.task, options, source, folder, matcher, execution)}.json"
        if path.is_file():
            stored: dict[str, float] = json.loads(path.read_bytes())["metrics"]
            return stored, " (stored)"
    tokens = execution.image_features, execution.text_features
    if any(tokens):
        if one.task.name not in TOKEN_TASKS or matcher is None:
            raise ValueError(
                f"the task {one.task.name} reads images and texts: omit --image-features and --text-features, which "
                f"{' and '.join(TOKEN_TASKS)} take."
            )
        source, tokenizer = reading_tokens(matcher.model, matcher.tokenizer, source, *tokens)
        matcher = Matcher(matcher.model, tokenizer, matcher.method)
    inputs = Inputs(matcher, source, execution.batch, workers, page=blocks is not None)
    metrics = evaluation.run(one.task, inputs, options, blocks)
    warn(*(f"{one.name}: {line}" if one.counts else line for line in left_out(inputs.skipped).lines()))
    if path is not None and is_first():
        write_json(path, {"data set": one.name, "source": one.source, "task": one.task.name, "metrics": metrics})
    return metrics, ""


def _key(task: Task, options: Any, source: Source, folder: str, matcher: Matcher | None, execution: Execution) -> str:
    """What metrics depend on: model, precision, data, class names and templates, task, options and files they name."""
    from kiloword.data.joins import sampled
    from kiloword.data.query import split_query
    from kiloword.interop.names import local_folder
    from kiloword.models.model_folder import model_files
    from kiloword.stores.teachers import digest

    plain = asdict(options)
    texts = [text for value in plain.values() for text in (value if isinstance(value, tuple | list) else [value])]
    named = [Path(split_query(text)[0]).expanduser() for text in texts if isinstance(text, str) and len(text) < 4096]
    files = [f for path in named for f in (sorted(path.glob("*.json*")) if path.is_dir() else [path]) if f.is_file()]
    model = [Path(folder)] if matcher is None else model_files(local_folder(folder))
    run = asdict(replace(execution, device="", batch=0, workers=0)), matcher and str(matcher.model.precision)
    words = [getattr(source, name, None) for name in ("classnames", "templates")]
    parts = [__version__, digest(model), run, source.fingerprint, sampled(source), words, task.name, plain]
    parts += [digest([file], file.name) for file in files]
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=12).hexdigest()


def opened(folder: str, execution: Execution) -> tuple[Matcher, int]:
    """A model, and the number of workers that read for it."""
    from kiloword.api import Matcher
    from kiloword.distributed.by_device import announce, reason_of, workers_of
    from kiloword.interop.names import local_folder
    from kiloword.model.prefix import keep_prefix_
    from kiloword.models.model_folder import open_model

    device, precision = execution.device, execution.precision
    matcher = Matcher(*open_model(local_folder(folder), device, trust=execution.trust, precision=precision))
    if execution.dim is not None and (note := keep_prefix_(matcher.model, execution.dim)):
        warn(f"note: {note}")
    config = matcher.model.config
    workers = workers_of(execution.workers, device, execution.batch, config.image.size)
    announce(device, matcher.model.precision, reason_of(precision, config), workers)
    return matcher, workers


def labels(models: Sequence[str]) -> list[str]:
    """Short names of model folders: the run's folder where that tells them apart, else the whole path."""
    if len(set(models)) < len(models):
        raise ValueError(f"one model is named twice: {', '.join(models)}")
    short = [(path.parent if path.name == "model" else path).name for path in map(Path, models)]
    return short if len(set(short)) == len(short) and all(short) else list(models)


def columns(rows: Sequence[tuple[Sequence[str], Mapping[str, float]]], models: Sequence[str]) -> Iterator[str]:
    """A line a row: its names, and a column of values a model, "-" where it has none."""
    widths = [max(map(len, names)) for names in zip(*(names for names, _ in rows), strict=True)]
    width = max(10, *map(len, models))
    if len(models) > 1:
        yield " ".join(["", *(" " * n for n in widths), *(f"{model:>{width}}" for model in models)])[1:]
    for names, values in rows:
        shown = [f"{number(values[model]) if model in values else '-':>{width}}" for model in models]
        yield " ".join([*(f"{name:{n}}" for name, n in zip(names, widths, strict=True)), *shown])


LONG = 16  # a longer table of metrics stands below the plots of a page
ROUNDING = 1e-12  # what is smaller is shown as 0


def number(value: float) -> str:
    """A value with four digits after the point, or, where these would hide it, three that count."""
    return f"{value:.4f}" if abs(value) < ROUNDING or abs(value) >= 0.01 else f"{value:.3g}"
