"""Weights, moments and averages that are NaN or infinite are never saved over good ones, and never used."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import spawn

import kiloword
from cases import mostly_slow
from commands import refused
from folders import model_folder
from kiloword.distributed import launch
from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.method import Method
from kiloword.methods.registry import preset
from kiloword.models.model_folder import not_finite
from kiloword.models.states import steps_done
from kiloword.training.loop import RunOptions, train
from kiloword.types import PairBlocks, Positives, Total
from runs import assert_equal, at_step, recipe, rows, state

EVERY = RunOptions(log_every=1, save_every=2, quiet=True)
WEIGHT = "text_tower.blocks.1.mlp.proj.weight"


def finite(out: Path) -> bool:
    """Whether the newest state and the model folder hold finite values alone."""
    return not not_finite(state(out)[0]) and not not_finite(load_file(out / "model" / "model.safetensors"))


def spoil(what: str, optimizer: torch.optim.Optimizer) -> None:
    """One value of a weight or of its moments is NaN."""
    weight = next(p for p in optimizer.param_groups[0]["params"] if p.dim() == 2)
    (weight.data if what == "learner" else optimizer.state[weight]["exp_avg"])[-1, -1] = math.nan


@pytest.mark.parametrize("what", ["learner", "optimizer"])
@pytest.mark.parametrize("at", mostly_slow([3, 6], 1))
def test_no_such_state_is_saved(tmp_path: Path, what: str, at: int) -> None:
    """The state before stays, also at the end of the run, and the same command goes on from it."""
    first = what if at == 6 else "learner"  # bad moments make the weights of the next step bad
    wrong = pytest.raises(ValueError, match=rf"^{first}/\S+ is NaN or infinite .*--optim\.lr")
    with at_step(at, partial(spoil, what), after=True), wrong:
        train(recipe(6), tmp_path, options=EVERY)
    assert steps_done(tmp_path / "state") == (2 if at == 3 else 4)
    assert finite(tmp_path)
    train(recipe(6), tmp_path, options=EVERY)
    assert steps_done(tmp_path / "state") == 6
    assert finite(tmp_path)


def losing(lost: Callable[[int], bool], times: float = math.nan) -> Method:
    """SigLIP whose loss is multiplied by `times` in the steps, counted from 1, for which `lost` is true."""
    steps = itertools.count(1)

    def loss(pairs: PairBlocks, positives: Positives) -> Total:
        total = sigmoid_loss(pairs, positives)
        return Total(total.sum * (times if lost(next(steps)) else 1.0), total.count)

    return replace(preset("siglip"), pair_loss=loss)


def loses_the_third() -> Method:
    return losing(lambda step: step == 3, 1e30)  # the loss is finite, the norm of its gradient is not


def loses_all_but_the_third() -> Method:
    return losing(lambda step: step != 3)


def test_a_skipped_step_moves_no_weights(tmp_path: Path) -> None:
    train(recipe(3, method="test_finite:loses_the_third"), tmp_path, options=EVERY)
    last, numbers = state(tmp_path)
    assert numbers["skipped_steps"] == [1, 1]
    (tmp_path / "state" / "step-000000003.json").unlink()
    before = state(tmp_path)[0]
    assert_equal(*({k: v for k, v in of.items() if not k.startswith("average/")} for of in (last, before)))


def test_bad_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    """Good steps between them start the count anew, and have the means of a row for themselves."""
    run = recipe(9, method="test_finite:loses_all_but_the_third")
    with pytest.raises(ValueError, match=r"step 6: loss nan, .*--max-skipped-steps.*--optim\.lr"):
        train(run, tmp_path, options=replace(EVERY, log_every=4, max_skipped_steps=3))
    (first,) = rows(tmp_path)
    assert (first["step"], first["skipped_steps"]) == (4, 3)
    assert math.isfinite(first["loss"])


@pytest.mark.parametrize(
    "words",
    [
        "eval retrieval MODEL --data scenes:test?n=8",
        "embed MODEL --data scenes?n=64 --out OUT",
        "train clip --data scenes?n=64 --out OUT --init MODEL",
    ],
)
def test_no_verb_uses_such_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    model = model_folder(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights[WEIGHT][1, 2] = math.inf
    save_file(weights, model / "model.safetensors")
    said = refused(capsys, *words.replace("MODEL", str(model)).replace("OUT", str(tmp_path / "out")).split())
    assert f"{WEIGHT} is NaN or infinite (1 of" in said
    assert not list(tmp_path.glob("out/model/*.safetensors"))
    with pytest.raises(ValueError, match=WEIGHT):
        kiloword.load(model)


LARGEST = dict.fromkeys(("lr", "muon_lr", "weight_decay", "muon_weight_decay", "final_lr"), 100.0)
LARGEST |= {"scale_lr": 1e4, "text_lr": 1e4, "eps": 1.0, "ema": 1.0, "clip": 0.0, "explode": 0.0}


@pytest.mark.parametrize(
    ("optim", "init_std"), [(LARGEST, 100.0), ({"lr": math.nan}, 1.0), ({"beta2": math.nextafter(1, 0)}, 0.0)]
)
def test_settings_at_their_limits_end_with_a_finite_model_or_a_message(
    tmp_path: Path, optim: dict[str, float], init_std: float
) -> None:
    made = recipe()
    image = replace(made.model.image, init_std=init_std)
    made = replace(made, model=replace(made.model, image=image), optim=replace(made.optim, **optim))  # type: ignore[arg-type]
    try:
        train(made, tmp_path, options=replace(EVERY, max_skipped_steps=3))
    except ValueError as e:
        said = str(e)
        assert "The run stops" in said or "expected" in said
    else:
        assert steps_done(tmp_path / "state") == 8
    if steps_done(tmp_path / "state"):
        assert finite(tmp_path)


def with_nan_on_one_rank(rank: int, port: int, out: Path) -> None:
    """After step 3, rank 1 holds NaN in its rows of a sharded matrix."""
    torch.set_num_threads(1)
    os.environ |= launch.announced(rank, 2, port)
    with at_step(3 if rank else 0, partial(spoil, "learner"), after=True):
        try:
            train(recipe(6), out, options=replace(EVERY, parallel="fsdp"))
        except ValueError as e:
            (out / f"said-{rank}").write_text(str(e))


@pytest.mark.slow
def test_nan_on_one_rank_ends_all(tmp_path: Path) -> None:
    spawn(with_nan_on_one_rank, (launch.free_port(), tmp_path), nprocs=2)  # type: ignore[no-untyped-call]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert "is NaN or infinite" in said[0]
    assert steps_done(tmp_path / "state") == 2
    assert finite(tmp_path)
