"""Runs with LoRA: one gradient on every way, resumed bit for bit, saved merged or apart, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import kiloword
from commands import refused
from kiloword.cli.main import main
from kiloword.config.options import RunOptions
from kiloword.config.recipes import LoraConfig, Recipe
from kiloword.distributed import collectives
from kiloword.methods.defaults import default_recipe
from kiloword.model.adapters import attach
from kiloword.training import engine, start
from kiloword.training.loop import train
from kiloword.training.optimizer import groups
from kiloword.training.step import Learner, backward
from kiloword.verify.batch import IMAGES, batch
from kiloword.verify.suite import Way, learner
from runs import assert_equal, cut_at, rows, state
from threads import over_threads

QUIET = RunOptions(quiet=True, log_every=1)


def adapted(dtype: torch.dtype = torch.float64) -> Learner:
    """Llip, whose mixture tokens are new, with adapters that are not 0."""
    made = learner("llip", dtype=dtype)
    lora = LoraConfig(rank=2, targets=("image:0:qkv,fc", "text:out"))
    attach(made.model, lora, 0, ("image", "text"), ["image_tower.extra_tokens"])
    for name, p in made.named_parameters():
        if name.endswith(".lora.b"):
            p.data.fill_(0.05)
    return made


def gradients(way: Way, spread: Callable[[Learner], object] = lambda made: None) -> dict[str, Tensor]:
    """Gradients of all parameters on this rank's share of a batch, gathered."""
    made, share, rank = adapted(), IMAGES // collectives.ranks(), collectives.rank()
    engine.recompute(made.model, way.checkpointing)
    spread(made)
    if way.parallel == "fsdp":
        engine.shard(made)
    micro = batch(rank * share, (rank + 1) * share, method="llip").split(way.micro)
    report = backward(made, micro, reducer=engine.replicated(made))
    found = {n: collectives.whole(p.grad).clone() for n, p in made.named_parameters() if p.grad is not None}
    return {**found, "loss": report["loss"]}


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    return gradients(Way())


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (1, Way(micro=4)),
        (1, Way(checkpointing="whole")),
        (1, Way(checkpointing="selective", micro=2)),
        (2, Way(micro=2)),
        (2, Way("fsdp", 2, "whole")),
        (4, Way("fsdp")),
    ],
    ids=str,
)
def test_one_gradient_on_every_way(ranks: int, way: Way, reference: dict[str, Tensor]) -> None:
    for found in over_threads(ranks, partial(gradients, way)) if ranks > 1 else [gradients(way)]:
        torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at that of a block's input
@pytest.mark.parametrize("kind", ["blocks", "towers"])
def test_compiled(kind: Any, reference: dict[str, Tensor]) -> None:
    """Dynamo follows the hooks; its backend does not matter here."""
    torch._dynamo.reset()
    found = gradients(Way(), lambda made: engine.compile_model(made.model, kind, "eager"))
    torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-12)


def test_muon_leaves_adapters_to_adamw() -> None:
    by_group = groups(adapted(), replace(default_recipe("llip", "debug").optim, name="muon"))
    kinds = {kind for kind, members in by_group.items() for name, _ in members if ".lora." in name}
    assert kinds == {"decay", "text decay"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = default_recipe("clip", "debug", ("scenes?n=64",))
    data = replace(recipe.data, tokenizer_vocab=300)
    return train(replace(recipe, data=data, batch=16, steps=3), tmp_path_factory.mktemp("base"), options=QUIET)


def recipe(base: Path, steps: int = 6, method: str = "clip", **lora: Any) -> Recipe:
    own = start.defaults(method, str(base), "debug", ("scenes?n=64",))
    optim = replace(own.optim, ema=0.6, lr=1e-2)
    settings = LoraConfig(rank=2, **({"save": "apart"} | lora))
    return replace(own, optim=optim, batch=16, micro=8, steps=steps, seed=5, precision="fp32", lora=settings)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lora")
    train(recipe(base), out, options=QUIET)
    return out


def vectors(model: kiloword.Matcher) -> Tensor:
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        image = model.model.encode_image(images)[1]["vec"]
    return torch.cat([image, model.encode_text(["a red star", "two circles"])["vec"]])


def test_the_first_step_is_that_of_the_base(base: Path, run: Path, tmp_path: Path) -> None:
    train(replace(recipe(base, steps=1), lora=LoraConfig(), freeze=("image",)), tmp_path, options=QUIET)
    assert rows(run)[0]["loss"] == rows(tmp_path)[0]["loss"]
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_resumed_bit_for_bit(base: Path, run: Path, tmp_path: Path) -> None:
    cut_at(4, recipe(base), tmp_path, replace(QUIET, save_every=3))
    train(recipe(base), tmp_path, options=QUIET)
    for name in ("model/model.safetensors", "adapter/adapter.safetensors"):
        assert tmp_path.joinpath(name).read_bytes() == run.joinpath(name).read_bytes()
    found, expected = (state(out)[0] for out in (tmp_path, run))
    assert_equal(found, expected)
    kinds = {name.split(":")[0].split("/model")[0] for name in expected if name.endswith("qkv.lora.b")}
    assert kinds == {"learner", "average", *(f"optimizer/{kind}" for kind in ("exp_avg", "exp_avg_sq", "step"))}


def test_saved_as_an_ordinary_model(base: Path, run: Path) -> None:
    """Adapters merged, of averaged weights; the state, the model folder and base with adapters are one model."""
    model, card = kiloword.load(run / "model"), (run / "model" / "README.md").read_text()
    assert f"{base.parent.name}/model: scenes?n=64; LoRA of rank 2)" in card
    assert str(base.parent) not in card
    assert load_file(run / "model" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    for other in (kiloword.load(run / "adapter", base=base), kiloword.load(run / "state")):
        assert_equal(other.model.state_dict(), model.model.state_dict())
    assert (vectors(model) - vectors(kiloword.load(base))).abs().max() > 1e-3


def test_the_file_of_a_run_is_a_recipe(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though LoRA and --freeze none exclude each other, and nothing but towers with adapters is frozen."""
    main(["train", "--config", str(run / "config.json"), "--lora.rank", "3", "--dry-run"])
    assert "rank=3 alpha=16 targets=auto save=apart" in capsys.readouterr().out


def test_only_what_changed_is_saved_apart(base: Path, run: Path) -> None:
    kept, whole = load_file(run / "adapter" / "adapter.safetensors"), load_file(base / "model.safetensors")
    trained = {name for name in whole if name.startswith("head.")} - {"head.log_limit"}  # a constant
    assert {name for name in kept if ".lora." not in name} == trained
    assert sum(".lora." in name for name in kept) == 3 * 8


def test_other_bases_are_refused(base: Path, run: Path, tmp_path: Path) -> None:
    for folder, other, says in (
        ("adapter", run / "model", "another model"),
        ("adapter", None, "without the model"),
        ("model", base, r"no adapter\.safetensors"),
    ):
        with pytest.raises(ValueError, match=says):
            kiloword.load(run / folder, base=other)
    shutil.copytree(run / "adapter", tmp_path / "cut")
    file = tmp_path / "cut" / "adapter.safetensors"
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    raw, tensors, name = file.read_bytes(), load_file(file), "image_tower.blocks.0.attention.qkv.lora.b"
    for wrong in (torch.zeros(96, 0), torch.zeros(7, 2), torch.zeros(()), None):
        if wrong is None:
            file.write_bytes(raw[:-9])
        else:
            save_file({**tensors, name: wrong}, file, about)
        with pytest.raises(ValueError, match=r"cannot be used|is damaged"):
            kiloword.load(tmp_path / "cut", base=base)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--init BASE --lora.rank 2 --lora.targets image:qvk", "qkv"),
        ("--init BASE --lora.rank 2 --freeze none", "--freeze none"),
        ("--init BASE --lora.rank 2 --freeze image --unfreeze 0.5", "--unfreeze"),
        ("--lora.rank 2 --lora.save apart --size debug", "--lora.save apart"),
        ("--init BASE --lora.alpha 32", "--lora.rank"),
        ("--lora.rank 2 --size debug", "pretrained"),
    ],
)
def test_refused(words: str, message: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"train clip --data scenes?n=64 --batch 8 --steps 1 --out {tmp_path / 'out'} {words}"
    assert message in refused(capsys, *run.replace("BASE", str(base)).split())
    assert not any((tmp_path / "out").rglob("*.*"))
