"""A whole run on damaged shards: 0.8% of the samples costs nothing and is counted exactly, 5% stops it in time."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword.data.open import open_source
from kiloword.training.log import read_metrics
from tars import encode

pytestmark = pytest.mark.slow

SAMPLES, SHARDS, BATCH = 2000, 4, 50
STEPS = SAMPLES // BATCH  # of one epoch
CUT = "cut"  # the tar ends in the middle of its last sample


WAYS: dict[str, tuple[Any, str]] = {
    "no bytes": (lambda m: m | {"png": b""}, "the image has zero bytes"),
    "truncated": (lambda m: m | {"png": m["png"][: len(m["png"]) // 2]}, "cannot be decoded.*truncated"),
    "a web page": (lambda m: m | {"png": b"<html>404 Not Found</html>"}, "not an image in a known format"),
    "no image": (lambda m: {"txt": m["txt"]}, "no image"),
    "no text": (lambda m: m | {"txt": b" \n"}, "no caption"),
    "another encoding": (lambda m: m | {"txt": "ein roter Würfel".encode("latin-1")}, "caption is not UTF-8"),
    "json cut": (lambda m: m | {"json": b'{"caption": "a do'}, "the json cannot be parsed"),
    CUT: (lambda m: m, "the tar ends in the middle of this sample.*"),
}


def planted(count: int) -> dict[int, str]:
    """Row to way: all ways in turn, spread over the rows; the first shard is the one that is cut."""
    others = [way for way in WAYS if way != CUT]
    rows = np.random.default_rng(6).permutation(np.delete(np.arange(SAMPLES), SAMPLES // SHARDS - 1))[: count - 1]
    return {int(row): others[n % len(others)] for n, row in enumerate(rows)} | {SAMPLES // SHARDS - 1: CUT}


def write_shards(folder: Path, bad: dict[int, str]) -> Path:
    folder.mkdir()
    source = open_source(f"scenes?n={SAMPLES}", size=32)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for row in range(shard * SAMPLES // SHARDS, (shard + 1) * SAMPLES // SHARDS):
                record = source.record(row)
                assert isinstance(record.image, np.ndarray)
                members = {"png": encode(record.image), "txt": "\n".join(record.captions).encode()}
                for suffix, body in (WAYS[bad[row]][0](members) if row in bad else members).items():
                    info = tarfile.TarInfo(f"{row:05d}.{suffix}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
    with tarfile.open(folder / "0.tar") as tar:
        last = tar.getmember(f"{SAMPLES // SHARDS - 1:05d}.png")
    os.truncate(folder / "0.tar", last.offset_data + last.size // 2)
    return folder


def train(data: Path, out: Path, *more: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """One epoch."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = ["train", "siglip", "--size", "debug", "--data", data, "--out", out, "--batch", BATCH, "--vocab", 300]
    words += ["--steps", "None", "--epochs", 1, "--log-every", 1, "--precision", "fp64", *more]
    command = [sys.executable, *launch, "-m", "kiloword", *map(str, words)]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=settings)


def named(stderr: str) -> dict[int, str]:
    """Row to reason, as the log says it; each row once."""
    found = re.findall(r"skipped (\d{5}): (.*)", stderr)
    assert len({row for row, _ in found}) == len(found)
    return {int(row): reason.strip() for row, reason in found}


def check(run: subprocess.CompletedProcess[str], out: Path, bad: dict[int, str]) -> None:
    """It finished; what was counted is what was planted, row by row."""
    assert run.returncode == 0, run.stderr[-3000:]
    rows = read_metrics(out / "metrics.jsonl")
    assert len(rows) == STEPS
    counts = [row["skipped"] for row in rows]
    assert counts == sorted(counts)
    assert counts[-1] == len(bad)
    found = named(run.stderr)
    assert found.keys() == bad.keys()
    for row, way in bad.items():
        assert re.fullmatch(WAYS[way][1], found[row]), (way, found[row])


def test_few_damaged_samples_cost_nothing(tmp_path: Path) -> None:
    """Each row of an epoch is visited once, so that all that was planted is found, and nothing else."""
    bad = planted(16)
    assert len(bad) == 16
    assert set(bad.values()) == set(WAYS)
    few, steps = write_shards(tmp_path / "data", bad), list[Any]()
    for workers, ranks in ((2, 1), (0, 2)):
        out = tmp_path / f"{ranks}"
        check(train(few, out, "--workers", workers, ranks=ranks), out, bad)
        steps.append([(row["skipped"], row["loss"]) for row in read_metrics(out / "metrics.jsonl")])
    assert np.allclose(*steps, rtol=0, atol=1e-6)


def test_many_damaged_samples_stop_the_run(tmp_path: Path) -> None:
    """Within one epoch, with a sentence; no rank and no worker is left waiting."""
    data = write_shards(tmp_path / "data", planted(100))
    run = train(data, tmp_path / "out", "--workers", 1, ranks=2)
    assert run.returncode == 1  # of torchrun
    said = next(line for line in run.stderr.splitlines() if "rows are bad, more than the allowed" in line)
    count = re.search(rf"(\d+) of the data set's {SAMPLES} rows are bad, more than the allowed 1\.00%: ", said)
    assert count is not None
    assert int(count[1]) > SAMPLES // 100
    assert "--bad-share" in said
    path = tmp_path / "out" / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    assert len(rows) < STEPS // 2  # 1% of 5% damaged samples come in the first fifth
    assert not (tmp_path / "out" / "model" / "model.safetensors").exists()
