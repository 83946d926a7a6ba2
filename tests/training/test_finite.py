"""Weights, moments and averages that are NaN or infinite are never saved over good ones, and never used."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

import kiloword
from cases import mostly_slow
from kiloword.cli.main import main
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives, launch
from kiloword.methods.defaults import default_recipe
from kiloword.models.model_folder import not_finite
from kiloword.models.states import steps_done
from kiloword.training.loop import RunOptions, train
from kiloword.training.optimizer import Optimizer
from states import load_state

SCENES = "scenes?n=64"
EVERY = RunOptions(log_every=1, save_every=2, quiet=True)
WEIGHT = "text_tower.blocks.1.mlp.proj.weight"


def recipe(steps: int = 6, name: str = "muon", **optim: Any) -> Recipe:
    base = default_recipe("siglip", "debug", (SCENES,))
    data = replace(base.data, tokenizer_vocab=300)
    changed = {"name": name, "ema": 0.9, **optim}
    return replace(base, data=data, optim=replace(base.optim, **changed), batch=16, steps=steps)


def finite(out: Path) -> bool:
    """Whether the newest state and the model folder hold finite values alone."""
    found = load_state(out / "state", pytest.fail)
    return found is not None and not not_finite(found[0]) and not not_finite(load_file(out / "model/model.safetensors"))


def spoil(monkeypatch: pytest.MonkeyPatch, what: str, at: int) -> None:
    """After step `at` (from 1), one value of the weights, the moments or the averages is NaN."""
    real = Optimizer.step

    def step(self: Optimizer, number: int, *args: Any) -> dict[str, torch.Tensor]:
        report = real(self, number, *args)
        if number + 1 == at:
            kinds = {"learner": list(self.names), "optimizer": list(self.state_dict().values())}
            with torch.no_grad():
                next(x for x in kinds[what] if x.dim() == 2)[-1, -1] = math.nan
        return report

    monkeypatch.setattr(Optimizer, "step", step)


@pytest.mark.parametrize("what", ["learner", "optimizer"])
@pytest.mark.parametrize("at", mostly_slow([3, 6], 1))
def test_no_such_state_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, at: int) -> None:
    """The state before stays, also at the end of the run, and the same command goes on from it."""
    with monkeypatch.context() as patch:
        spoil(patch, what, at)
        first = what if at == 6 else "learner"  # bad moments make the weights of the next step bad
        with pytest.raises(ValueError, match=rf"^{first}/\S+ is NaN or infinite .*--optim\.lr"):
            train(recipe(), tmp_path, options=EVERY)
    assert steps_done(tmp_path / "state") == (2 if at == 3 else 4)
    assert finite(tmp_path)
    train(recipe(), tmp_path, options=EVERY)
    assert steps_done(tmp_path / "state") == 6
    assert finite(tmp_path)


def test_a_skipped_step_moves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps the gradient of the last is NaN: weights and moments stay those of the state before."""
    real = Optimizer.step

    def step(self: Optimizer, number: int, *args: Any) -> dict[str, torch.Tensor]:
        next(p for p in self.names if p.grad is not None).grad[...] = 1.0 if number < 2 else math.nan
        return real(self, number, *args)

    monkeypatch.setattr(Optimizer, "step", step)
    train(recipe(3), tmp_path, options=EVERY)
    last = load_state(tmp_path / "state", pytest.fail)
    (tmp_path / "state" / "step-000000003.json").unlink()
    before = load_state(tmp_path / "state", pytest.fail)
    assert last is not None
    assert before is not None
    assert (before[1]["step"], last[1]["step"], last[1]["skipped_steps"]) == (2, 3, [1, 1])
    kept = [name for name in last[0] if not name.startswith("average/")]
    assert all(torch.equal(last[0][name], before[0][name]) for name in kept)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with one infinite weight."""
    base = default_recipe("coca", "debug", (SCENES,))
    out = tmp_path_factory.mktemp("spoiled")
    model = train(replace(base, data=replace(base.data, tokenizer_vocab=300), batch=16, steps=1), out, options=EVERY)
    weights = load_file(model / "model.safetensors")
    weights[WEIGHT][1, 2] = math.inf
    save_file(weights, model / "model.safetensors")
    return model


@pytest.mark.parametrize(
    "words",
    [
        "eval retrieval MODEL --data scenes:test?n=8",
        "embed MODEL --data scenes?n=64 --out OUT",
        "train clip --data scenes?n=64 --out OUT --init MODEL",
    ],
)
def test_no_verb_uses_such_weights(
    spoiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.replace("MODEL", str(spoiled)).replace("OUT", str(tmp_path / "out")).split())
    assert f"{WEIGHT} is NaN or infinite (1 of" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/model/*.safetensors"))
    with pytest.raises(ValueError, match=WEIGHT):
        kiloword.load(spoiled)


# Settings at their limits


LARGEST = {
    "lr": 100.0,
    "muon_lr": 100.0,
    "weight_decay": 100.0,
    "muon_weight_decay": 100.0,
    "eps": 1.0,
    "final_lr": 100.0,
    "clip": 0.0,
    "explode": 0.0,
    "scale_lr": 1e4,
    "text_lr": 1e4,
    "ema": 1.0,
}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("optim", "init_std"), [(LARGEST, 100.0), ({"lr": math.nan}, 1.0), ({"beta2": math.nextafter(1, 0)}, 0.0)]
)
def test_any_settings_end_with_a_finite_model_or_a_message(
    tmp_path: Path, name: str, optim: dict[str, float], init_std: float
) -> None:
    """Exit 0 and a finite model, or a message and the last finite state."""
    made = recipe(8, name, **optim)
    image = replace(made.model.image, init_std=init_std)
    made = replace(made, model=replace(made.model, image=image), batch=8)
    try:
        train(made, tmp_path, options=replace(EVERY, max_skipped_steps=3))
    except ValueError as e:
        said = str(e)
        assert "The run stops" in said or "expected" in said
    else:
        assert steps_done(tmp_path / "state") == 8
    if steps_done(tmp_path / "state"):
        assert finite(tmp_path)


# Ranks


def with_nan_on_one_rank(rank: int, port: int, out: Path) -> None:
    """After step 3, rank 1's rows alone of a sharded matrix hold NaN."""
    torch.set_num_threads(1)
    os.environ |= launch.announced(rank, 2, port)
    real = Optimizer.step

    def step(self: Optimizer, number: int, *args: Any) -> dict[str, torch.Tensor]:
        report = real(self, number, *args)
        if number == 2 and rank == 1:
            sharded = self.sharded[f"model.{WEIGHT}"]
            assert isinstance(sharded, DTensor)
            with torch.no_grad():
                collectives.local(sharded).fill_(math.nan)
        return report

    Optimizer.step = step  # type: ignore[method-assign]
    try:
        train(recipe(), out, options=replace(EVERY, parallel="fsdp"))
    except ValueError as e:
        (out / f"said-{rank}").write_text(str(e))


@pytest.mark.slow
def test_nan_on_one_rank_ends_all(tmp_path: Path) -> None:
    spawn(with_nan_on_one_rank, (launch.free_port(), tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in (0, 1):
        assert f"learner/model.{WEIGHT} is NaN or infinite" in (tmp_path / f"said-{rank}").read_text()
    assert steps_done(tmp_path / "state") == 2
    assert finite(tmp_path)
