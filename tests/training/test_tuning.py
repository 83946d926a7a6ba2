"""Tuning: what is frozen has no gradient and costs no memory, until it is trained; layer-wise learning rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plan_allocated
from commands import refused
from kiloword.config.options import RunOptions
from kiloword.config.recipes import OptimConfig, Recipe, TrunkConfig
from kiloword.distributed import collectives
from kiloword.methods.defaults import MUON, default_recipe
from kiloword.methods.registry import preset
from kiloword.training import engine, tuning
from kiloword.training.loop import train
from kiloword.training.optimizer import Average, Optimizer, groups
from kiloword.training.setup import make_learner
from kiloword.training.step import Learner, backward
from kiloword.verify.batch import Trunks, batch
from kiloword.verify.suite import learner
from runs import assert_same, cut_at
from threads import over_threads

SCENES = ("scenes?n=64",)


def recipe(*freeze: str, unfreeze: tuple[float, ...] = (), **more: Any) -> Recipe:
    return replace(default_recipe("siglip", "debug", SCENES), freeze=freeze, unfreeze=unfreeze, **more)


def frozen(*freeze: str) -> Learner:
    return make_learner(recipe(*freeze), preset("siglip"))[0]


def block_of(name: str) -> str:
    """Block of a parameter of a tower of two, by its name alone."""
    _, part, *rest = name.split(".")
    if part == "head":
        return part
    return f"{part.removesuffix('_tower')}:{int(rest[0] == 'norm' or rest[:2] == ['blocks', '1'])}"


@pytest.mark.parametrize(
    ("specs", "still"),
    [
        (("image:0",), {"image:0"}),
        (("image:1", "text:0-1"), {"image:1", "text:0", "text:1"}),
        (("image", "text:0"), {"image:0", "image:1", "text:0"}),
        (("none",), set()),
        ((), set()),
    ],
)
def test_gradients_are_where_they_belong(specs: tuple[str, ...], still: set[str]) -> None:
    learned = frozen(*specs)
    before = {name: p.clone() for name, p in learned.named_parameters()}
    optimizer = Optimizer(learned, MUON, 4)
    backward(learned, batch(0, 8).split(4))
    without = {block_of(name) for name, p in learned.named_parameters() if p.grad is None}
    assert without == still
    optimizer.step(0)
    moved = {block_of(name) for name, p in learned.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head", "image:0", "image:1", "text:0", "text:1"} - still


def test_frozen_blocks_below_the_first_trained_one_save_nothing() -> None:
    """A frozen block above a trained one still saves what the gradient passes through."""
    one, kept = batch(0, 32), list[int]()  # bytes of activations that the forward pass saves for the backward pass
    for specs in ((), ("image:0",), ("image:1",), ("image",), ("image", "text")):
        learned = frozen(*specs)
        kept.append(plan_allocated.kept(lambda: learned(one, learned.counts([one]))))  # noqa: B023
    everything, lower, upper, image, both = kept
    assert lower < 0.85 * everything
    assert image < lower < upper <= everything
    assert both < 0.2 * everything


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--freeze image:2", "image:2"),
        ("--freeze text:1-0", "text:1-0"),
        ("--freeze image:0-", "image:0-8"),
        ("--freeze imag", "imag"),
        ("--freeze text:trunk", "trunk"),
        ("--freeze none image", "none"),
        ("--unfreeze 0.3", "--freeze"),
        ("--freeze none --unfreeze 0.3", "--freeze"),
        ("--freeze text --unfreeze 0.3 0.2", "--unfreeze"),
        ("--freeze text --unfreeze 0.3 0.4 0.5", "--unfreeze"),
        ("--freeze text --unfreeze 1", "--unfreeze is 1.0"),
        ("--optim.layer-decay 0", "--optim.layer-decay is 0.0"),
    ],
)
def test_what_cannot_be_frozen(words: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", "siglip", "--data", *SCENES, "--size", "debug", "--batch", "8", "--steps", "1"]
    assert named in refused(capsys, *run, "--out", tmp_path / "run", *words.split())
    assert not list(tmp_path.glob("run/*"))


# Layer-wise learning rates


def literal_factor(name: str) -> float:
    """Of towers of two blocks: 0.5 for the upper block and the norm, 0.25 for the lower one, 0.125 for all below it."""
    block = block_of(name)
    return 1.0 if block == "head" else 0.5 if block.endswith("1") else 0.25 if ".blocks." in name else 0.125


def rates(optimizer: Optimizer) -> dict[str, tuple[str, float]]:
    """By name of the parameter: the optimizer that moves it, and its learning rate."""
    return {
        optimizer.names[p]: (type(part).__name__, group["base_lr"])
        for part in optimizer.parts
        for group in part.param_groups
        for p in group["params"]
    }


@pytest.mark.parametrize(("kind", "usual"), [("adamw", "AdamW"), ("adamp", "AdamP"), ("muon", "AdamW")])
def test_layer_decay_is_a_learning_rate_of_each_layer(kind: Any, usual: str) -> None:
    learned = learner("siglip")
    config = OptimConfig(name=kind, lr=0.01, muon_lr=0.1, layer_decay=0.5, text_lr=3)
    found = rates(Optimizer(learned, config, 3))
    assert found.keys() == {name for name, _ in learned.named_parameters()}
    for name, p in learned.named_parameters():
        hidden = kind == "muon" and p.dim() == 2 and ".blocks." in name
        factor = literal_factor(name) * (3 if "text_tower" in name else 1)
        if hidden:
            assert found[name] == ("Muon", pytest.approx(0.1 * factor)), name
        elif kind != "muon" or p.dim() == 1:
            assert found[name] == (usual, pytest.approx(0.01 * factor)), name


# Trunks


def on_a_trunk(*freeze: str, **more: Any) -> Recipe:
    """Towers of size debug, the image tower on a trunk of 17 layers whose map has one place."""
    base = recipe(*freeze, **more)
    trunk = TrunkConfig(name="efficientnet-lite0", width=1280, grid=1)
    return replace(base, model=replace(base.model, image=replace(base.model.image, trunk=trunk)))


def test_a_trunk_is_frozen_unless_asked_and_its_blocks_are_numbered_first() -> None:
    learned = make_learner(on_a_trunk(), preset("siglip"))[0]
    assert {name.split(".")[2] for name, p in learned.named_parameters() if not p.requires_grad} == {"trunk"}
    learned = make_learner(on_a_trunk("image:0-15"), preset("siglip"))[0]
    trained = {name for name, p in learned.named_parameters() if p.requires_grad and ".trunk." in name}
    assert {name.split(".")[3] for name in trained} == {"conv_head", "bn1"}
    with pytest.raises(ValueError, match=r"image:19.* 0 to 18.* 17 "):
        make_learner(on_a_trunk("image:19"), preset("siglip"))
    plan = on_a_trunk(unfreeze=(0.0, 0.8), steps=100)
    later = tuning.Unfreezing(make_learner(plan, preset("siglip"))[0], plan)
    assert [later.blocks["image", n] for n in (16, 15, 8, 0)] == [0, 5, 40, 80]


def test_a_trunk_learns_by_adamw_at_a_share_of_the_rate() -> None:
    learned = make_learner(on_a_trunk("none"), preset("siglip"))[0]
    found = rates(Optimizer(learned, replace(MUON, trunk_lr=0.2), 4))
    assert {rate for name, rate in found.items() if ".trunk." in name} == {("AdamW", MUON.lr * 0.2)}
    assert ["--optim.trunk-lr" in tuning.reason(on_a_trunk(*freeze)) for freeze in ((), ("none",))] == [False, True]
    assert found["model.image_tower.blocks.0.mlp.fc.weight"] == ("Muon", MUON.muon_lr)
    assert found["model.image_tower.patches.weight"] == ("Muon", MUON.muon_lr)
    assert found["model.head.pooling.image_projection.weight"] == ("Muon", MUON.muon_lr)
    pooling = {f"model.head.pooling.{name}" for name in ("key", "value", "out.weight", "text_projection.weight")}
    for base, above in ((on_a_trunk("none"), pooling), (recipe(), set())):
        moved = groups(make_learner(base, preset("llip"))[0], MUON)["muon"]
        assert {name for name, _ in moved if ".pooling." in name} & pooling == above


# Unfreezing


@pytest.mark.parametrize(("unfreeze", "steps"), [((0.2, 0.8), [80, 20]), ((0.5,), [50, 50]), ((0.0, 0.0), [0, 0])])
def test_blocks_begin_one_by_one_from_the_top(unfreeze: tuple[float, ...], steps: list[int]) -> None:
    plan = recipe("image", unfreeze=unfreeze, steps=100)
    blocks = tuning.Unfreezing(learner("siglip"), plan).blocks
    assert blocks == {("image", 0): steps[0], ("image", 1): steps[1]}
    one = tuning.Unfreezing(learner("siglip"), replace(plan, freeze=("image:0",))).blocks
    assert one == {("image", 0): round(100 * unfreeze[0])}


def unfrozen(way: str, micro: int = 1, trunks: Trunks = "none") -> dict[str, Tensor]:
    """Weights, averages and moments after four steps in which both towers begin block by block."""
    model = learner("siglip", trunks=trunks)
    if way == "fsdp":
        engine.shard(model)
    plan = recipe("image", "text", unfreeze=(0.25, 0.5), steps=4)
    unfreezing = tuning.Unfreezing(model, plan)
    config = replace(MUON, lr=1e-2, warmup=0, layer_decay=0.5, clip=0.5)
    optimizer, reducer, average = Optimizer(model, config, 4), engine.replicated(model), Average(model, 0.5)
    share = 12 // collectives.ranks()
    mine = batch(collectives.rank() * share, (collectives.rank() + 1) * share, trunks=trunks)
    out: dict[str, Tensor] = {}
    for step in range(4):
        unfreezing.before(step, optimizer)
        backward(model, mine.split(share // micro), reducer=reducer)
        out[f"norm {step}"] = optimizer.step(step)["gradient_norm"]
        average.update(step)
        if step in (0, 1):
            out |= {f"{step}:{name}": p.detach().clone() for name, p in model.named_parameters()}
    out |= {f"average:{name}": p for name, p in average.shadow.items()}
    out |= {f"weight:{name}": p for name, p in model.named_parameters()} | optimizer.state_dict()
    return {name: collectives.whole(x.detach()).contiguous() for name, x in out.items()}


def test_frozen_parameters_stay_until_they_are_trained() -> None:
    """Their Adam counts its steps from there."""
    start = {name: p.detach() for name, p in learner("siglip").named_parameters()}
    found = unfrozen("ddp")

    def moved(prefix: str) -> set[str]:
        return {block_of(name) for name, p in start.items() if not torch.equal(found[f"{prefix}:{name}"], p)}

    assert moved("0") == {"head"}
    assert moved("1") == {"head", "image:1", "text:1"}
    assert moved("weight") == {"head", "image:0", "image:1", "text:0", "text:1"}
    steps = {block_of(name): int(found[f"step:{name}"]) for name in start if f"step:{name}" in found}
    assert steps == {"head": 4, "image:1": 3, "text:1": 3, "image:0": 2, "text:0": 2}


@pytest.mark.slow
@pytest.mark.parametrize("trunks", ["none", "tuned"])
def test_ranks_shards_and_micro_batches_do_not_change_unfreezing(trunks: Trunks) -> None:
    """Trunks below both towers included."""
    one = unfrozen("ddp", trunks=trunks)
    ways: list[Callable[[], list[dict[str, Tensor]]]] = [
        lambda: [unfrozen("ddp", 3, trunks)],
        lambda: over_threads(2, partial(unfrozen, "ddp", 2, trunks)),
        lambda: over_threads(2, partial(unfrozen, "fsdp", trunks=trunks)),
    ]
    for way in ways:
        for found in way():
            torch.testing.assert_close(found, one, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_a_killed_run_unfreezes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Killed in step 7 of 12 and in step 6 of the rest, with an average and micro-batches."""
    base = recipe("image", "text", unfreeze=(0.3, 0.6), batch=16, micro=8, steps=12)
    run = replace(base, optim=replace(base.optim, ema=0.9, layer_decay=0.7))
    every = RunOptions(log_every=1, save_every=2, quiet=True)
    train(run, tmp_path / "whole", options=every)
    cut_at(6, run, tmp_path / "cut", every)
    cut_at(5, run, tmp_path / "cut", every)
    train(run, tmp_path / "cut", options=every)
    assert_same(tmp_path / "cut", tmp_path / "whole")
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["recipe"]["freeze"] == ["image", "text"]
