"""States: what is written, what is read, what is damaged, and what training notices of it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kiloword.distributed import collectives
from kiloword.files import SaveError
from kiloword.models.states import copy_part, newest, shards_folder, steps_done, write_numbers, write_part
from kiloword.models.tensors import write_tensors
from kiloword.training.loop import RunOptions, train
from kiloword.verify.suite import over_ranks
from runs import assert_equal, at_saves, cut_at, load_state, recipe, rows, state

EVERY = RunOptions(log_every=1, save_every=2, quiet=True)
SHARD = "shard-00001-of-00001.safetensors"


def some() -> dict[str, Tensor]:
    """Every dtype and shape that a state may hold, and some that it does not yet."""
    torch.manual_seed(0)
    return {
        "learner/weight": torch.randn(7, 3),
        "learner/tall": torch.randn(3, 7).t(),
        "learner/double": torch.randn(5, dtype=torch.float64),
        "learner/half": torch.randn(4).bfloat16(),
        "learner/mask": torch.tensor([True, False, True]),
        "optimizer/step:weight": torch.tensor(17.0),
        "learner/position": torch.arange(11),
        "learner/scale": torch.ones(1),
    }


NUMBERS = {"truncated": 3, "skipped_steps": [0, 0], "bad": {"bad": []}, "since_row": {"reports": [], "captions": 0}}


def put(folder: Path, step: int, tensors: dict[str, Tensor]) -> Path:
    """A whole state of one rank; returns its json."""
    shards = shards_folder(folder, step)
    write_numbers(folder, step, write_part(shards, copy_part(tensors, {}), 0, 1), NUMBERS)
    return shards.with_suffix(".json")


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tensors = some() | {dtype: torch.ones(3, 2).to(getattr(torch, dtype)) for dtype in ("int8", "int16", "float16")}
    tensors |= {"\u00e9\n": torch.zeros(0, 4, dtype=torch.uint8)}
    path = tmp_path / "file"
    checksum = write_tensors(path, tensors, {"a": "b"})
    assert_equal(load_file(path), tensors)
    assert path.read_bytes()[0] % 8 == 0  # length of the header: the tensors behind it are aligned
    assert checksum == hashlib.sha256(path.read_bytes()).hexdigest()


def test_torchs_own_reader_reads_a_state(tmp_path: Path) -> None:
    put(tmp_path, 5, some())
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    into = {name: torch.zeros_like(value) for name, value in some().items()}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp_load(into, storage_reader=HuggingFaceStorageReader(str(shards_folder(tmp_path, 5))), no_dist=True)
    assert_equal(into, some())


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def shard_of(path: Path) -> Path:
    return path.with_suffix("") / SHARD


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shard cut": lambda path: os.truncate(shard_of(path), 400),
    "bit flipped": lambda path: flip(shard_of(path)),
    "shard missing": lambda path: shard_of(path).unlink(),
    "json cut": lambda path: os.truncate(path, 30),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_falls_back_to_the_state_before(tmp_path: Path, name: str) -> None:
    before = some() | {"learner/scale": torch.full((1,), 7.0)}
    put(tmp_path, 7, before)
    DAMAGE[name](put(tmp_path, 9, some()))
    output: list[str] = []
    found = load_state(tmp_path, output.append)
    assert found is not None
    assert_equal(found[0], before)
    assert found[1]["step"] == 7
    assert [("step-000000009 is damaged" in said, len(said) < 500) for said in output] == [(True, True)]
    assert steps_done(tmp_path) == 9
    (tmp_path / "step-000000009.json").unlink()  # without its json it does not exist
    assert load_state(tmp_path, pytest.fail) is not None
    assert steps_done(tmp_path) == 7


# While training


def test_the_model_folder_holds_averaged_weights(tmp_path: Path) -> None:
    """Averaged from what the method prepared on: a searched bias among it."""
    train(recipe(2, method="siglip+bias-search"), tmp_path, options=replace(EVERY, save_every=1))
    model, tensors = load_file(tmp_path / "model" / "model.safetensors"), state(tmp_path)[0]
    assert_equal(model, {name: tensors[f"average/model.{name}"] for name in model})
    assert not torch.equal(model["head.log_scale"], tensors["learner/model.head.log_scale"])
    assert float((model["head.bias"] - tensors["learner/model.head.bias"]).abs()) < 0.01
    assert abs(float(model["head.bias"]) + 10) > 0.1  # where it was before


def test_training_goes_on_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the run as it was at its step, whatever has changed since."""
    train(recipe(6), tmp_path / "whole", options=replace(EVERY, save_every=3, keep_states=9))
    out, seen = tmp_path / "slow", []

    def until_two_steps_later(save: int) -> None:
        end = time.monotonic() + 200
        while save == 1 and len(rows(out)) < 5 and time.monotonic() < end:
            time.sleep(0.002)
        seen.append(len(rows(out)))

    at_saves(monkeypatch, until_two_steps_later)
    train(recipe(6), out, options=replace(EVERY, save_every=3, keep_states=9))
    assert seen in ([5, 6], [6, 6])  # the sixth step may end while the first save looks at the fifth
    for step in (3, 6):
        one, other = ((tmp_path / run / "state" / f"step-{step:09d}.json").read_text() for run in ("whole", "slow"))
        assert one == other  # checksums of the tensors among it


def test_a_state_that_is_being_written_when_the_run_fails_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_saves(monkeypatch, lambda number: time.sleep(0.3))
    cut_at(4, recipe(), tmp_path, replace(EVERY, save_every=3))
    assert steps_done(tmp_path / "state") == 3


def on_names(patch: pytest.MonkeyPatch, work: Callable[[Path], object]) -> None:
    """`work` gets each file that has received its name."""
    real = Path.replace
    patch.setattr(Path, "replace", lambda self, to: (real(self, to), work(Path(to)))[0])


def test_a_state_exists_once_all_of_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors, rows before it, then the model, then the numbers."""
    events, fsync = list[str](), os.fsync

    def synced(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("metrics.jsonl"):
            events.append("rows")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    on_names(monkeypatch, lambda path: events.append(re.sub(r"\d{3,}", "", path.relative_to(tmp_path).as_posix())))
    train(recipe(2), tmp_path, options=EVERY)
    saved = events[events.index("state/step-/shard--of-.safetensors") :]
    wanted = ["state/step-/shard--of-.safetensors", "rows", "model/model.safetensors", "state/step-.json"]
    assert [event for event in saved if event in wanted][:4] == wanted


def test_a_part_that_rank_0_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_names(monkeypatch, lambda path: path.unlink() if path.name.startswith("shard-") else None)
    with pytest.raises(SaveError, match="--out must be a folder that all ranks share"):
        train(recipe(2), tmp_path, options=EVERY)
    assert steps_done(tmp_path / "state") == 0
    assert not (tmp_path / "model" / "model.safetensors").exists()


# Ranks


def sharded() -> dict[str, Tensor]:
    """More rows than ranks, fewer, one."""
    torch.manual_seed(1)
    return {f"learner/{n}": torch.randn(n, 3) for n in (1, 2, 3, 5, 8)} | {"learner/flat": torch.randn(3)}


def on_rank(folder: Path, read: bool) -> None:
    rank, ranks = collectives.rank(), collectives.ranks()
    mesh, plain = init_device_mesh("cpu", (ranks,)), some() | sharded()
    tensors = some() | {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in sharded().items()}
    if read:
        output: list[str] = []
        stored = newest(folder, output.append)
        assert stored is not None
        assert len(output) == 1
        for into in (tensors, plain):
            empty = {name: torch.zeros_like(value) for name, value in into.items()}
            stored.load(empty)
            assert_equal({k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in empty.items()}, plain)
    for step in (1, 2):
        files: dict[str, str] = {}
        part = copy_part(tensors, {})
        for made in collectives.all_lists([write_part(shards_folder(folder, step), part, rank, ranks)]):
            files |= made
        if rank == 0:
            write_numbers(folder, step, files, NUMBERS)
    collectives.wait()
    if rank == 0:
        flip(folder / "step-000000002" / f"shard-00002-of-0000{ranks}.safetensors")


@pytest.mark.slow
def test_states_of_any_number_of_ranks_are_read_on_any_other(tmp_path: Path) -> None:
    """The newest one is damaged in a file that another rank than 0 checks: all take the one before."""
    for n, ranks in enumerate((4, 3)):
        over_ranks(ranks, on_rank, tmp_path, n > 0)
