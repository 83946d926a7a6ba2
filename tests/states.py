"""The newest state of a run as plain tensors and numbers; runs that are cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kiloword.config.recipes import Recipe
from kiloword.methods.defaults import default_recipe
from kiloword.models.states import newest
from kiloword.training.loop import RunOptions, train
from kiloword.training.optimizer import Optimizer


def load_state(folder: Path, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """None where there is no state; `warn` gets a sentence for each damaged one."""
    stored = newest(folder, warn)
    if stored is None:
        return None
    return {name: stored.whole(name) for name in stored.specs}, stored.numbers


def failing_at(step: int) -> Callable[..., dict[str, Tensor]]:
    """`Optimizer.step` that fails at a step."""
    original = Optimizer.step

    def failing(self: Optimizer, n: int, loss: Tensor | None = None) -> dict[str, Tensor]:
        if n == step:
            raise RuntimeError("stop here")
        return original(self, n, loss)

    return failing


def whole_and_cut(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The states of a run, and of the same one that fails at its fourth step and goes on."""
    options = RunOptions(quiet=True, save_every=2)
    train(recipe, folder / "whole", options=options)
    with monkeypatch.context() as patched:
        patched.setattr(Optimizer, "step", failing_at(3))
        with pytest.raises(RuntimeError, match="stop here"):
            train(recipe, folder / "cut", options=options)
    train(recipe, folder / "cut", options=options)
    return [(load_state(folder / name / "state", pytest.fail) or ({}, {}))[0] for name in ("whole", "cut")]


def recipe(steps: int = 8) -> Recipe:
    base = default_recipe("siglip", "debug", ("scenes?n=64",))
    data = replace(base.data, tokenizer_vocab=300)
    return replace(base, data=data, optim=replace(base.optim, ema=0.9), batch=16, steps=steps, seed=5)


def at_saves(patch: pytest.MonkeyPatch, work: Callable[[int], None]) -> None:
    """`work` gets the number of a save, in its thread, before the file with its tensors is on disk."""
    real, saves = os.fsync, [0]

    def fsync(handle: int) -> None:
        if "/.shard-" in os.readlink(f"/proc/self/fd/{handle}"):
            saves[0] += 1
            work(saves[0])
        real(handle)

    patch.setattr(os, "fsync", fsync)
