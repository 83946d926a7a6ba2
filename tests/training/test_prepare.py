"""What a run is made of: options reach what they are of, lengths are counted, towers freeze, groups fill batches."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.distributed import launch
from kiloword.distributed.device import precision_of
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.training.loop import train
from kiloword.training.resolve import with_length
from kiloword.training.setup import make_learner


def recipe(method: str = "siglip", **more: Any) -> Recipe:
    return replace(default_recipe(method, "debug", ("scenes?n=70",)), batch=16, seed=3, **more)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 2.0}, 8),  # four whole batches of 16 in 70 rows
        ({"epochs": 0.6}, 2),
        ({"samples": 95}, 5),
        ({}, 50),
        ({"most": 3}, 12),  # epochs of a run whose length nobody chose
        ({"most": 3, "steps": 50}, 50),
        ({"steps": 7, "epochs": 1.0}, "--steps and --epochs"),
        ({"epochs": float("nan")}, "--epochs nan"),
        ({"samples": 15}, "--samples 15"),
        ({"steps": 0}, "--steps 0"),
    ],
)
def test_lengths(options: dict[str, Any], steps: int | str) -> None:
    with pytest.raises(ValueError, match=steps) if isinstance(steps, str) else nullcontext():
        assert with_length(recipe(steps=50), 70, **options).steps == steps


def test_fsdp_shards_blocks_and_so_compiles_them(tmp_path: Path) -> None:
    options = RunOptions(parallel="fsdp", compile="towers", device="cpu", quiet=True)
    with pytest.raises(ValueError, match="compile blocks"):
        train(recipe(), tmp_path, options=options)


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp32", 4), ("bf16", 4), ("fp64", 8)])
def test_the_precision_of_weights(precision: Any, bytes_each: int) -> None:
    learner, started = make_learner(recipe(precision=precision), preset("siglip", {}))
    assert {p.dtype.itemsize for p in learner.parameters()} == {bytes_each}
    assert started == ""
    with precision_of(precision, "cpu")():
        assert torch.is_autocast_enabled("cpu") == (precision == "bf16")


def test_torchrun_reports_why_a_rank_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file that it names, by its own keys."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    launch.explain("Rank 1 ended.")
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == told["extraInfo"]["py_callstack"] == "Rank 1 ended."
