"""2N steps = N steps, a crash, and N more: every tensor, every row."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from cases import mostly_slow
from kiloword.models.states import states
from kiloword.training.loop import RunOptions, train
from runs import PowerCut, assert_same, cut_at, recipe, rows

EVERY = RunOptions(log_every=1, save_every=4, workers=0, quiet=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of twelve steps that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    train(recipe(12), out, options=EVERY)
    return out


@pytest.mark.parametrize("step", mostly_slow([2, 5, 7, 12], 1, 3))
def test_a_cut_run_goes_on_as_if_nothing_had_been(step: int, whole: Path, tmp_path: Path) -> None:
    cut_at(step, recipe(12), tmp_path, EVERY)
    train(recipe(12), tmp_path, options=EVERY)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 13))
    assert_same(tmp_path, whole)


def test_masks_within_a_part_of_the_run_depend_on_the_step_alone(tmp_path: Path) -> None:
    """Cut before they begin, and within: parameters that had no gradient so far have a state too."""
    run = recipe(method="sycoca", settings={"masks_from": 0.375, "masks_until": 0.75})
    every = replace(EVERY, save_every=2)
    train(run, tmp_path / "whole", options=every)
    for _ in range(2):
        cut_at(4, run, tmp_path / "cut", every)
    train(run, tmp_path / "cut", options=every)
    assert_same(tmp_path / "cut", tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "whole") if "mim" in row] == [4, 5, 6]


@pytest.mark.slow
def test_other_workers_and_other_saving(whole: Path, tmp_path: Path) -> None:
    cut_at(7, recipe(12), tmp_path, EVERY)
    train(recipe(12), tmp_path, options=replace(EVERY, workers=2, save_every=0))
    assert_same(tmp_path, whole)


def test_a_run_killed_in_its_last_validation(tmp_path: Path) -> None:
    run = recipe(2, micro=0)
    run = replace(run, data=replace(run.data, val=("scenes:test?n=8",)))

    def cut(*_: Any) -> None:
        if not torch.is_grad_enabled():
            raise PowerCut

    handle = register_module_forward_pre_hook(cut)
    with pytest.raises(PowerCut):
        train(run, tmp_path, options=EVERY)
    handle.remove()
    for _ in range(2):
        train(run, tmp_path, options=EVERY)
        assert ["val/image_retrieval_recall@1" in row for row in rows(tmp_path)] == [False, False, True]


def test_damaged_newest_state(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one before takes over, and the run says so."""
    cut_at(10, recipe(12), tmp_path, EVERY)
    newest = tmp_path / "state" / "step-000000008" / "shard-00001-of-00001.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[-1] ^= 1
    newest.write_bytes(raw)
    train(recipe(12), tmp_path, options=replace(EVERY, quiet=False))
    assert "step-000000008 is damaged" in capsys.readouterr().err
    assert_same(tmp_path, whole)


def test_extend(tmp_path: Path) -> None:
    """A longer run goes on from the shorter one's end; its schedule is the longer one's from there."""
    train(recipe(4), tmp_path, options=EVERY)
    first = rows(tmp_path)
    with pytest.raises(ValueError, match=r"steps.* 4 .* 8 .*--extend"):
        train(recipe(8), tmp_path, options=EVERY)
    train(recipe(8), tmp_path, options=replace(EVERY, extend=True))
    assert rows(tmp_path)[:4] == first
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    assert json.loads((tmp_path / "config.json").read_text())["recipe"]["steps"] == 8
    train(recipe(8), tmp_path, options=EVERY)


def test_rows_of_several_steps_are_those_of_the_whole_run(tmp_path: Path) -> None:
    """A state between two rows holds what its steps reported."""
    often = replace(EVERY, log_every=5, save_every=3)
    train(recipe(12), tmp_path / "whole", options=often)
    assert [row["step"] for row in rows(tmp_path / "whole")] == [5, 10, 12]
    for step in (5, 9):
        cut_at(step, recipe(12), tmp_path / "cut", often)
    train(recipe(12), tmp_path / "cut", options=often)
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_states_that_are_kept(tmp_path: Path) -> None:
    """As many as asked for: a kill in the last save left one too many. None goes while a newer one is damaged."""
    run = recipe(3)
    for keep in (3, 2):
        train(run, tmp_path, options=replace(EVERY, save_every=1, keep_states=keep))
    assert [path.name for path in states(tmp_path / "state")] == ["step-000000003.json", "step-000000002.json"]
    assert len([*(tmp_path / "state").iterdir()]) == 4
    (tmp_path / "state" / "step-000000003" / "shard-00001-of-00001.safetensors").write_bytes(b"x")
    cut_at(1, run, tmp_path, replace(EVERY, keep_states=1))
    assert (tmp_path / "state" / "step-000000002.json").is_file()
    train(run, tmp_path, options=replace(EVERY, keep_states=1))
    assert [path.name for path in states(tmp_path / "state")] == ["step-000000003.json"]


def test_files_that_a_crash_left_are_cleared(whole: Path, tmp_path: Path) -> None:
    for name in (
        "state/step-000000003/.shard-00001-of-00002.safetensors.77.kw.tmp",
        "state/step-000000003/shard-00002-of-00002.safetensors",
        "state/.step-000000003.json.77.kw.tmp",
        "model/.model.safetensors.77.kw.tmp",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 1000)
    train(recipe(12), tmp_path, options=EVERY)
    for folder in ("state", "model"):
        kept = ({str(path.relative_to(out)) for path in (out / folder).rglob("*")} for out in (tmp_path, whole))
        assert next(kept) == next(kept)
    assert_same(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["siglip", "sycoca"])
def test_kill_minus_9_at_three_moments(method: str, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    rng = random.Random(seed)
    run = f"train {method} --data scenes?n=512 --size debug --batch 16 --steps 60 --log-every 1 --save-every 3"
    words = [sys.executable, "-m", "kiloword", *run.split(), "--out"]
    subprocess.run([*words, str(tmp_path / "whole")], check=True, capture_output=True)
    out = tmp_path / "killed"
    for workers, moment in zip((0, 2, 0), sorted(rng.sample(range(1, 58), 3)), strict=True):
        done = kill_after([*words, str(out), "--workers", str(workers)], out, moment, rng.random() / 20)
        print(f"killed at step {done}, {workers} workers")
    subprocess.run([*words, str(out), "--workers", "2"], check=True, capture_output=True)
    assert [row["step"] for row in rows(out)] == list(range(1, 61))
    assert_same(out, tmp_path / "whole")


def kill_after(words: list[str], out: Path, step: int, delay: float) -> int:
    """Kill the run and its workers some milliseconds after `step`; returns the last step that it logged."""
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        while not (found := rows(out)) or found[-1]["step"] < step:
            assert process.poll() is None, "ended by itself"
            time.sleep(0.002)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    return int(rows(out)[-1]["step"])


# Runs of several ranks that are killed at random moments, by the script that does it a hundred times


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
