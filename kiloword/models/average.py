"""`kiloword average`: the weighted mean of models of one shape, as a model."""

from __future__ import annotations

import json
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
from kiloword.models.card import CARD, card
from kiloword.models.model_folder import WEIGHTS, check_finite, check_fit, open_weights
from kiloword.models.tensors import shapes_of, write_tensors
from kiloword.terminal import say


def average(models: Sequence[str], out: Path, alpha: float | None = None) -> None:
    """Write the weighted mean of models as a model folder, with the settings and tokenizer of the last one.

    Its config.json and its card name the models and their shares. A model with share 0 has no effect. No code is run.

    Args: models: model folders, or states of runs; alpha: share of the second of two models; None: equal shares.
    Raises: ValueError for models that differ in more than their weights, naming what differs, for weights that are NaN
    or infinite, and for an `out` that is in use.
    Source: WiSE-FT (arXiv:2109.01903, section 3) for two models, model soups (arXiv:2203.05482, section 2) for several.
    """
    if len(models) < 2:
        raise ValueError(f"average got {' '.join(models)}: expected two models or more.")
    if alpha is not None and (len(models) != 2 or not 0 <= alpha <= 1):
        raise ValueError(
            f"--alpha is {alpha:g} for {len(models)} models: expected 0 (the first of two) to 1 (the second); several "
            "get equal shares."
        )
    shares = [1 / len(models)] * len(models) if alpha is None else [1 - alpha, alpha]
    folders, files, stored = zip(*map(open_weights, map(Path, models)), strict=True)
    last, tokenizer = folders[-1], Tokenizer.load(folders[-1])
    for folder, file, weights in zip(folders[:-1], files, stored, strict=False):
        changes = differing(_compared(file), _compared(files[-1]))
        if Tokenizer.load(folder).to_bytes() != tokenizer.to_bytes():
            changes["tokenizer"] = (str(folder), str(last))
        if changes:
            shown = "; ".join(f"{name} is {x!r} and {y!r}" for name, (x, y) in list(changes.items())[:3])
            raise ValueError(f"{folder} and {last} cannot be averaged: {shown}.")
        check_fit(shapes_of(stored[-1]), shapes_of(weights), f"weights in {folder}", f"those of {last}")

    def mean(name: str) -> Tensor:
        """In double precision; a sum from 0 would make -0 of a shared trunk 0."""
        values = [weights[name] for weights in stored]
        for folder, value in zip(folders, values, strict=True):
            check_finite({name: value}, str(folder))
        parts = [share * value.double() for share, value in zip(shares, values, strict=True) if share]
        total: Tensor = reduce(torch.add, parts)
        return total.to(values[-1].dtype)

    mixed = []  # each with its share, its steps and its data
    for model, file, share in zip(models, files, shares, strict=True):
        origin = (f"{file.steps:,} steps on " if file.steps else "") + file.data
        mixed.append(f"{share:.4g} of {model}" + (f" ({origin})" if file.data else ""))
    made = replace(files[-1], steps=0, data="averaged: " + ", ".join(mixed))
    with new_folder(out) as work:
        write_atomic(work / CARD, card(made).encode())
        write_json(work / "config.json", asdict(made))
        tokenizer.save(work)
        write_tensors(work / WEIGHTS, {name: mean(name) for name in stored[-1]})
    say(f"{sum(value.numel() for value in stored[-1].values()):,} parameters, {made.data}", f"written: {out}")


def _compared(file: ModelFile) -> Any:
    """What averaged models must have in common; a setting that is newer than a model has its default."""
    settings = file.settings if ":" in file.method else asdict(find(file.method)[1]()) | file.settings
    model = replace(file.model, init_std=0.0)  # of initial weights
    return json.loads(json.dumps({"method": file.method, "settings": settings, "model": asdict(model)}))
