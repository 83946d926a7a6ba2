"""`kiloword average`: the weighted mean of models of one shape, as a model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kiloword.config.recipes import ModelFile
from kiloword.config.settings import differing
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.files import new_folder, write_atomic, write_json
from kiloword.methods.registry import find
from kiloword.models.card import CARD, averaged, card
from kiloword.models.model_folder import WEIGHTS, check_finite, check_fit, open_weights
from kiloword.models.tensors import write_streamed
from kiloword.terminal import say


def main(models: Sequence[str], out: Path, alpha: float | None = None) -> None:
    """Write the mean of models to `out`; see `average`. Args: alpha: share of the second of two models."""
    if len(models) < 2:
        raise ValueError(f"average got {' '.join(models)}: expected two models or more.")
    if alpha is not None and len(models) != 2:
        raise ValueError(f"--alpha is for two models, not {len(models)}, which get equal shares: omit it.")
    if alpha is not None and not 0 <= alpha <= 1:
        raise ValueError(f"--alpha is {alpha:g}: expected 0 (the first model) to 1 (the second).")
    shares = [1 / len(models)] * len(models) if alpha is None else [1 - alpha, alpha]
    count = average([Path(model) for model in models], shares, out)
    parts = ", ".join(f"{share:.4g} of {model}" for share, model in zip(shares, models, strict=True))
    say(f"{count:,} parameters: {parts}", f"written: {out}")


def average(models: Sequence[Path], shares: Sequence[float], out: Path) -> int:
    """Write the sum of shares times weights as a model folder, with the settings and tokenizer of the last model.

    Its config.json and its card name the models and their shares.
    A model with share 0 has no effect. One tensor of each model is in memory at a time. No code of a folder is run.

    Args: models: model folders, or states of runs; shares: one of each model, with sum 1.
    Returns: number of parameters. Raises: ValueError for models that differ in more than their weights, naming what
    differs, for weights that are NaN or infinite, and for an `out` that is in use.
    Source: WiSE-FT (arXiv:2109.01903, section 3) for two models, model soups (arXiv:2203.05482, section 2) for several.
    """
    folders, files, stored = zip(*map(open_weights, models), strict=True)
    for folder, file, weights in zip(folders[:-1], files, stored, strict=False):
        _check_same(folder, file, folders[-1], files[-1])
        check_fit(stored[-1].shapes, weights.shapes, f"weights in {folder}", f"those of {folders[-1]}")
    made = replace(files[-1], steps=0, data=averaged([str(model) for model in models], files, shares))

    def mean(name: str) -> Tensor:
        """In double precision; a sum from 0 would make -0 of a shared trunk 0."""
        values = [weights.read(name) for weights in stored]
        for folder, value in zip(folders, values, strict=True):
            check_finite({name: value}, str(folder))
        parts = [share * value.double() for share, value in zip(shares, values, strict=True) if share]
        total: Tensor = reduce(torch.add, parts)
        return total.to(values[-1].dtype)

    with new_folder(out) as work:
        write_atomic(work / CARD, card(made).encode())
        write_json(work / "config.json", asdict(made))
        Tokenizer.load(folders[-1]).save(work)
        write_streamed(work / WEIGHTS, stored[-1].specs, mean)
    return sum(math.prod(shape) for shape in stored[-1].shapes.values())


def _check_same(first: Path, a: ModelFile, other: Path, b: ModelFile) -> None:
    """Raises: ValueError naming what differs between two models, but for their weights."""
    if changes := differing(_compared(a), _compared(b)):
        shown = "; ".join(f"{name} is {x!r} and {y!r}" for name, (x, y) in list(changes.items())[:3])
        raise ValueError(f"{first} and {other} cannot be averaged: {shown}.")
    if Tokenizer.load(first).to_bytes() != Tokenizer.load(other).to_bytes():
        raise ValueError(f"{first} and {other} cannot be averaged: their tokenizers differ.")


def _compared(file: ModelFile) -> Any:
    """What averaged models must have in common; a setting that is newer than a model has its default."""
    kind: Any = None if ":" in file.method else find(file.method)[1]
    settings = file.settings if kind is None else asdict(kind()) | file.settings
    model = replace(file.model, init_std=0.0)  # of initial weights
    return json.loads(json.dumps({"method": file.method, "settings": settings, "model": asdict(model)}))
