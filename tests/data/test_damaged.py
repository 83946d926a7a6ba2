"""A whole run on damaged shards: what is bad is counted exactly, by any number of ranks, and too much stops it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import torchrun
from kiloword.training.log import read_metrics
from tars import pairs, write_tar

pytestmark = pytest.mark.slow

SAMPLES, SHARDS, BATCH = 200, 4, 20
STEPS, EACH = SAMPLES // BATCH, SAMPLES // SHARDS  # steps of one epoch
BAD = {
    7: "the image has zero bytes",
    49: "the tar ends in the middle of this sample.*",
    60: "no image",
    111: "caption is not UTF-8",
    155: "cannot be decoded.*truncated",
}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    members = pairs(SAMPLES)
    members |= {"0007.png": b"", "0111.txt": b"caf\xe9", "0155.png": members["0155.png"][:60]}
    del members["0060.png"]
    for shard in range(SHARDS):
        rows = {name: body for name, body in members.items() if int(name[:4]) // EACH == shard}
        tar = write_tar(tmp_path / "data" / f"{shard}.tar", rows)
        if shard == 0:
            os.truncate(tar, tar.read_bytes().index(b"0049.png") + 700)  # within an image
    return tmp_path / "data"


def words(data: Path, out: Path, *more: object) -> list[object]:
    """One epoch."""
    small = ["--size", "debug", "--batch", BATCH, "--vocab", 300, "--log-every", 1, "--precision", "fp64"]
    return ["train", "siglip", *small, "--data", data, "--out", out, "--steps", "None", "--epochs", 1, *more]


def test_damaged_samples_are_counted_exactly(shards: Path, tmp_path: Path) -> None:
    """Each row of an epoch is visited once, so that all that was planted is found, and nothing else."""
    steps = list[Any]()
    for workers, ranks in ((2, 1), (0, 2)):
        run = torchrun(ranks, *words(shards, tmp_path / f"{ranks}", "--workers", workers, "--bad-share", 0.1))
        assert run.returncode == 0, run.stderr[-3000:]
        steps.append([(row["skipped"], row["loss"]) for row in read_metrics(tmp_path / f"{ranks}" / "metrics.jsonl")])
        assert (len(steps[-1]), steps[-1][-1][0]) == (STEPS, len(BAD))
        found = {int(row): reason.strip() for row, reason in re.findall(r"skipped (\d{4}): (.*)", run.stderr)}
        assert sorted(found) == sorted(BAD)
        assert all(re.fullmatch(BAD[row], reason) for row, reason in found.items()), found
    assert np.allclose(*steps, rtol=0, atol=1e-6)


def test_more_than_is_allowed_stops_all_ranks(shards: Path, tmp_path: Path) -> None:
    run = torchrun(2, *words(shards, tmp_path / "out", "--workers", 1))
    assert run.returncode == 1  # of torchrun
    assert re.search(r"3 of the data set's 200 samples are bad, .* 1\.00%.*--bad-share", run.stderr), run.stderr
    assert not (tmp_path / "out" / "model" / "model.safetensors").exists()
