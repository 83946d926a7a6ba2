"""Runs: small recipes, folders as `train` leaves them, the newest state, and runs that are cut."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kiloword.config.recipes import AugmentConfig, Recipe
from kiloword.methods.defaults import default_recipe
from kiloword.models.states import newest
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train

TIMED = ("pairs_per_s", "loader_pairs_per_s", "data_wait", "slowest_data_wait", "save_s", "memory", "time", "restarts")
Row = dict[str, Any]
Values = dict[str, Tensor]


def row(step: int, **more: Any) -> Row:
    values = {"loss": 10.0 / step, "pair": 10.0 / step, "gradient_norm": 1.0, "pairs_per_s": 100.0, "data_wait": 0.01}
    return {"step": step, "epoch": step / 100, **values, "skipped": 0, "truncated": 0, "restarts": 0, **more}


def write(out: Path, some: list[Row], steps: int = 100, **recipe: Any) -> Path:
    """A run's folder as `train` leaves it."""
    out.mkdir(parents=True, exist_ok=True)
    told = {"method": "siglip", "size": "b32", "steps": steps, "batch": 10, "settings": {}, **recipe}
    (out / "config.json").write_text(json.dumps({"format": "kiloword-run-1", "recipe": told}))
    (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
    return out


def recipe(steps: int = 8, **more: Any) -> Recipe:
    """Everything that a state must hold: Muon and AdamW, an average, random crops, several captions, micro-batches."""
    base = default_recipe("siglip", "debug", ("scenes?n=64&captions=3",))
    data = replace(base.data, tokenizer_vocab=300, augment=AugmentConfig(jitter=0.5))
    base = replace(base, data=data, optim=replace(base.optim, ema=0.9), seed=5)
    return replace(base, **{"batch": 16, "micro": 8, "steps": steps, **more})


def load_state(folder: Path, warn: Callable[[str], None]) -> tuple[Values, dict[str, Any]] | None:
    """Tensors and numbers; None where there is no state; `warn` gets a sentence for each damaged one."""
    stored = newest(folder, warn)
    return None if stored is None else ({name: stored.whole(name) for name in stored.specs}, stored.numbers)


def state(out: Path) -> tuple[Values, dict[str, Any]]:
    """Of a run that has one, not damaged."""
    found = load_state(out / "state", pytest.fail)
    assert found is not None
    return found


def rows(out: Path) -> list[dict[str, Any]]:
    """Of the log, without what a clock says."""
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(out / "metrics.jsonl")]


def assert_equal(found: Values, expected: Values) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


def assert_same(out: Path, reference: Path) -> None:
    """Weights, optimizer, average, counters, the model folder and all rows of metrics."""
    (tensors, numbers), (expected, expected_numbers) = state(out), state(reference)
    kinds = {name.split(":")[0] for name in expected if name.startswith("optimizer/")}
    assert kinds >= {"optimizer/momentum_buffer", "optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step"}
    assert_equal(tensors, expected)
    assert numbers == expected_numbers
    assert_equal(*(load_file(folder / "model" / "model.safetensors") for folder in (out, reference)))
    assert rows(out) == rows(reference)


class PowerCut(Exception):
    """Ends a run where nothing can be saved any more."""


@contextmanager
def at_step(step: int, work: Callable[[torch.optim.Optimizer], object], after: bool = False) -> Iterator[None]:
    """Inside, `work` gets AdamW (or AdamP) before it moves its weights the `step`-th time (from 1), or after."""
    moved = [0]

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        moved[0] += "Adam" in type(optimizer).__name__
        if moved[0] == step and "Adam" in type(optimizer).__name__:
            work(optimizer)

    handle = (register_optimizer_step_post_hook if after else register_optimizer_step_pre_hook)(hook)
    try:
        yield
    finally:
        handle.remove()


def cut_at(step: int, run: Recipe, out: Path, options: RunOptions) -> None:
    """Run until the middle of `step` (from 1, of this call), where the lights go out."""

    def cut(_: object) -> None:
        raise PowerCut

    with at_step(step, cut), pytest.raises(PowerCut):
        train(run, out, options=options)


def whole_and_cut(run: Recipe, folder: Path) -> Values:
    """The state of a run, which the same one that is cut in its fourth step and goes on has too, bit for bit."""
    options = RunOptions(quiet=True, save_every=2)
    train(run, folder / "whole", options=options)
    cut_at(4, run, folder / "cut", options)
    train(run, folder / "cut", options=options)
    whole, cut = (state(folder / name)[0] for name in ("whole", "cut"))
    assert_equal(cut, whole)
    return whole


def at_saves(patch: pytest.MonkeyPatch, work: Callable[[int], None]) -> None:
    """`work` gets the number of a save, in its thread, before the file with its tensors is on disk."""
    real, saves = os.fsync, [0]

    def fsync(handle: int) -> None:
        if "/.shard-" in os.readlink(f"/proc/self/fd/{handle}"):
            saves[0] += 1
            work(saves[0])
        real(handle)

    patch.setattr(os, "fsync", fsync)
