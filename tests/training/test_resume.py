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
from safetensors.torch import load_file

import kiloword.training.loop as loop
from cases import mostly_slow
from kiloword.config.recipes import AugmentConfig, Recipe
from kiloword.methods.defaults import default_recipe
from kiloword.models.states import states
from kiloword.training.log import read_metrics
from kiloword.training.loop import RunOptions, train
from states import load_state

TIMED = ("pairs_per_s", "loader_pairs_per_s", "data_wait", "slowest_data_wait", "save_s", "memory", "time", "restarts")
EVERY = RunOptions(log_every=1, save_every=4, quiet=True)


class PowerCut(Exception):
    """Ends a run where nothing can be saved any more."""


def recipe(steps: int = 12, **more: Any) -> Recipe:
    """Everything that a state must hold: Muon and AdamW, an average, random crops, several captions, micro-batches."""
    base = default_recipe("siglip", "debug", ("scenes?n=64&captions=3",))
    data = replace(base.data, tokenizer_vocab=300, augment=AugmentConfig(jitter=0.5))
    optim = replace(base.optim, ema=0.9)
    return replace(base, data=data, optim=optim, batch=16, micro=8, steps=steps, seed=5, **more)


def state(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    found = load_state(out / "state", pytest.fail)
    assert found is not None
    return found


def rows(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(out / "metrics.jsonl")]


def assert_same(out: Path, reference: Path) -> None:
    """Weights, optimizer, average, counters, the model folder and all rows of metrics."""
    (tensors, numbers), (expected, expected_numbers) = state(out), state(reference)
    kinds = {name.split(":")[0] for name in expected if name.startswith("optimizer/")}
    assert kinds >= {"optimizer/momentum_buffer", "optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step"}
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value), name
    assert numbers == expected_numbers
    model, other = (load_file(folder / "model" / "model.safetensors") for folder in (out, reference))
    assert model.keys() == other.keys()
    assert all(torch.equal(model[name], other[name]) for name in other)
    assert rows(out) == rows(reference)


def cut_at(
    monkeypatch: pytest.MonkeyPatch, step: int, run: Recipe, out: Path, workers: int = 0, options: RunOptions = EVERY
) -> None:
    """Run until the middle of `step` (from 1, of this call), where the lights go out."""
    real, calls = loop.backward, []

    def backward(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == step:
            raise PowerCut
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "backward", backward)
        with pytest.raises(PowerCut):
            train(run, out, options=replace(options, workers=workers))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of twelve steps that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    train(recipe(), out, options=EVERY)
    return out


@pytest.mark.parametrize("step", mostly_slow([2, 5, 7, 12], 1, 3))
def test_a_cut_run_goes_on_as_if_nothing_had_been(
    step: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_at(monkeypatch, step, recipe(), tmp_path)
    train(recipe(), tmp_path, options=EVERY)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 13))
    assert_same(tmp_path, whole)


def test_masks_within_a_part_of_the_run_depend_on_the_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before they begin, and within: parameters that had no gradient so far have a state too."""
    run = replace(recipe(8), method="sycoca", settings={"masks_from": 0.375, "masks_until": 0.75})
    every = replace(EVERY, save_every=2)
    train(run, tmp_path / "whole", options=every)
    cut_at(monkeypatch, 4, run, tmp_path / "cut", options=every)
    cut_at(monkeypatch, 4, run, tmp_path / "cut", options=every)
    train(run, tmp_path / "cut", options=every)
    assert_same(tmp_path / "cut", tmp_path / "whole")
    assert [row["step"] for row in rows(tmp_path / "whole") if "mim" in row] == [4, 5, 6]


@pytest.mark.slow
def test_other_workers_and_other_saving(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_at(monkeypatch, 7, recipe(), tmp_path)
    train(recipe(), tmp_path, options=replace(EVERY, workers=2, save_every=0))
    assert_same(tmp_path, whole)


def test_a_run_killed_in_its_last_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(run: Any) -> Any:
        raise PowerCut

    some = recipe(steps=2)
    some = replace(some, data=replace(some.data, val=("scenes:test?n=8",)))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "validate", cut)
        with pytest.raises(PowerCut):
            train(some, tmp_path, options=EVERY)
    for _ in range(2):
        train(some, tmp_path, options=EVERY)
        assert ["val/image_retrieval_recall@1" in row for row in rows(tmp_path)] == [False, False, True]


def test_damaged_newest_state(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before takes over, and the run says so."""
    cut_at(monkeypatch, 10, recipe(), tmp_path)
    newest = tmp_path / "state" / "step-000000008" / "shard-00001-of-00001.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[-1] ^= 1
    newest.write_bytes(raw)
    train(recipe(), tmp_path, options=replace(EVERY, quiet=False))
    assert "step-000000008 is damaged" in capsys.readouterr().err
    assert_same(tmp_path, whole)


def test_extend(tmp_path: Path) -> None:
    """A longer run goes on from the shorter one's end; its schedule is the longer one's from there."""
    train(recipe(4), tmp_path, options=EVERY)
    first = rows(tmp_path)
    with pytest.raises(ValueError, match=r"steps is 4 there, 8 here.*Use --extend"):
        train(recipe(8), tmp_path, options=EVERY)
    train(recipe(8), tmp_path, options=replace(EVERY, extend=True))
    assert rows(tmp_path)[:4] == first
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    assert json.loads((tmp_path / "config.json").read_text())["recipe"]["steps"] == 8
    train(recipe(8), tmp_path, options=EVERY)


def test_rows_of_several_steps_are_those_of_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state between two rows holds what its steps reported."""
    often = RunOptions(log_every=5, save_every=3, quiet=True)
    train(recipe(), tmp_path / "whole", options=often)
    assert [row["step"] for row in rows(tmp_path / "whole")] == [5, 10, 12]
    for step in (5, 9):
        cut_at(monkeypatch, step, recipe(), tmp_path / "cut", options=often)
    train(recipe(), tmp_path / "cut", options=often)
    assert_same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("keep", mostly_slow([1, 2], 0))
def test_a_kill_in_the_last_save_leaves_no_state_too_many(tmp_path: Path, keep: int) -> None:
    """The run has ended: nothing is saved any more when the same command comes again."""
    for states_kept in (3, keep):
        train(recipe(), tmp_path, options=replace(EVERY, keep_states=states_kept))
    kept = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert kept == [f"step-{step:09d}{end}" for step in (4, 8, 12)[-keep:] for end in ("", ".json")]


def test_a_state_before_a_damaged_one_is_not_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(recipe(), tmp_path, options=EVERY)
    (tmp_path / "state" / "step-000000012" / "shard-00001-of-00001.safetensors").write_bytes(b"x")
    cut_at(monkeypatch, 1, recipe(), tmp_path, options=replace(EVERY, keep_states=1))
    assert (tmp_path / "state" / "step-000000008.json").is_file()
    cut_at(monkeypatch, 2, recipe(), tmp_path, options=replace(EVERY, keep_states=1, save_every=1))
    assert [path.name for path in states(tmp_path / "state")] == ["step-000000009.json"]


def test_files_that_a_crash_left_are_cleared(whole: Path, tmp_path: Path) -> None:
    for name in ("3/.shard-00001-of-00002.safetensors.77.kw.tmp", "3/shard-00002-of-00002.safetensors"):
        path = tmp_path / "state" / f"step-00000000{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    (tmp_path / "state" / ".step-000000003.json.77.kw.tmp").write_bytes(b"x" * 1000)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".model.safetensors.77.kw.tmp").write_bytes(b"x" * 1000)
    train(recipe(), tmp_path, options=EVERY)
    kept = {str(path.relative_to(tmp_path / "state")) for path in (tmp_path / "state").rglob("*") if path.is_file()}
    assert kept == {f"step-{n:09d}{end}" for n in (8, 12) for end in (".json", "/shard-00001-of-00001.safetensors")}
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(os.listdir(whole / "model"))
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
