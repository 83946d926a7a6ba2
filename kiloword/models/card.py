"""The model card, README.md of a model folder, with the figures of its run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from kiloword.__version__ import __version__
from kiloword.addresses import scrubbed
from kiloword.config.recipes import ModelFile
from kiloword.config.settings import differing
from kiloword.files import write_atomic, write_json
from kiloword.models.model_folder import read_model_file
from kiloword.runs.rows import HISTORY, ROWS, objects, read_object
from kiloword.terminal import shown

CARD = "README.md"
LINE = 4000  # characters of a text that is shown, at most
LIBRARIES = {"torch": "pytorch", "safetensors": "pytorch"}  # names on a hub, where they are not the target's
LIMITS = (
    "It was not tested for bias, or on languages beyond its data.",
    "No licence is recorded: that of the data and of the weights that it began with decide.",
)
TEMPLATE = """\
---
library_name: {library}
pipeline_tag: zero-shot-image-classification
tags:
- image-text
---

# {method} ({size})

An image-text model made by kiloword {version}: {method}, size {size}{exported}. Images of {model.image.size} pixels \
(resize: {model.preprocess.resize}), texts of at most {model.text.context} tokens, features of {model.head.dim} numbers.

## Data

{data}

## Figures

{figures}

## Intended use

Finding and comparing images and texts, and research. Scores are those of this data: before decisions about people, \
or in another domain, evaluate the model there.

## Limits

{limits}

## How to load it

```python
{load}
```
"""
Figure = tuple[str, str, float]  # evaluation, metric, value


def card(
    file: ModelFile,
    folder: Path | None = None,
    load: str = "",
    notes: Sequence[str] = (),
    target: str = "",
) -> str:
    """The text of a card.

    Args: folder: OUT/model of a run, whose figures are shown; load: Python that loads the model, by default with
    kiloword; notes: what an export omits; target: of an export.
    """
    limits = (*notes, f"Longer texts are cut to {file.model.text.context} tokens.", *LIMITS)
    data, table = "No training is recorded.", "No evaluation is recorded beside this model."
    if file.data:
        how = f"Trained for {file.steps:,} steps on" if file.steps else "Not trained further by kiloword"
        data = f"{how}: {line(file.data)}."
    if folder is not None and (figures := _figures(folder.absolute())):
        rows = [f"| {line(what)} | {line(name)} | {value:.4f} |" for what, name, value in figures]
        table = "\n".join(["| evaluation | metric | value |", "|---|---|---|", *rows])
    return TEMPLATE.format(
        library=LIBRARIES.get(target, target or "kiloword"),
        method=line(file.method),
        size=line(file.size),
        version=__version__,
        exported=f", exported to {target}" if target else "",
        model=file.model,
        data=data,
        figures=table,
        limits="\n".join(f"- {line(x)}" for x in limits),
        load=load or _load(file.method),
    )


def model_card(folder: Path) -> str:
    """The card of a model folder. Raises: ValueError for another folder."""
    return card(read_model_file(folder), folder)


def write_card(folder: Path) -> None:
    """Write the card of a model folder, such as OUT/model of a run that has ended."""
    write_atomic(folder / CARD, model_card(folder).encode())


def record_retrieval(folder: Path, data: str, images: int, step: int, metrics: Mapping[str, float]) -> None:
    """Write retrieval.json beside a run's model folder, and its figures into the card. Args: images: how many."""
    record = {"data": scrubbed(data), "images": images, "step": step, "metrics": dict(metrics)}
    write_json(folder.parent / "retrieval.json", record)
    write_card(folder)


def changed(old: ModelFile, new: ModelFile) -> str:
    """The card of a model whose configuration was changed after its training, such as its image size."""
    changes = differing(asdict(old.model), asdict(new.model))
    what = "; ".join(f"{name} is {now} instead of {before}" for name, (before, now) in changes.items())
    return card(new, notes=[f"The model was changed after this training, and not trained since: {what}."])


def line(value: str) -> str:
    """One line of Markdown without control characters, addresses' credentials or markup."""
    plain = " ".join(shown(scrubbed(str(value))).split())[:LINE]
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in plain)


def _load(method: str) -> str:
    needed = named = ""
    if ":" in method and re.fullmatch(r"[\w.:+-]{1,200}", method):  # it stands in code
        modules = ", ".join(sorted(set(re.findall(r"([\w.]+):", method))))
        needed = f"# needs {modules}, from the author of the model, in this folder or on PYTHONPATH\n"
        named = f', method="{method}"'
    return f'import kiloword\n{needed}matcher = kiloword.load("FOLDER"{named})\nmatcher.score(["photo.jpg"], ["a dog"])'


def _figures(folder: Path) -> list[Figure]:
    """The last validation of the run whose model lies in `folder`, and the evaluations beside it; else none."""
    run, figures = folder.parent, list[Figure]()
    if folder.name != "model" or "kiloword-run-" not in str(read_object(run / "config.json").get("format")):
        return []
    if rows := [row for row in objects(run / ROWS) if any(name.startswith("val/") for name in row)]:
        kept = [row["val"] for row in objects(run / HISTORY) if row.get("val")]
        sets = dict(kept[-1]) if kept else {}  # name: [data, number of images]
        prefixes = (
            {name: f"val/{name}/" for name in sorted(sets, key=len)} if len(sets) > 1 else dict.fromkeys(sets, "val/")
        )
        for name, value in rows[-1].items():
            if name.startswith("val/"):
                what, metric = "validation", name.removeprefix("val/")
                for one, prefix in prefixes.items():
                    if name.startswith(prefix):
                        what, metric = "{}, {:,} images,".format(*sets[one]), name.removeprefix(prefix)
                figures.append((f"{what} at step {rows[-1]['step']:,}", metric, value))
    for path in sorted(run.glob("*.json")):
        label, metrics = path.stem, read_object(path)
        if metrics.keys() == {"data", "images", "step", "metrics"}:  # of `record_retrieval`
            label += ": {data}, {images:,} images, at step {step:,}".format(**metrics)
            metrics = metrics["metrics"]
        elif not isinstance(metrics.get("skipped"), float):  # of `kiloword eval --json`
            continue
        figures += [(label, name, value) for name, value in metrics.items() if isinstance(value, int | float)]
    return figures
