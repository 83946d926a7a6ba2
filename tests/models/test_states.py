"""States: what is written, what is read, what is damaged, and what training notices of it."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from torch import Tensor
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

import kiloword.training.saving as saving
from cases import mostly_slow
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives, launch
from kiloword.files import SaveError
from kiloword.methods.defaults import default_recipe
from kiloword.models.states import (
    Host,
    SavedState,
    StateShard,
    newest,
    shards_folder,
    steps_done,
    write_numbers,
    write_part,
)
from kiloword.models.tensors import CODES, spec_of, write_tensors
from kiloword.training.loop import RunOptions, train
from kiloword.verify.suite import over_ranks
from states import load_state

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


def recipe(steps: int = 8) -> Recipe:
    base = default_recipe("siglip", "debug", ("scenes?n=64",))
    data = replace(base.data, tokenizer_vocab=300)
    return replace(base, data=data, optim=replace(base.optim, ema=0.9), batch=16, steps=steps, seed=5)


NUMBERS = {
    "truncated": 3,
    "skipped_steps": [0, 0],
    "bad": {"bad": []},
    "since_row": {"reports": [], "captions": 0},
}


def put(folder: Path, step: int, tensors: dict[str, Tensor]) -> Path:
    """A whole state of one rank; returns its json."""
    shards = shards_folder(folder, step)
    write_numbers(folder, step, write_part(shards, Host().copy(tensors), 0, 1), NUMBERS)
    return shards.with_suffix(".json")


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert spec_of(found[name]) == spec_of(value)
        assert torch.equal(found[name], value), name


# Files


DTYPES = st.sampled_from(list(CODES))
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(DTYPES, SHAPES), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_is_the_one_that_the_library_writes(tmp_path: Path, kinds: dict[str, Any]) -> None:
    tensors = {name: (torch.randn(shape) * 3).to(dtype) for name, (dtype, shape) in kinds.items() if name.isprintable()}
    path = tmp_path / "file"
    checksum = write_tensors(path, tensors)
    assert path.read_bytes() == save(tensors)
    assert checksum == hashlib.sha256(path.read_bytes()).hexdigest()


def test_reading_needs_no_pickle_and_torchs_own_reader_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 5, some())
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    into = {name: torch.zeros_like(value) for name, value in some().items()}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp_load(into, storage_reader=HuggingFaceStorageReader(str(shards_folder(tmp_path, 5))), no_dist=True)
    same(into, some())

    def no(*args: Any, **options: Any) -> None:
        raise AssertionError("a pickle")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, no)
    found = load_state(tmp_path, pytest.fail)
    assert found is not None
    same(found[0], some())
    assert found[1]["truncated"] == 3


def test_tensors_that_all_ranks_have_are_spread_over_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = some() | {f"learner/{n}": torch.randn(1000 + n) for n in range(30)}
    files: dict[str, str] = {}
    monkeypatch.setattr(collectives, "ranks", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        part = Host().copy(tensors)
        assert 10 <= len(part.values) <= 16
        files |= write_part(tmp_path, part, rank, 3)
    monkeypatch.undo()
    stored = SavedState([tmp_path / name for name in files], {})
    assert sum(len(load_file(tmp_path / name)) for name in files) == len(tensors)
    same({name: stored.whole(name) for name in tensors}, tensors)


def test_whole_tensors_are_put_together_from_shards(tmp_path: Path) -> None:
    """Unequal ones; another file in the folder is none of the state's."""
    whole = torch.arange(20.0).view(10, 2)
    files: dict[str, str] = {}
    for rank, (start, end) in enumerate(((0, 4), (4, 8), (8, 10))):
        files |= write_part(tmp_path, StateShard({"x": whole[start:end]}, {"x": (start, 0)}), rank, 3)
    write_part(tmp_path, StateShard({"x": torch.zeros(5, 2)}, {"x": (5, 0)}), 1, 2)
    stored = SavedState([tmp_path / name for name in files], {})
    assert torch.equal(stored.whole("x"), whole)


def test_buffers_are_used_again_and_hold_what_was(tmp_path: Path) -> None:
    host, tensors = Host(), some()
    first = host.copy(tensors)
    places = {name: value.data_ptr() for name, value in first.values.items()}
    for value in tensors.values():
        value.zero_()
    same(first.values, some())
    assert {name: value.data_ptr() for name, value in host.copy(tensors).values.items()} == places


# Which state is taken


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def shard_of(path: Path) -> Path:
    return path.with_suffix("") / SHARD


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut": (lambda p: os.truncate(shard_of(p), 400), "checksum .* differs"),
    "bit flipped": (lambda p: flip(shard_of(p)), "checksum .* differs"),
    "shard missing": (lambda p: shard_of(p).unlink(), "missing"),
    "json cut": (lambda p: os.truncate(p, 30), ""),
    "json null": (lambda p: p.write_text("null"), ""),
    "json no files": (lambda p: p.write_text('{"step": 9}'), ""),
    "json a folder": (lambda p: (p.unlink(), p.mkdir()), ""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_falls_back_to_the_state_before(tmp_path: Path, name: str) -> None:
    harm, says = DAMAGE[name]
    before = some() | {"learner/scale": torch.full((1,), 7.0)}
    put(tmp_path, 7, before)
    harm(put(tmp_path, 9, some()))
    output: list[str] = []
    found = load_state(tmp_path, output.append)
    assert found is not None
    same(found[0], before)
    assert found[1]["step"] == 7
    (sentence,) = output
    assert sentence.startswith("state step-000000009 is damaged (")
    assert sentence.endswith("): falling back to the one before.")
    assert re.search(says, sentence), sentence


def rewritten(folder: Path, header: Callable[[dict[str, Any]], object], **files: str) -> None:
    """State 2 with another header of its tensors, and the right checksums."""
    path, shard = folder / "step-000000002.json", folder / "step-000000002" / SHARD
    raw = shard.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    document = json.loads(raw[8:end])
    header(document)
    text = json.dumps(document).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    files = {SHARD: hashlib.sha256(shard.read_bytes()).hexdigest(), **files}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": files}))


def placed(header: dict[str, Any], **offsets: Any) -> None:
    """Where the chunks of tensors are said to begin."""
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(
        {
            name: {"saved_offsets": offsets.get(name.split("/")[1], place["saved_offsets"])}
            for name, place in places.items()
        }
    )


WEIGHT = "learner/weight"
HOSTILE: dict[str, Callable[[Path], object]] = {
    "shape": lambda folder: rewritten(folder, lambda h: h[WEIGHT].update(shape=[10**6, 10**7])),
    "offsets in the file": lambda folder: rewritten(folder, lambda h: h[WEIGHT].update(data_offsets=[0, 10**12])),
    "places": lambda folder: rewritten(folder, lambda h: placed(h, weight="zz")),
    "a huge tensor": lambda folder: rewritten(folder, lambda h: placed(h, weight=[10**12, 0])),
    "before the beginning": lambda folder: rewritten(folder, lambda h: placed(h, weight=[-1, 0])),
    "another file": lambda folder: rewritten(folder, lambda h: None, **{"../step-000000001/x": "y"}),
    "a pipe": lambda folder: (
        (folder / "step-000000002" / SHARD).unlink(),
        os.mkfifo(folder / "step-000000002" / SHARD),
    ),
    "a json without an end": lambda folder: (
        (folder / "step-000000002.json").unlink(),
        (folder / "step-000000002.json").symlink_to("/dev/zero"),
    ),
    "a json of 3 GB": lambda folder: os.truncate(folder / "step-000000002.json", 3 << 30),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_strangers_state_is_damaged_and_no_more(tmp_path: Path, what: str) -> None:
    """With the right checksums: no endless reading, nothing allocated; the state before is taken."""
    put(tmp_path, 1, some())
    put(tmp_path, 2, some())
    HOSTILE[what](tmp_path)
    output: list[str] = []
    found = newest(tmp_path, output.append)
    assert found is not None
    assert found.numbers["step"] == 1
    (sentence,) = output
    assert "step-000000002" in sentence
    assert len(sentence) < 500


def test_moments_of_no_parameter_do_not_fit(tmp_path: Path) -> None:
    train(recipe(2), tmp_path, options=EVERY)
    moment = "optimizer/momentum_buffer:model.text_tower.blocks.1.mlp.proj.weight"

    def other(header: dict[str, Any]) -> None:
        header["optimizer/evil:x"] = header.pop(moment)
        places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        places["optimizer/evil:x"] = places.pop(moment)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)

    rewritten(tmp_path / "state", other)
    with pytest.raises(ValueError, match=r"tensors in .* do not fit this run: unknown optimizer/evil:x\."):
        train(recipe(4), tmp_path, options=replace(EVERY, extend=True))


def test_without_its_json_a_state_does_not_exist(tmp_path: Path) -> None:
    put(tmp_path, 7, some())
    put(tmp_path, 9, some()).unlink()
    found = load_state(tmp_path, pytest.fail)
    assert found is not None
    assert found[1]["step"] == steps_done(tmp_path) == 7
    assert load_state(tmp_path / "none", pytest.fail) is None


def test_all_damaged_is_refused(tmp_path: Path) -> None:
    for step in (7, 9):
        flip(shard_of(put(tmp_path, step, some())))
    output: list[str] = []
    with pytest.raises(ValueError, match=r"no state in .* can be read: all are damaged"):
        newest(tmp_path, output.append)
    assert len(output) == 2


# While training


def test_states_that_stay(tmp_path: Path) -> None:
    train(recipe(), tmp_path, options=replace(EVERY, save_every=1, keep_states=3))
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == sorted([f"step-{n:09d}" for n in (6, 7, 8)] + [f"step-{n:09d}.json" for n in (6, 7, 8)])


def test_the_model_folder_holds_averaged_weights(tmp_path: Path) -> None:
    """Averaged from what the method prepared on: a searched bias among it."""
    some = replace(recipe(2), method="siglip+bias-search")
    found = load_state(train(some, tmp_path, options=replace(EVERY, save_every=1)).parent / "state", pytest.fail)
    assert found is not None
    model, (state, _) = load_file(tmp_path / "model" / "model.safetensors"), found
    same(model, {name: state[f"average/model.{name}"] for name in model})
    assert not torch.equal(model["head.log_scale"], state["learner/model.head.log_scale"])
    assert float((model["head.bias"] - state["learner/model.head.bias"]).abs()) < 0.01
    assert abs(float(model["head.bias"]) + 10) > 0.1  # where it was before


def slowly(monkeypatch: pytest.MonkeyPatch, work: Callable[[int], None]) -> None:
    """`work` gets the number of a save, in its thread, before anything is written."""
    real, lock, calls = saving.write_part, threading.Lock(), [0]

    def write(*args: Any) -> dict[str, str]:
        with lock:
            calls[0] += 1
        work(calls[0])
        return real(*args)

    monkeypatch.setattr(saving, "write_part", write)


def test_training_goes_on_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the run as it was at its step, whatever has changed since."""
    train(recipe(6), tmp_path / "whole", options=replace(EVERY, save_every=3, keep_states=9))
    out, seen = tmp_path / "slow", []

    def until_two_steps_later(save: int) -> None:
        end = time.monotonic() + 200
        while save == 1 and steps(out) < 5 and time.monotonic() < end:
            time.sleep(0.002)
        seen.append(steps(out))

    slowly(monkeypatch, until_two_steps_later)
    train(recipe(6), out, options=replace(EVERY, save_every=3, keep_states=9))
    assert seen in ([5, 6], [6, 6])  # the sixth step may end while the first save looks at the fifth
    for step in (3, 6):
        one, other = ((tmp_path / run / "state" / f"step-{step:09d}.json").read_text() for run in ("whole", "slow"))
        assert one == other  # checksums of the tensors among it


def steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("save", mostly_slow([1, 2, 4], 1))
def test_an_error_in_the_thread_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: int) -> None:
    def full(number: int) -> None:
        if number == save:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        slowly(patch, full)
        with pytest.raises(SaveError, match=r"No space left on device.*What was there before is kept"):
            train(recipe(), tmp_path, options=EVERY)
    found = load_state(tmp_path / "state", pytest.fail)
    assert (0 if found is None else found[1]["step"]) == 2 * (save - 1)
    assert not [t for t in threading.enumerate() if t.name.startswith("save")]
    train(recipe(), tmp_path, options=EVERY)
    assert steps(tmp_path) == 8


def test_a_state_that_is_being_written_when_the_run_fails_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kiloword.training.loop as loop

    real, calls = loop.backward, []

    def backward(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("a bad batch")
        return real(*args)

    monkeypatch.setattr(loop, "backward", backward)
    slowly(monkeypatch, lambda number: time.sleep(0.3))
    with pytest.raises(ValueError, match="a bad batch"):
        train(recipe(), tmp_path, options=replace(EVERY, save_every=3))
    assert steps_done(tmp_path / "state") == 3


# Ranks


def sharded() -> dict[str, Tensor]:
    """More rows than ranks, fewer, one."""
    torch.manual_seed(1)
    return {f"learner/{n}": torch.randn(n, 3) for n in (1, 2, 3, 5, 8)} | {"learner/flat": torch.randn(3)}


def on_rank(folder: Path, read: bool) -> None:
    rank, ranks = collectives.rank(), collectives.ranks()
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = some() | {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in sharded().items()}
    if read:
        output: list[str] = []
        stored = newest(folder, output.append)
        assert stored is not None
        assert len(output) == 1
        empty = {name: torch.zeros_like(value) for name, value in tensors.items()}
        stored.load(empty)
        same({k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in empty.items()}, some() | sharded())
        plain = {k: torch.zeros_like(v) for k, v in (some() | sharded()).items()}
        stored.load(plain)
        same(plain, some() | sharded())
    for step in (1, 2):
        files: dict[str, str] = {}
        part = Host().copy(tensors)
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


def with_a_full_disk(rank: int, port: int, out: Path) -> None:
    """Rank 1 cannot write its part of the second state."""
    torch.set_num_threads(1)
    os.environ |= launch.announced(rank, 2, port)
    real, calls = saving.write_part, []

    def write(*args: Any) -> dict[str, str]:
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise SaveError("cannot write: No space left on device. What was there before is kept.")
        return real(*args)

    saving.write_part = write
    try:
        train(recipe(), out, options=EVERY)
    except ValueError as e:
        (out / f"said-{rank}").write_text(str(e))


@pytest.mark.slow
def test_a_full_disk_of_one_rank_ends_all_with_a_sentence(tmp_path: Path) -> None:
    spawn(with_a_full_disk, (launch.free_port(), tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in (0, 1):
        assert "No space left on device. What was there before" in (tmp_path / f"said-{rank}").read_text()
    assert steps_done(tmp_path / "state") == 2
    train(recipe(), tmp_path, options=EVERY)
    assert steps(tmp_path) == 8
