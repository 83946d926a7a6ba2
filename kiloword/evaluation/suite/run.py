"""Evaluate models on the data sets of a suite. Each finished data set is a file, so that a killed run continues."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from kiloword import evaluation
from kiloword.__version__ import __version__
from kiloword.api import Matcher
from kiloword.data.joins import sampled
from kiloword.data.open import open_source
from kiloword.data.query import split_query
from kiloword.data.reading import left_out
from kiloword.distributed.sharing import is_first, share
from kiloword.errors import sentence_of
from kiloword.evaluation.suite import Entry
from kiloword.evaluation.suite.outcomes import Outcome
from kiloword.evaluation.task import Inputs
from kiloword.files import SaveError, write_json
from kiloword.models.model_folder import model_files
from kiloword.stores.teachers import digest
from kiloword.terminal import warn
from kiloword.types import Source


def evaluate_all(
    label: str, folder: str, matcher: Matcher, workers: int, batch: int, every: Iterable[Outcome], out: Path | None
) -> None:
    """Evaluate one model on all data sets that were found; what `out` holds of the same model and data is not repeated.

    A data set that fails does not end the others; with several ranks it does, since they may fail at other places.
    """
    model = digest(model_files(folder))
    located = [one for one in every if one.source is not None]
    for n, one in enumerate(located, start=1):
        entry = one.entry
        try:
            metrics, stored = _metrics(entry, str(one.source), matcher, model, workers, batch, out)
            if is_first():
                value = entry.value(metrics)
        except Exception as error:
            message = sentence_of(error)
            if message is None or isinstance(error, SaveError) or share()[1] > 1:
                raise
            one.errors[label] = message
            warn(f"[{n} of {len(located)}] {label}: {entry.name} failed: {message}")
            continue
        if is_first():
            one.results[label] = metrics
            note = " (stored)" if stored else ""
            warn(f"[{n} of {len(located)}] {label}: {entry.name} {' and '.join(entry.metrics)} {value:.4f}{note}")


def _metrics(
    entry: Entry, src: str, matcher: Matcher, model: str, workers: int, batch: int, out: Path | None
) -> tuple[dict[str, float], bool]:
    """The metrics of one data set, and whether they were stored before."""
    options = entry.task_options()
    source = open_source(src, size=matcher.model.config.image.size)
    path = None
    if out is not None:
        path = out / f"{entry.name}-{_key(entry, options, source, model, str(matcher.model.precision))}.json"
        if (stored := _stored(path)) is not None:
            return stored, True
    inputs = Inputs(matcher, source, batch, workers)
    metrics = evaluation.run(evaluation.find(entry.task), inputs, options)
    warn(*(f"{entry.name}: {line}" for line in left_out(inputs.skipped).lines()))
    if path is not None and is_first():
        write_json(path, {"data set": entry.name, "source": src, "task": entry.task, "metrics": metrics})
    return metrics, False


def _key(entry: Entry, options: Any, source: Source, model: str, precision: str) -> str:
    """What the metrics depend on: model, precision, data, class names and templates, task, options."""
    words = [getattr(source, name, None) for name in ("classnames", "templates")]
    plain = asdict(options) if is_dataclass(options) and not isinstance(options, type) else options
    read = [digest([file], file.name) for text in _texts(plain) if len(text) < 4096 for file in _files(text)]
    data = [source.fingerprint, sampled(source)]
    parts = [__version__, model, precision, data, words, entry.task, plain, read]
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=12).hexdigest()


def _files(named: str) -> list[Path]:
    """The file that an option names, with parameters or without, or the json of a folder."""
    path = Path(split_query(named)[0]).expanduser()
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl") and file.is_file())
    return [path] if path.is_file() else []


def _texts(value: Any) -> Iterator[str]:
    """All strings inside plain data: an option may name a file, whose contents count."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)


def _stored(path: Path) -> dict[str, float] | None:
    """Metrics of a file of `out`; None where there is none that can be read."""
    try:
        metrics = json.loads(path.read_bytes())["metrics"]
        return {str(name): float(value) for name, value in metrics.items()} or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
