"""The model card: README.md of a model, from the records of its run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kiloword.__version__ import __version__
from kiloword.addresses import scrubbed
from kiloword.checkpoint.files import write_atomic, write_json
from kiloword.checkpoint.model_folder import read_model_file
from kiloword.config.recipes import ModelFile
from kiloword.terminal import shown

CARD = "README.md"
FIGURES = 40  # rows of the table, at most
LONGEST = 200  # characters of a method's name in code
LARGEST = 1 << 24  # bytes of an evaluation's JSON
NOT_FIGURES = ("config.json", "tokenizer.json")
LIBRARIES = {"torch": "pytorch", "safetensors": "pytorch"}  # names on a hub, where they are not the target's
UNTESTED = (
    "It was not tested for bias, or on languages beyond its data.",
    "No licence is recorded: that of the data and of the weights that it began with decide.",
)


def card(file: ModelFile, folder: Path, load: Sequence[str], notes: Sequence[str] = (), target: str = "") -> str:
    """The text of a card.

    Args: folder: of the model, whose run's JSON files of evaluations are read; load: lines of Python that load it;
    notes: what an export omits; target: of an export.
    """
    image, text = file.model.image, file.model.text
    what = f"{file.method}, size {file.size}" + (f", exported to {target}" if target else "")
    library = LIBRARIES.get(target, target or "kiloword")
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: zero-shot-image-classification\ntags:\n- image-text\n---",
        f"# {_line(file.method)} ({_line(file.size)})",
        f"An image-text model made by kiloword {__version__}: {_line(what)}. Images of {image.size} pixels, texts of "
        f"at most {text.context} tokens, features of {file.model.head.dim} numbers.",
        "## Data\n\n"
        + (f"Trained for {file.steps:,} steps on: {_line(file.data)}." if file.steps else _no_steps(file)),
        "## Figures\n\n" + _figures(folder),
        "## Intended use\n\nFinding and comparing images and texts, and research. Scores are those of this data: "
        "before decisions about people, or in another domain, evaluate the model there.",
        "## Limits\n\n"
        + "\n".join(f"- {_line(x)}" for x in (*notes, f"Longer texts are cut to {text.context} tokens.", *UNTESTED))
        + "\n",
        "## How to load it\n\n```python\n" + "\n".join(load) + "\n```\n",
    ]
    return "\n\n".join(parts)


def _no_steps(file: ModelFile) -> str:
    return f"Not trained by kiloword: {_line(file.data)}." if file.data else "No training is recorded."


def _line(value: str) -> str:
    """One line of Markdown without control characters, addresses' credentials or markup."""
    text = " ".join(shown(scrubbed(str(value))).split())[:500]
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in text)


def _figures(folder: Path) -> str:
    """A table of the last validation of the run, and of the metrics in the JSON files beside it."""
    run = folder.parent if folder.name == "model" else folder
    step, metrics = _validation(run / "metrics.jsonl")
    sets = _sets(run / "history.jsonl")
    entries = [(*_of_set(name, sets, step), value) for name, value in metrics.items()]
    for path in sorted(run.glob("*.json")):
        entries += [(label, name, value) for label, name, value in _metrics(path)]
    if not entries:
        return "No evaluation is recorded beside this model."
    rows = [f"| {_line(what)} | {_line(name)} | {value:.4f} |" for what, name, value in entries[:FIGURES]]
    return "\n".join(["| evaluation | metric | value |", "|---|---|---|", *rows])


def _sets(history: Path) -> dict[str, Any]:
    """The validation sets of the run's last process that names any: name -> [data, number of images]."""
    if not history.is_file() or history.stat().st_size > LARGEST:
        return {}
    rows = [_object(line) for line in history.read_text(encoding="utf-8", errors="replace").splitlines()]
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
    if not rows.is_file() or rows.stat().st_size > LARGEST:
        return last
    for line in rows.read_text(encoding="utf-8", errors="replace").splitlines():
        row = _object(line)
        metrics = {k.removeprefix("val/"): float(v) for k, v in row.items() if k.startswith("val/") and _is_number(v)}
        if metrics:
            last = (row["step"] if isinstance(row.get("step"), int) else 0, metrics)
    return last


def _metrics(path: Path) -> list[tuple[str, str, float]]:
    """The numbers of an evaluation's JSON: (evaluation, metric, number); of other files none."""
    if path.name in NOT_FIGURES or path.stat().st_size > LARGEST:
        return []
    try:
        record = _object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    label = path.stem
    match record:
        case {"data": str(data), "images": int(images), "step": int(step), "metrics": dict(metrics)}:
            label, record = f"{path.stem}: {data}, {images:,} images, at step {step:,}", metrics
    return [(label, name, float(value)) for name, value in record.items() if _is_number(value)]


def _object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError:
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
    file = read_model_file(folder)
    load, named = ["import kiloword"], ""
    modules = sorted(set(re.findall(r"([\w.]+):", file.method)))
    if modules and len(file.method) < LONGEST and re.fullmatch(r"[\w.:+-]+", file.method):  # it stands in code
        load.append(f"# needs {', '.join(modules)}, from the author of the model, in this folder or on PYTHONPATH")
        named = f', method="{file.method}"'
    load += [f'matcher = kiloword.load("FOLDER"{named})', 'matcher.score(["photo.jpg"], ["a dog"])']
    return card(file, folder, load)
