"""`bench/kill.py`: what counts as the same run, and that nothing of a run outlives it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import kill
from kiloword.models.states import copy_part, shards_folder, write_numbers, write_part
from kiloword.models.tensors import write_tensors

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def alike(tmp_path: Path) -> Any:
    """Compares two runs, each given by its tensor and its losses."""

    def compare(mine: tuple[list[float], list[float]], theirs: tuple[list[float], list[float]], close: float) -> Any:
        for name, (values, losses) in {"mine": mine, "theirs": theirs}.items():
            model, shards = tmp_path / name / "model", shards_folder(tmp_path / name / "state", 1)
            tensors = {"learner/towers.weight": torch.tensor(values)}
            write_numbers(shards.parent, 1, write_part(shards, copy_part(tensors, {}), 0, 1), {})
            write_tensors(model / "model.safetensors", {"head.bias": torch.zeros(1)})
            for file in ("config.json", "tokenizer.json"):
                (model / file).write_text("{}")
            rows = ({"step": step, "loss": loss} for step, loss in enumerate(losses, 1))
            (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return kill.compare(tmp_path / "mine", tmp_path / "theirs", close)

    return compare


def test_runs_that_agree(alike: Any) -> None:
    assert alike(([1, INF], [2, 3]), ([1, INF], [2, 3]), 0.0) == (0, 2)
    assert alike(([1, INF], [2, 3]), ([1, INF], [2, 3.25]), 0.5) == (0.25, 2)
    assert alike(([], [2]), ([], [2]), 0.5) == (0, 1)


@pytest.mark.parametrize("close", [0.0, 0.5])
def test_what_is_apart_is_named(alike: Any, close: float) -> None:
    for mine, theirs in (([1.0, 2.0], [1.0, 3.0]), ([NAN], [1.0]), ([1.0], [NAN]), ([NAN], [NAN]), ([1.0], [INF])):
        with pytest.raises(AssertionError, match=r"towers\.weight|checksums"):
            alike((mine, [2]), (theirs, [2]), close)
    for one, other in ((2.0, 3.0), (NAN, 2.0), (2.0, NAN), (NAN, NAN)):
        with pytest.raises(AssertionError, match=r"step.* 2\b"):
            alike(([1], [1, one]), ([1], [1, other]), close)


def living(pids: list[int]) -> list[int]:
    """Neither gone nor dead."""
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in stats.items() if stat.exists() and ") Z " not in stat.read_text()]


CODE = """
import subprocess, sys, time
rank = subprocess.Popen(["sleep", "300"], start_new_session=True)
print(rank.pid, file=open(sys.argv[1], "w"), flush=True)
time.sleep(300)
"""


@dataclass(frozen=True)
class Hanging(kill.Start):
    """A start whose one rank is in a session of its own, as torchrun's are."""

    pids: list[int] = field(default_factory=list)

    def begin(self) -> list[int]:
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", CODE, f"{self.log}"], os.environ, setpgroup=0)
        until = time.monotonic() + 60
        while not self.log.exists() or not self.log.read_text().endswith("\n"):
            assert time.monotonic() < until
            time.sleep(0.01)
        self.pids.extend([pid, int(self.log.read_text())])
        return [pid]


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr(kill, "PATIENCE_S", 0.2)
    start = Hanging(tmp_path, [], 1, True, tmp_path / "log")
    yield start
    for pid in living(start.pids):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [True, False])
def test_what_hangs_leaves_no_ranks(hanging: Hanging, end: bool) -> None:
    late = next(seed for seed in range(100) if random.Random(seed).random() > 0.1)  # not killed while it starts
    with pytest.raises(SystemExit if end else AssertionError, match="hangs"):
        kill.finish(hanging) if end else kill.kill(hanging, random.Random(late))
    assert len(hanging.pids) == 2
    assert living(hanging.pids) == []


def test_an_interrupt_leaves_no_ranks(hanging: Hanging) -> None:
    with pytest.raises(KeyboardInterrupt), kill.running(hanging):
        raise KeyboardInterrupt
    assert living(hanging.pids) == []
