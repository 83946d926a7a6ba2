"""Runs of several ranks that are killed at random moments, by the script that does it a hundred times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "kill.py"


def script(out: Path, flags: str) -> str:
    seed = str(int.from_bytes(os.urandom(4), "little"))
    words = [sys.executable, str(SCRIPT), "--out", str(out), "--seed", seed, *flags.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    logs = "".join(f"\n{path}:\n{path.read_text()[-1500:]}" for path in out.glob("run-*.log"))
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-1000:]}{done.stderr[-2000:]}{logs}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_killed_runs_end_as_if_nothing_had_been(tmp_path: Path, parallel: str) -> None:
    said = script(tmp_path, f"--kills 3 --ranks 2 --steps 20 --torchrun 3 --parallel {parallel}")
    assert "as the whole run: 0.0e+00 apart" in said


@pytest.mark.slow
def test_killed_runs_go_on_with_other_ranks(tmp_path: Path) -> None:
    script(tmp_path, "--kills 3 --ranks 2 1 4 --steps 24 --torchrun 0 --precision fp64 --close 1e-6 --parallel fsdp")


@pytest.mark.slow
def test_no_rank_aborts_at_its_end(tmp_path: Path) -> None:
    said = script(tmp_path, "--exits 3 --ranks 4 --steps 2 --torchrun 3")
    assert "3 runs of 4 ranks ended: exit codes {0: " in said


@pytest.mark.slow
@pytest.mark.parametrize(("verbs", "every"), [("embed caption index index-in-cache mine import", 4), ("train", 16)])
def test_commands_killed_at_file_operations_go_on(tmp_path: Path, verbs: str, every: int) -> None:
    """Each run tries other operations: one of `every`, from a first one at random."""
    words = [*verbs.split(), "--every", str(every), "--offset", str(1 + os.urandom(1)[0] % every)]
    command = [sys.executable, str(SCRIPT.with_name("crash.py")), *words, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, f"{words}: {done.stdout[-1000:]}{done.stderr[-4000:]}"
    points = json.loads(done.stdout.splitlines()[-1])["points"]
    assert points.keys() == set(verbs.split())
    assert min(points.values()) >= 5, points
