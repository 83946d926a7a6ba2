"""The text of a model card, README.md of a model folder. `model_card` adds the figures of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

from kiloword.__version__ import __version__
from kiloword.addresses import scrubbed
from kiloword.config.recipes import ModelFile
from kiloword.config.settings import differing
from kiloword.terminal import shown

NAME = "README.md"
AVERAGED = "averaged: "  # start of `ModelFile.data` of a mean of models; each with its share follows
LONGEST = 200  # characters of a method's name in code
LINE = 500  # characters of a text that is shown, at most
PARTS = 4000  # characters of the parts of an average, at most
LIBRARIES = {"torch": "pytorch", "safetensors": "pytorch"}  # names on a hub, where they are not the target's
NO_FIGURES = "No evaluation is recorded beside this model."
UNTESTED = (
    "It was not tested for bias, or on languages beyond its data.",
    "No licence is recorded: that of the data and of the weights that it began with decide.",
)


def text(
    file: ModelFile,
    load: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    target: str = "",
    figures: str = NO_FIGURES,
) -> str:
    """The text of a card.

    Args: load: lines of Python that load the model; None: those of kiloword; notes: what an export omits; target: of an
    export; figures: a table in Markdown.
    """
    image, words = file.model.image, file.model.text
    what = f"{file.method}, size {file.size}" + (f", exported to {target}" if target else "")
    library = LIBRARIES.get(target, target or "kiloword")
    limits = (*notes, f"Longer texts are cut to {words.context} tokens.", *UNTESTED)
    parts = [
        f"---\nlibrary_name: {library}\npipeline_tag: zero-shot-image-classification\ntags:\n- image-text\n---",
        f"# {line(file.method)} ({line(file.size)})",
        f"An image-text model made by kiloword {__version__}: {line(what)}. Images of {image.size} pixels, texts of "
        f"at most {words.context} tokens, features of {file.model.head.dim} numbers.",
        "## Data\n\n" + _data(file),
        "## Figures\n\n" + figures,
        "## Intended use\n\nFinding and comparing images and texts, and research. Scores are those of this data: "
        "before decisions about people, or in another domain, evaluate the model there.",
        "## Limits\n\n" + "\n".join(f"- {line(x)}" for x in limits) + "\n",
        "## How to load it\n\n```python\n" + "\n".join(_load(file.method) if load is None else load) + "\n```\n",
    ]
    return "\n\n".join(parts)


def _data(file: ModelFile) -> str:
    if file.data.startswith(AVERAGED):
        parts = line(file.data.removeprefix(AVERAGED), PARTS)
        return f"The mean of the weights of several models, not trained further: {parts}."
    if file.steps:
        return f"Trained for {file.steps:,} steps on: {line(file.data)}."
    return f"Not trained by kiloword: {line(file.data)}." if file.data else "No training is recorded."


def _load(method: str) -> list[str]:
    """Lines of Python that load a model folder by kiloword."""
    lines, named = ["import kiloword"], ""
    modules = sorted(set(re.findall(r"([\w.]+):", method)))
    if modules and len(method) < LONGEST and re.fullmatch(r"[\w.:+-]+", method):  # it stands in code
        lines.append(f"# needs {', '.join(modules)}, from the author of the model, in this folder or on PYTHONPATH")
        named = f', method="{method}"'
    return [*lines, f'matcher = kiloword.load("FOLDER"{named})', 'matcher.score(["photo.jpg"], ["a dog"])']


def averaged(names: Sequence[str], files: Sequence[ModelFile], shares: Sequence[float]) -> str:
    """`ModelFile.data` of a mean of models: each with its share, its steps and its data."""
    parts = zip(names, files, shares, strict=True)
    return AVERAGED + ", ".join(f"{share:.4g} of {name}{_origin(file)}" for name, file, share in parts)


def _origin(file: ModelFile) -> str:
    """What a model is, in brackets; "" where nothing is recorded."""
    steps = f"{file.steps:,} steps on " if file.steps else ""
    return f" ({steps}{file.data})" if file.data else ""


def changed(old: ModelFile, new: ModelFile) -> str:
    """The card of a model whose configuration was changed after its training, such as its image size."""
    changes = differing(asdict(old.model), asdict(new.model))
    what = "; ".join(f"{name} is {now} instead of {before}" for name, (before, now) in changes.items())
    return text(new, notes=[f"The model was changed after this training, and not trained since: {what}."])


def line(value: str, longest: int = LINE) -> str:
    """One line of Markdown without control characters, addresses' credentials or markup."""
    plain = " ".join(shown(scrubbed(str(value))).split())[:longest]
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in plain)
