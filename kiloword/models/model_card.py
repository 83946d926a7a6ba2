"""The model card: README.md of a model, from the records of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kiloword.addresses import scrubbed
from kiloword.config.recipes import ModelFile
from kiloword.files import write_atomic, write_json
from kiloword.models import card as cards
from kiloword.models.card import line
from kiloword.models.model_folder import read_model_file

CARD = cards.NAME
FIGURES = 40  # rows of the table, at most
LARGEST = 1 << 24  # bytes of a record


def card(
    file: ModelFile, folder: Path, load: Sequence[str] | None = None, notes: Sequence[str] = (), target: str = ""
) -> str:
    """As `card.text`, with the figures of the run. Args: folder: of the model."""
    return cards.text(file, load, notes, target, _figures(folder))


def _figures(folder: Path) -> str:
    """A table of the last validation of the run, and of the evaluations in its folder; of no other folder's files."""
    run = _run_of(folder)
    if run is None:
        return cards.NO_FIGURES
    step, metrics = _validation(run / "metrics.jsonl")
    sets = _sets(run / "history.jsonl")
    entries = [(*_of_set(name, sets, step), value) for name, value in metrics.items()]
    for path in sorted(run.glob("*.json")):
        entries += [(label, name, value) for label, name, value in _metrics(path)]
    if not entries:
        return cards.NO_FIGURES
    rows = [f"| {line(what)} | {line(name)} | {value:.4f} |" for what, name, value in entries[:FIGURES]]
    return "\n".join(["| evaluation | metric | value |", "|---|---|---|", *rows])


def _run_of(folder: Path) -> Path | None:
    """OUT of a model folder OUT/model, where OUT is the folder of a run of kiloword."""
    folder = folder.absolute()  # "." has no name
    form = str(_object(_read(folder.parent / "config.json")).get("format"))
    return folder.parent if folder.name == "model" and form.startswith("kiloword-run-") else None


def _sets(history: Path) -> dict[str, Any]:
    """The validation sets of the run's last process that names any: name -> [data, number of images]."""
    rows = map(_object, _read(history).splitlines())
    named = [row["val"] for row in rows if isinstance(row.get("val"), dict) and row["val"]]
    return named[-1] if named else {}


def _of_set(metric: str, sets: Mapping[str, Any], step: int) -> tuple[str, str]:
    """The evaluation and the metric that a name of `metrics.jsonl` stands for; of several sets it begins with one's."""
    prefixes = [name for name in sets if metric.startswith(f"{name}/")] or (list(sets) if len(sets) == 1 else [])
    name = max(prefixes, key=len, default="")
    match sets.get(name):
        case [str(data), int(images)]:
            return f"{data}, {images:,} images, at step {step:,}", metric.removeprefix(f"{name}/")
    return f"validation at step {step:,}", metric


def _validation(rows: Path) -> tuple[int, dict[str, float]]:
    """The step and the metrics of the last row of a run that has any."""
    last: tuple[int, dict[str, float]] = (0, {})
    for row in map(_object, _read(rows).splitlines()):
        metrics = {k.removeprefix("val/"): float(v) for k, v in row.items() if k.startswith("val/") and _is_number(v)}
        if metrics:
            last = (row["step"] if isinstance(row.get("step"), int) else 0, metrics)
    return last


def _metrics(path: Path) -> list[tuple[str, str, float]]:
    """The numbers of an evaluation: (evaluation, metric, number); of a file that holds anything else, none.

    `record_evaluation` names the data; `kiloword eval --json` writes numbers alone, among them "skipped" as a float.
    """
    label, metrics = path.stem, _object(_read(path))
    match metrics:
        case {"data": str(data), "images": int(images), "step": int(step), "metrics": dict(inner), **more} if not more:
            label, metrics = f"{path.stem}: {data}, {images:,} images, at step {step:,}", inner
        case _ if not isinstance(metrics.get("skipped"), float):
            return []
    if not all(map(_is_number, metrics.values())):
        return []
    return [(label, name, float(value)) for name, value in metrics.items()]


def _read(path: Path) -> str:
    """The text of a file; "" where there is none that can be read, or one beyond the limit."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return {}
    return record if isinstance(record, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_card(folder: Path) -> None:
    """Write the card of a model folder, such as OUT/model of a run that has ended."""
    write_atomic(folder / CARD, model_card(folder).encode())


def record_evaluation(folder: Path, task: str, data: str, images: int, step: int, metrics: Mapping[str, float]) -> None:
    """Write TASK.json beside a run's model folder, and its figures into the card. Args: images: number evaluated."""
    record = {"data": scrubbed(data), "images": images, "step": step, "metrics": dict(metrics)}
    write_json(folder.parent / f"{task}.json", record)
    write_card(folder)


def model_card(folder: Path) -> str:
    """The card of a model folder. Raises: ValueError for another folder."""
    return card(read_model_file(folder), folder)
