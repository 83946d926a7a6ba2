"""`train` under torchrun: two processes make the model that one makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kiloword.training.log import read_metrics

TRAIN = [
    "train",
    "siglip",
    "--size",
    "debug",
    "--data",
    "scenes?levels=1&n=200",
    "--steps",
    "6",
    "--batch",
    "16",
    "--model.text.context",
    "5",
]


def launch(ranks: int, out: Path, *more: str) -> dict[str, torch.Tensor]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *run, "-m", "kiloword", *TRAIN, "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out / "model" / "model.safetensors")


@pytest.mark.slow
def test_two_ranks_make_the_model_that_one_makes(tmp_path: Path) -> None:
    one = launch(1, tmp_path / "one", "--precision", "fp64")
    two = launch(2, tmp_path / "two", "--precision", "fp64")
    pieces = launch(2, tmp_path / "pieces", "--precision", "fp64", "--micro", "4")
    alone, both = (read_metrics(tmp_path / out / "metrics.jsonl")[-1] for out in ("one", "two"))
    assert alone["truncated"] == both["truncated"] > 0
    assert alone["captions"] == both["captions"] == 6 * 16
    assert both["slowest_data_wait"] >= both["data_wait"]
    assert "slowest_data_wait" not in alone
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-6, msg=name)
        torch.testing.assert_close(pieces[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    constant = ["--precision", "fp64", "--optim.warmup", "2", "--optim.final-lr", "1"]  # the length changes no rate
    launch(2, tmp_path / "cut", *constant, "--steps", "3")
    rest = launch(1, tmp_path / "cut", *constant, "--extend")
    whole = launch(1, tmp_path / "whole", *constant)
    for name, value in whole.items():
        torch.testing.assert_close(rest[name], value, rtol=0, atol=1e-6, msg=name)
