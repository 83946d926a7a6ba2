"""The model card, README.md of a model folder, with the figures of its run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kiloword.__version__ import __version__
from kiloword.addresses import scrubbed
from kiloword.config.recipes import ModelFile
from kiloword.config.settings import differing
from kiloword.files import write_atomic, write_json
from kiloword.models.model_folder import read_model_file
from kiloword.terminal import shown

CARD = "README.md"
AVERAGED = "averaged: "  # start of `ModelFile.data` of a mean of models; each with its share follows
LINE, PARTS = 500, 4000  # characters of a text that is shown, and of the parts of an average, at most
ROWS = 40  # of the table of figures, at most
LIBRARIES = {"torch": "pytorch", "safetensors": "pytorch"}  # names on a hub, where they are not the target's
LIMITS = (
    "It was not tested for bias, or on languages beyond its data.",
    "No licence is recorded: that of the data and of the weights that it began with decide.",
)
Figure = tuple[str, str, float]  # evaluation, metric, value


def card(
    file: ModelFile,
    folder: Path | None = None,
    load: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    target: str = "",
) -> str:
    """The text of a card.

    Args: folder: OUT/model of a run, whose figures are shown; load: lines of Python that load the model; None: those of
    kiloword; notes: what an export omits; target: of an export.
    """
    config = file.model
    what = f"{file.method}, size {file.size}" + (f", exported to {target}" if target else "")
    limits = (*notes, f"Longer texts are cut to {config.text.context} tokens.", *LIMITS)
    parts = [
        f"---\nlibrary_name: {LIBRARIES.get(target, target or 'kiloword')}\n"
        "pipeline_tag: zero-shot-image-classification\ntags:\n- image-text\n---",
        f"# {line(file.method)} ({line(file.size)})",
        f"An image-text model made by kiloword {__version__}: {line(what)}. Images of {config.image.size} pixels, "
        f"texts of at most {config.text.context} tokens, features of {config.head.dim} numbers.",
        "## Data\n\n" + _data(file),
        "## Figures\n\n" + _table(_figures(folder) if folder else ()),
        "## Intended use\n\nFinding and comparing images and texts, and research. Scores are those of this data: "
        "before decisions about people, or in another domain, evaluate the model there.",
        "## Limits\n\n" + "\n".join(f"- {line(x)}" for x in limits) + "\n",
        "## How to load it\n\n```python\n" + "\n".join(_load(file.method) if load is None else load) + "\n```\n",
    ]
    return "\n\n".join(parts)


def model_card(folder: Path) -> str:
    """The card of a model folder. Raises: ValueError for another folder."""
    return card(read_model_file(folder), folder)


def write_card(folder: Path) -> None:
    """Write the card of a model folder, such as OUT/model of a run that has ended."""
    write_atomic(folder / CARD, model_card(folder).encode())


def record_evaluation(folder: Path, task: str, data: str, images: int, step: int, metrics: Mapping[str, float]) -> None:
    """Write TASK.json beside a run's model folder, and its figures into the card. Args: images: number evaluated."""
    record = {"data": scrubbed(data), "images": images, "step": step, "metrics": dict(metrics)}
    write_json(folder.parent / f"{task}.json", record)
    write_card(folder)


def averaged(names: Sequence[str], files: Sequence[ModelFile], shares: Sequence[float]) -> str:
    """`ModelFile.data` of a mean of models: each with its share, its steps and its data."""
    parts = []
    for name, file, share in zip(names, files, shares, strict=True):
        origin = (f"{file.steps:,} steps on " if file.steps else "") + file.data
        parts.append(f"{share:.4g} of {name}" + (f" ({origin})" if file.data else ""))
    return AVERAGED + ", ".join(parts)


def changed(old: ModelFile, new: ModelFile) -> str:
    """The card of a model whose configuration was changed after its training, such as its image size."""
    changes = differing(asdict(old.model), asdict(new.model))
    what = "; ".join(f"{name} is {now} instead of {before}" for name, (before, now) in changes.items())
    return card(new, notes=[f"The model was changed after this training, and not trained since: {what}."])


def line(value: str, longest: int = LINE) -> str:
    """One line of Markdown without control characters, addresses' credentials or markup."""
    plain = " ".join(shown(scrubbed(str(value))).split())[:longest]
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in plain)


def _data(file: ModelFile) -> str:
    if file.data.startswith(AVERAGED):
        parts = line(file.data.removeprefix(AVERAGED), PARTS)
        return f"The mean of the weights of several models, not trained further: {parts}."
    if file.steps:
        return f"Trained for {file.steps:,} steps on: {line(file.data)}."
    return f"Not trained by kiloword: {line(file.data)}." if file.data else "No training is recorded."


def _load(method: str) -> list[str]:
    lines, named = ["import kiloword"], ""
    if ":" in method and re.fullmatch(r"[\w.:+-]{1,200}", method):  # it stands in code
        modules = ", ".join(sorted(set(re.findall(r"([\w.]+):", method))))
        lines.append(f"# needs {modules}, from the author of the model, in this folder or on PYTHONPATH")
        named = f', method="{method}"'
    return [*lines, f'matcher = kiloword.load("FOLDER"{named})', 'matcher.score(["photo.jpg"], ["a dog"])']


def _table(figures: Sequence[Figure]) -> str:
    if not figures:
        return "No evaluation is recorded beside this model."
    rows = [f"| {line(what)} | {line(name)} | {value:.4f} |" for what, name, value in figures[:ROWS]]
    return "\n".join(["| evaluation | metric | value |", "|---|---|---|", *rows])


def _figures(folder: Path) -> list[Figure]:
    """The last validation of the run whose model lies in `folder`, and the evaluations beside it; else none."""
    run = folder.absolute().parent
    config = next(iter(_objects(run / "config.json")), {})
    if folder.absolute().name != "model" or not str(config.get("format")).startswith("kiloword-run-"):
        return []
    rows = [row for row in _objects(run / "metrics.jsonl") if any(name.startswith("val/") for name in row)]
    named = [row["val"] for row in _objects(run / "history.jsonl") if isinstance(row.get("val"), dict)]
    figures = list(_validation(rows[-1], named[-1] if named else {})) if rows else []
    for path in sorted(run.glob("*.json")):
        for record in _objects(path):
            figures += _evaluation(path.stem, record)
    return figures


def _validation(row: Mapping[str, Any], sets: Mapping[str, Any]) -> Iterator[Figure]:
    """Args: row: of metrics.jsonl; sets: name -> [data, number of images]; of several, a metric begins with one's."""
    for name, value in row.items():
        if name.startswith("val/") and _is_number(value):
            metric, step = name.removeprefix("val/"), f"at step {row.get('step', 0):,}"
            of = [one for one in sets if metric.startswith(f"{one}/")] or (list(sets) if len(sets) == 1 else [])
            if of:
                data, images = sets[longest := max(of, key=len)]
                yield f"{data}, {images:,} images, {step}", metric.removeprefix(f"{longest}/"), float(value)
            else:
                yield f"validation {step}", metric, float(value)


def _evaluation(label: str, record: dict[str, Any]) -> list[Figure]:
    """The numbers of an evaluation; of a file that holds anything else, none.

    `record_evaluation` names the data; `kiloword eval --json` writes numbers alone, among them "skipped" as a float.
    """
    match record:
        case {"data": str(data), "images": int(n), "step": int(step), "metrics": dict(metrics), **more} if not more:
            label, record = f"{label}: {data}, {n:,} images, at step {step:,}", metrics
        case {"skipped": float()}:
            pass
        case _:
            return []
    return [(label, name, float(x)) for name, x in record.items()] if all(map(_is_number, record.values())) else []


def _objects(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSON or JSON lines file; those that cannot be read are left out, as a killed run cuts a line."""
    objects = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for part in [text] if path.suffix == ".json" else text.splitlines():
        try:
            objects.append(json.loads(part))
        except (ValueError, RecursionError):
            continue
    return [one for one in objects if isinstance(one, dict)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
