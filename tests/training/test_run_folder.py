"""Whether a folder holds this run, what a run is made of, weights that do not fit, rows in a batch together."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kiloword.config.options import RunOptions
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed import launch
from kiloword.distributed.device import precision_of
from kiloword.files import write_json
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.model_folder import check_finite, check_fit, not_finite
from kiloword.training.loop import train
from kiloword.training.resolve import make_loader, micro_batches, open_sources, with_length
from kiloword.training.run_folder import RunFile, check_same_run, earlier, error_kept, run_file
from kiloword.training.setup import make_learner
from kiloword.training.signals import Stopped
from threads import over_threads

RECIPE = replace(default_recipe("siglip", "debug", ("scenes?n=70",)), batch=16, steps=20)
FILE = RunFile(recipe=RECIPE, data_fingerprint="f", data_sampled="s", features=("a",))


def changed(**recipe: Any) -> RunFile:
    return replace(FILE, recipe=replace(RECIPE, **recipe))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run of FILE that has done 10 steps."""
    write_json(tmp_path / "config.json", asdict(FILE))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "step-000000010.json").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("file", "extend", "named"),
    [
        (FILE, False, ()),
        (changed(micro=4, chunk=7, settings={"scale": 10.0}), False, ()),  # what changes no weight, and a default
        (changed(steps=30), True, ()),
        (changed(steps=10), True, ()),
        (changed(steps=9), True, ("10 steps",)),
        (changed(steps=30), False, ("steps", "--extend")),
        (changed(steps=30, seed=1), False, ("steps", "seed")),
        (changed(batch=32), True, ("batch", "16", "32")),
        (replace(FILE, data_fingerprint="g", data_sampled="t"), False, ("data_fingerprint", "a file")),
        (replace(FILE, code="c"), False, ("code", "method was changed")),
        (replace(FILE, data_sampled="t"), False, ("data_sampled", "images or texts")),
        (replace(FILE, features=("b",)), False, ("features", "feature store")),
        (changed(data=replace(RECIPE.data, sources=("./scenes?n=70",))), False, ()),  # the same data
    ],
)  # fmt: skip
def test_whether_a_folder_holds_this_run(out: Path, file: RunFile, extend: bool, named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=".*".join(named)) if named else nullcontext():
        check_same_run(out, FILE, file, extend)


def test_the_files_of_own_methods_belong_to_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    recipe, codes = replace(RECIPE, method="edited:preset+many"), set[str]()
    text = "from kiloword.methods.siglip import Settings, preset as made\ndef preset(): return made(Settings())\n"
    for end in ("", "# another loss"):
        (tmp_path / "edited.py").write_text(text + end)
        codes.add(run_file(recipe, open_sources(recipe)).code)
    assert len(codes) == 2


def test_a_folder_in_which_nothing_was_trained_is_free(out: Path) -> None:
    assert earlier(out) == FILE
    (out / "state" / "step-000000010.json").unlink()
    assert earlier(out) is None
    (out / "model").mkdir()
    (out / "model" / "model.safetensors").touch()
    assert earlier(out) == FILE


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ValueError("no room at http://me:secret@host/a"), "no room at http://"),
        (KeyError("k"), "KeyError: 'k'"),
        (Stopped("stopped"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_an_error_is_kept_for_those_who_watch(tmp_path: Path, error: BaseException, kept: str | None) -> None:
    with pytest.raises(type(error)), error_kept(tmp_path):
        raise error
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert len(texts) == (kept is not None)
    assert all(kept in text and "secret" not in text for text in texts if kept)


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ({"a": (3, 2), "c": (4,)}, ("missing b", "unknown c", "a is [3, 2] instead of [2, 3].")),
        ({"a": (), "b": (4,)}, ("a is [] instead of [2, 3]",)),
        ({"c": (1,), "a": (1,), "d": (1,)}, ("missing b", "unknown c", "1 more")),
    ],
)
def test_weights_that_do_not_fit_are_named(there: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=".*".join(("W do not fit F", *map(re.escape, named)))):
        check_fit({"a": (2, 3), "b": (4,)}, there, "W", "F")


def test_values_that_are_not_finite() -> None:
    tensors = {"a": torch.ones(2), "b": torch.tensor([1.0, float("inf")]), "c": torch.tensor([float("nan")])}
    tensors |= {"large": torch.full((4,), 3e38), "n": torch.tensor([1]), "empty": torch.empty(0)}  # whose sum overflows
    assert not_finite(tensors) == ["b", "c"]
    with pytest.raises(ValueError, match="weights in F cannot be used: b"):
        check_finite(tensors, "F")


def order(n: int = 40, batch: int = 8, **data: object) -> Order:
    """The order of a run on scenes."""
    recipe = replace(RECIPE, batch=batch, data=replace(RECIPE.data, sources=(f"scenes?n={n}",), **data))  # type: ignore[arg-type]
    tokenizer = Tokenizer.train(["a b"], 270)
    return make_loader(recipe, open_sources(recipe), preset("siglip"), tokenizer, RunOptions(workers=0)).order


def test_groups_stand_in_a_batch_together() -> None:
    """Each group whole in one batch; groups are shuffled, and their rows too."""
    steps = [order(together=4).batch_rows(step)[1].tolist() for step in range(5)]
    assert sorted(row for rows in steps for row in rows) == list(range(40))
    for rows in steps:
        assert {sum(row // 4 == group for row in rows) for group in {row // 4 for row in rows}} == {4}
    rows = [row for step in steps for row in step]
    assert [row // 4 for row in rows] != sorted(row // 4 for row in rows)
    assert order(41).steps_per_epoch == 5
    assert order(rows=16).steps_per_epoch == 2  # of the 40


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rows": 41}, "--rows is 41"),
        ({"rows": 16, "together": 4}, "--together 4"),
        ({"batch": 10, "together": 4}, "batch of 10"),
        ({"n": 41, "together": 4}, "41 rows"),
    ],
)
def test_orders_that_are_none(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        order(**given)


def test_a_batch_divides_over_ranks() -> None:
    assert over_threads(2, lambda: micro_batches(replace(RECIPE, micro=4))) == [2, 2]
    with pytest.raises(ValueError, match="16 does not divide over 3 ranks"):
        over_threads(3, lambda: micro_batches(RECIPE))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"steps": 7}, 7),
        ({"epochs": 2.0}, 8),  # four whole batches of 16 in 70 rows
        ({"epochs": 0.6}, 2),
        ({"samples": 95}, 5),
        ({}, 50),
        ({"most": 3}, 12),  # epochs of a run whose length nobody chose
        ({"most": 3, "steps": 50}, 50),
        ({"steps": 7, "epochs": 1.0}, "--steps and --epochs"),
        ({"epochs": float("nan")}, "--epochs nan"),
        ({"samples": 15}, "--samples 15"),
        ({"steps": 0}, "--steps 0"),
    ],
)
def test_lengths(options: dict[str, Any], steps: int | str) -> None:
    with pytest.raises(ValueError, match=steps) if isinstance(steps, str) else nullcontext():
        assert with_length(replace(RECIPE, steps=50), 70, **options).steps == steps


def test_fsdp_shards_blocks_and_so_compiles_them(tmp_path: Path) -> None:
    options = RunOptions(parallel="fsdp", compile="towers", device="cpu", quiet=True)
    with pytest.raises(ValueError, match="compile blocks"):
        train(RECIPE, tmp_path, options=options)


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp32", 4), ("bf16", 4), ("fp64", 8)])
def test_the_precision_of_weights(precision: Any, bytes_each: int) -> None:
    learner, started = make_learner(replace(RECIPE, precision=precision), preset("siglip", {}))
    assert {p.dtype.itemsize for p in learner.parameters()} == {bytes_each}
    assert started == ""
    with precision_of(precision, "cpu")():
        assert torch.is_autocast_enabled("cpu") == (precision == "bf16")


def test_torchrun_reports_why_a_rank_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file that it names, by its own keys."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    launch.explain("Rank 1 ended.")
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == told["extraInfo"]["py_callstack"] == "Rank 1 ended."
