"""What a run is made of: options reach what they are of, lengths are counted, towers freeze, groups fill batches."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from counting import opened_in
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives, launch
from kiloword.files import Lock
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.tensors import open_tensors
from kiloword.training import compilation, engine, meter, resolve, setup
from kiloword.training.resolve import make_loader, with_length
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
    ],
)
def test_lengths(options: dict[str, Any], steps: int) -> None:
    assert with_length(recipe(steps=50), 70, **options).steps == steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 7, "epochs": 1.0}, "--steps and --epochs both say how long"),
        ({"epochs": float("nan")}, "--epochs is nan"),
        ({"samples": 15}, "--samples 15 is 0 steps of batch 16 on 70 images"),
        ({"steps": 0}, "--steps 0 is 0 steps"),
    ],
)
def test_lengths_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_length(recipe(), 70, **options)


def test_options_reach_towers_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing and compilation always, shards with fsdp alone, and in this order."""
    calls: list[tuple[str, Any]] = []
    for place, name in (
        (compilation, "recompute"),
        (compilation, "compile_model"),
        (engine, "shard"),
        (engine, "materialise"),
    ):
        monkeypatch.setattr(
            place, name, lambda model, what=None, *, half=None, name=name: calls.append((name, what or half))
        )
    monkeypatch.setattr(engine, "check_same", lambda learner: calls.append(("check_same", None)))
    learner: Any = SimpleNamespace(model="model")
    setup.spread(learner, recipe(), RunOptions(checkpointing="blocks", compile="towers"))
    assert calls == [("recompute", "blocks"), ("compile_model", "towers")]
    calls.clear()
    setup.spread(learner, recipe(precision="bf16"), RunOptions(parallel="fsdp", compile="blocks"))
    assert [name for name, _ in calls] == ["recompute", "compile_model", "check_same", "shard", "materialise"]
    assert dict(calls)["shard"] is True
    assert dict(calls)["materialise"] == 3
    with pytest.raises(ValueError, match="exclude each other"):
        setup.spread(learner, recipe(), RunOptions(parallel="fsdp", compile="towers"))


def test_what_a_loader_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(resolve, "Loader", lambda *args, **named: made.append({"args": args, **named}))
    monkeypatch.setattr(collectives, "rank", lambda: 1)
    monkeypatch.setattr(collectives, "ranks", lambda: 2)

    class Source:
        name = "s"

        def __len__(self) -> int:
            return 70

    source = Source()
    for name, needs in (("siglip", ()), ("vqa", ("questions",))):
        run, method = recipe(name), preset(name, {})
        make_loader(run, source, method, "tokenizer", RunOptions(workers=3, timeout=77))  # type: ignore[arg-type]
        found = made.pop()
        given, order, data, text, size, tokenizer = found["args"]
        assert (given, data, size, tokenizer) == (source, run.data, run.model.image.size, "tokenizer")
        assert text == method.shape(run.model).text
        assert order.steps_per_epoch == 4
        assert tuple(found["transforms"]) == method.transforms
        assert found["questions"] == ("questions" in needs)
        assert found["truth"] is False
        assert (found["seed"], found["rank"], found["ranks"]) == (3, 1, 2)
        assert (found["workers"], found["timeout"]) == (3, 77)
        assert found["resize"] == run.model.preprocess.resize


@pytest.mark.parametrize(("freeze", "towers"), [("none", set()), ("image", {"image_tower"}), ("text", {"text_tower"})])
def test_frozen_towers(freeze: Any, towers: set[str]) -> None:
    learner, started = make_learner(recipe(freeze=(freeze,)), preset("siglip", {}))
    still = {name.split(".")[1] for name, p in learner.named_parameters() if not p.requires_grad}
    moving = {name.split(".")[1] for name, p in learner.named_parameters() if p.requires_grad}
    assert still == towers
    assert not towers & moving
    assert started == ""
    assert next(learner.parameters()).dtype.itemsize == 4
    double, _ = make_learner(recipe(precision="fp64"), preset("siglip", {}))
    assert all(p.dtype.itemsize == 8 for p in double.parameters())


def test_tensors_are_read_only_of_a_file_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)
    assert open_tensors(path)["a"].tolist() == [1.0, 1.0]
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged .* copy it again"):
        open_tensors(path)
    save_file({"a": torch.ones(2, dtype=torch.int64)}, path)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        open_tensors(path)


def test_an_optimizer_gets_the_scales_that_there_are() -> None:
    for method, count in (("siglip", 2), ("clip", 1)):
        head = make_learner(recipe(method), preset(method, {}))[0].model.head
        assert [id(p) for p in head.scales()] == [id(p) for p in (head.log_scale, head.bias)[:count]]


def test_torchrun_reports_why_a_rank_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file that it names, by its own keys; where none is named, or it cannot be written, nothing happens."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    launch.explain("Nobody asks.")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    launch.explain("Nowhere to write.")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    launch.explain("Rank 1 ended.")
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == told["extraInfo"]["py_callstack"] == "Rank 1 ended."
    assert int(told["extraInfo"]["timestamp"]) > 1.7e9


def test_the_slowest_rank_is_what_all_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_lists", lambda mine: [*mine, 0.75])
    run: Any = SimpleNamespace()
    assert meter.Meter(run, SimpleNamespace()).data_wait() == 0.75  # type: ignore[arg-type]


def test_a_lock_ends_with_what_holds_it(tmp_path: Path) -> None:
    """Without `release` too: its descriptor is closed, and the next one is had at once."""
    held = Lock(tmp_path)
    assert opened_in(tmp_path) == [f"{held.path}"]
    assert held.path.read_text().startswith(f"process {os.getpid()} on ")
    del held
    gc.collect()
    assert opened_in(tmp_path) == []
    with Lock(tmp_path, folder=tmp_path / "other") as lock:
        assert lock.path == tmp_path / "other" / ".lock"
        assert lock.path.exists()
    assert not lock.path.exists()
    assert opened_in(tmp_path) == []
