"""The loop of all evaluations: it opens each model once, runs it on one data set or on a whole suite, and writes."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from kiloword import evaluation
from kiloword.__version__ import __version__
from kiloword.config import execution as common
from kiloword.config.execution import Flat
from kiloword.errors import sentence_of, suggestion
from kiloword.evaluation.suite import Suite, exists, read_suite
from kiloword.evaluation.task import Inputs, Task
from kiloword.files import SaveError, write_atomic, write_json
from kiloword.generation.options import GenerationOptions
from kiloword.models.trust import NONE, Trust
from kiloword.report import made_by, write_page
from kiloword.report.blocks import Block, Page, Table
from kiloword.terminal import say, warn
from kiloword.terminal.screen import say_table

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.types import Source

MODELS = "MODEL [MODEL ...]"
LONG = 16  # a longer table of metrics stands below the plots of a page
RESERVED = ("models", "data", "version")  # in the JSON beside names of models
ROUNDING = 1e-12  # what is smaller is shown as 0


@dataclass(frozen=True, kw_only=True)
class Execution(common.Execution):
    """How a model is opened and fed: flags of every task."""

    batch: int = 256  # images in a batch
    # precomputed tokens of the images (`kiloword embed --tokens`), for retrieval and zeroshot
    image_features: tuple[str, ...] = ()
    text_features: tuple[str, ...] = ()  # precomputed tokens of the captions, for retrieval
    dim: int | None = None  # evaluate the first N numbers of the embedding, normalised again; default: all
    trust: Flat[Trust] = NONE  # --method is of the first model, and of others where it is the same


@dataclass
class Evaluation:
    """One task on one data set, and what came of it."""

    name: str
    task: Task
    options: Any
    source: str | None  # SRC; None: it is not there
    counts: tuple[str, ...] = ()  # the metrics whose mean counts in a suite; of a single evaluation none
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

    def rows(self, models: Sequence[str]) -> list[list[Any]]:
        """Every metric that is printed, and its value of each model, None where it has none."""
        names = dict.fromkeys(name for metrics in self.results.values() for name in metrics)
        return [[n, *(self.results.get(m, {}).get(n) for m in models)] for n in names if self.task.prints(n)]

    def without_model(self, folder: str) -> Any:
        """Options of `caption` that score a parquet table or a result file, named in place of a model; else None."""
        if self.task.name == "caption" and folder.lower().endswith((".parquet", ".json")):
            return replace(self.options, captions=Path(folder), generate=GenerationOptions())
        return None


class Evaluate:
    """Evaluate models on one data set by a task, print, and write what is asked for, also of models before an error.

    The words of `eval TASK`, whose dataclass `kiloword.cli.evaluate` makes.
    """

    task: Task
    models: tuple[str, ...]  # folders, or what the task takes in place of one (a table of captions)
    data: str
    options: Any  # of the task
    json: Path | None  # file for the metrics, of one model by name, of several `{model: metrics}`
    html: Path | None  # file for the page
    execution: Execution

    def run(self) -> None:
        """Raises: ValueError for models, data and options that do not fit."""
        task, models, data = self.task, self.models, self.data
        if len(models) > 1 and getattr(self.options, "results", None) is not None:
            raise ValueError("--results is one file: give one model at a time.")
        one, names = Evaluation(data, task, self.options, data), labels(models)

        def finish() -> None:
            rows = one.rows(list(one.results))
            _print(rows, list(one.results))
            if self.json is not None:
                several = {"models": dict(zip(names, models, strict=True)), **one.results}
                metrics = several if len(models) > 1 else {"model": models[0], **one.results[names[0]]}
                write_json(self.json, {"data": data, "version": __version__, **metrics})
            if self.html is not None:
                cells = [[name, *(x if x is None else number(x) for x in values)] for name, *values in rows]
                table: dict[str, Sequence[Block]] = {"Metrics": [Table(cells, ["metric", *one.results])]}
                shown = {label: blocks for label, blocks in one.blocks.items() if blocks}
                sections, intro = shown | table if len(cells) > LONG else table | shown, f"{task.about}\n\nData: {data}"
                write_page(self.html, Page(task.name.capitalize(), intro, sections, made_by(models, data)))

        evaluate_all(models, [one], self.execution, finish, page=self.html is not None)


@dataclass(frozen=True, kw_only=True)
class EvaluateSuite:
    """Evaluate on all data sets of a suite in one table: eval suite SUITE MODEL --data ROOT."""

    suite: Annotated[Positional[str], arg(metavar="SUITE")]  # its name, or a TOML file
    models: Annotated[common.Some[str], arg(metavar=MODELS)]  # model folders
    data: Annotated[Path, arg(metavar="ROOT")]  # the folder that holds the data sets
    only: tuple[str, ...] = ()  # names of data sets or groups; default: all
    dry_run: bool = False  # print what would be evaluated, and what --out already has
    out: Path | None = None  # folder for the results; the same command again continues there
    json: Path | None = None  # write all metrics to this file
    csv: Path | None = None  # write the table to this file
    html: Path | None = None  # write a page
    execution: Flat[Execution] = field(default_factory=Execution)

    def run(self) -> None:
        """Evaluate, print, and write what is asked for. Exits with 1 where a data set is missing or failed."""
        suite, names = read_suite(self.suite), labels(self.models)
        every = data_sets(suite, self.data, self.only)
        missing = {one.name: one.places for one in every if one.source is None}
        problems = [f"missing: {name} (looked for as {', '.join(places[:3])})" for name, places in missing.items()]

        def plan() -> None:
            for one in (one for one in every if one.source is not None):
                stored = f" (stored: {', '.join(one.results)})" if one.results else ""
                say(f"{one.name}: {one.task.name} on {one.source}, {one.metric}{stored}")
            say(*problems)

        def finish() -> None:
            problems.extend(f"failed: {one.name} with {m}: {why}" for one in every for m, why in one.errors.items())
            self._write(suite, every, names, problems)

        if self.dry_run and self.out is None:
            plan()
        else:
            done = plan if self.dry_run else finish
            evaluate_all(self.models, every, self.execution, done, self.out, dry_run=self.dry_run)
        if any(one.state != "evaluated" for one in every):
            raise SystemExit(1)

    def _write(self, suite: Suite, every: Sequence[Evaluation], names: Sequence[str], problems: Sequence[str]) -> None:
        means, data = averages(suite, every, names), str(self.data)
        found = [((one.name, one.metric), one.values()) for one in every if one.state == "evaluated"]
        for group, mean in ((group, mean) for group, mean in means.items() if mean["n"]):
            what = f"mean of {mean['of']}" if mean["complete"] else f"{mean['n']} of {mean['of']}, incomplete"
            found.append(((group, what), mean["values"]))
        rows = [[*row, *map(values.get, names)] for row, values in found]
        _print(rows, names)
        say(*problems)
        if self.json is not None:
            made = {"suite": suite.name, "data": data, "models": dict(zip(names, self.models, strict=True))}
            made |= {"version": __version__, "data_sets": {one.name: _recorded(one) for one in every}}
            write_json(self.json, made | {"averages": means})
        if self.csv is not None:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([["data_set", "metric", *names], *rows])
            write_atomic(self.csv, text.getvalue().encode(errors="backslashreplace"))
        if self.html is not None:
            metrics = [[one.name, *row] for one in every for row in one.rows(names)]
            lacking = [line.split(": ", 1) for line in problems]
            sections = {
                "Results": [Table(rows, ["data set", "metric that counts", *names], digits=4)],
                "Missing and failed": [Table(lacking, ["state", "data set"])],
                "All metrics": [Table(metrics, ["data set", "metric", *names], digits=4)],
            }
            intro = f"{suite.source}\n\nData sets below {self.data.resolve()}."
            write_page(self.html, Page(suite.title or suite.name, intro, sections, made_by(self.models, data)))


def _recorded(one: Evaluation) -> dict[str, Any]:
    """A data set in the JSON of a suite, whose keys docs/evaluation.md describes."""
    record: dict[str, Any] = {"state": one.state, "task": one.task.name, "metric": one.counts, "groups": one.groups}
    record |= {"source": one.source, "values": one.values(), "metrics": one.results}
    record |= {"errors": one.errors} if one.errors else {}
    return record | ({"looked_for": one.places} if one.source is None else {})


def data_sets(suite: Suite, root: Path, only: Sequence[str] = ()) -> list[Evaluation]:
    """The data sets of a suite, located below the root and not evaluated yet; without a file that its options name, a
    data set is missing.

    Raises: ValueError for a root that is not there, unknown names in `only`, and where nothing is found.
    """
    every = []
    for entry in suite.selected(only):
        source, places, options = entry.located(root), entry.places(root), dict(entry.options)
        for option, names in entry.files.items():
            wanted = [str(root / name) for name in ([names] if isinstance(names, str) else names)]
            options[option] = next(filter(exists, wanted), "")
            if not options[option]:
                source, places = None, wanted
        counts = (entry.metric,) if isinstance(entry.metric, str) else entry.metric
        chosen, task = replace(entry, options=options).task_options(), evaluation.find(entry.task)
        every.append(Evaluation(entry.name, task, chosen, source, counts, entry.groups, places))
    if not root.is_dir() or all(one.source is None for one in every):
        raise ValueError(
            f"--data {root} has none of the {len(every)} data sets of {suite.name}: {every[0].name}, for example, "
            f"was looked for as {', '.join(every[0].places[:3])}, ... (docs/evaluation.md)."
        )
    return every


def averages(suite: Suite, every: Sequence[Evaluation], models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The mean of each group over the data sets that all models have, in the suite's order, then of all data sets.

    Returns: by group `n` data sets in the mean, `of` in the group, `complete`: n equals of, `values`: means by model.
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
    dry_run: bool = False,
) -> None:
    """Evaluate each model on all data sets that are there; ranks share the work.

    What `out` holds of the same model, data and options is not repeated; with `dry_run` it is all that is read. In a
    suite, a data set that fails does not end the others; with several ranks it does, since they may fail at other
    places. The first rank calls `finish` at the end, and before an error where there are results.
    """
    from kiloword.distributed.device import choose
    from kiloword.distributed.sharing import is_first, share, together
    from kiloword.interop.names import is_foreign
    from kiloword.models.model_folder import model_files, read_model_file
    from kiloword.terminal.progress import showing

    execution = replace(execution, device=choose(execution.device))
    folders, every = dict(zip(labels(models), models, strict=True)), [one for one in every if one.source is not None]
    needing = {label: f for label, f in folders.items() if not all(one.without_model(f) for one in every)}
    label = ""
    with together(execution.device), showing():
        try:
            for label in needing:  # before the first model is evaluated
                if not is_foreign(folders[label]):
                    read_model_file(model_files(folders[label])[0].parent)
            for label, folder in folders.items():
                model = opened(folder, execution) if label in needing else None
                for n, one in enumerate(every, start=1):
                    where, blocks = f"[{n} of {len(every)}] {label}: {one.name}", list[Block]()
                    try:
                        metrics, note = _metrics(one, folder, model, execution, out, blocks if page else None, dry_run)
                        if metrics is None:
                            continue
                        if one.counts and is_first():
                            warn(f"{where} {one.metric} {one.value(metrics):.4f}{note}")
                    except Exception as error:
                        message = sentence_of(error)
                        if message is None or not one.counts or isinstance(error, SaveError) or share()[1] > 1:
                            raise
                        one.errors[label] = message
                        warn(f"{where} failed: {message}")
                    else:
                        one.results[label], one.blocks[label] = metrics, blocks
                trust = execution.trust
                execution = replace(
                    execution, trust=Trust(named=trust.method or trust.named, trust_code=trust.trust_code)
                )
        except Exception as error:
            if is_first() and any(one.results for one in every):
                finish()  # an evaluation may have taken hours
            if isinstance(error, ValueError) and len(models) > 1:
                raise ValueError(f"{label}: {error}") from error
            raise
        if is_first():
            finish()


def _metrics(
    one: Evaluation,
    folder: str,
    model: tuple[Matcher, int] | None,
    execution: Execution,
    out: Path | None,
    blocks: list[Block] | None,
    dry_run: bool,
) -> tuple[dict[str, float] | None, str]:
    """The metrics of one model on one data set, " (stored)" where they were; skipped rows are named on stderr. None:
    they would have to be computed in a dry run."""
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
    if dry_run:
        return None, ""
    tokens = execution.image_features, execution.text_features
    if any(tokens):
        if not one.task.encodes or matcher is None:
            raise ValueError(
                f"the task {one.task.name} reads images and texts: omit --image-features and --text-features, which "
                f"{' and '.join(name for name, task in evaluation.TASKS.items() if task.encodes)} take."
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
    if execution.dim is not None:
        keep_prefix_(matcher.model, execution.dim)
    config = matcher.model.config
    workers = workers_of(execution.workers, device, execution.batch, config.image.size)
    announce(device, matcher.model.precision, reason_of(precision, config), workers)
    return matcher, workers


def labels(models: Sequence[str]) -> list[str]:
    """Short names of model folders: the run's folder where that tells them apart, else the whole path."""
    if len(set(models)) < len(models):
        raise ValueError(f"one model is named twice: {', '.join(models)}")
    short = [(path.parent if path.name == "model" else path).name for path in map(Path, models)]
    return short if len(set(short) - {"", *RESERVED}) == len(short) else list(models)


def _print(rows: Sequence[Sequence[Any]], models: Sequence[str]) -> None:
    """A line a row: names, and the value of each model, "-" where it has none; several models are named above."""
    shown = [[x if isinstance(x, str) else "-" if x is None else number(x) for x in row] for row in rows]
    blank = [""] * (len(rows[0]) - len(models) if rows else 0)
    say_table(shown, *blank, *(models if len(models) > 1 else [""]))


def number(value: float) -> str:
    """A value with four digits after the point, or, where these would hide it, three that count."""
    return f"{value:.4f}" if abs(value) < ROUNDING or abs(value) >= 0.01 else f"{value:.3g}"
