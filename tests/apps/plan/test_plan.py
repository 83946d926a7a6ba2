"""`kiloword plan`: its counts against real steps, its formulas, what it prints and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from cases import mostly_slow
from commands import refused, said
from kiloword.apps.plan.command import read
from kiloword.apps.plan.options import CARDS, Plan
from kiloword.apps.plan.planner import CLASSES, Planner
from kiloword.apps.plan.simulation import FORMULAS, PACKED
from kiloword.config.recipes import ModelConfig, Recipe, sizes
from kiloword.methods.method import Part, Term
from kiloword.methods.registry import PRESETS, preset
from kiloword.model.model import Model
from kiloword.model.trunks.lite import EfficientNetLite
from kiloword.models.build import build
from kiloword.training.muon import orthogonal
from kiloword.training.step import learner_of
from kiloword.types import Batch, Encoded, PairBlocks, Positives, Texts, Total
from kiloword.verify import batch as on_trunk
from plan_measure import CASES, Case, compare

ALLOWED = {"activations": 0.08, "flops": 0.02}  # of a step; weights and optimizer states are exact
SMALL = (
    Case("siglip", "debug", 8),
    Case("llip", "debug", 8, checkpointing="whole"),
    Case("prolip", "debug", 8, captions=2),
    Case("sycoca", "debug", 4, captions=2, precision="bf16", checkpointing="selective"),
    Case("clip", "tiny", 8, precision="bf16"),
    Case("coca", "tiny", 8, checkpointing="selective"),
    Case("fff", "tiny", 8, captions=3, micro_batches=2),
    Case("pcme++", "tiny", 8),
    Case("vqa", "tiny", 8),
    *CASES,
)


@pytest.mark.parametrize("case", mostly_slow(SMALL, 0, 1), ids=lambda case: case.label)
def test_plan_agrees_with_a_real_step(case: Case) -> None:
    for name, (planned, measured) in compare(case).items():
        assert planned == pytest.approx(measured, rel=ALLOWED.get(name, 1e-9)), (case.label, name)


def planner(words: str) -> Planner:
    return read([*words.split(), "--samples", "1e9"]).planner()


@pytest.mark.slow
@pytest.mark.parametrize("method", PRESETS)
def test_every_preset_is_planned(method: str) -> None:
    found = planner(f"{method} --size debug --batch 8 --gpus 2")
    assert len(found.options()) == 6
    slots = preset(method)
    real, losses = build(sizes()["debug"], slots), learner_of(sizes()["debug"], slots)
    parameters = sum(p.numel() for part in (real, losses.terms, losses.contrasts) for p in part.parameters())
    assert found.parameters == parameters


@pytest.mark.slow
def test_padded_pairs_cost_what_is_published() -> None:
    """open_clip's docs/model_profile.csv: 14.78 GFLOP forward, of which the backward pass takes twice as much."""
    flop = planner("clip --size b32 --tokens 77 --batch 1").micro_batch("none", 1).flop
    assert flop["towers"] / 1e9 == pytest.approx(14.78, rel=0.001)
    assert flop["backward"] == pytest.approx(2 * flop["towers"], rel=0.03)


def test_packed_attention_is_counted_as_torch_counts_it() -> None:
    q, lse, starts = torch.zeros(9, 2, 8), torch.zeros(2, 9), torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    for op, args, flop in (
        (PACKED._varlen_attn, (q, q, q, starts, starts, 6, 6), 4 * 16 * (4 + 1 + 36)),
        (PACKED._varlen_attn_backward, (q, q, q, q, q, lse, starts, starts, 6, 6), 10 * 16 * (4 + 1 + 36)),
    ):
        assert FORMULAS[op](*args) == flop_registry[op](*args) == flop


def test_newton_schulz_is_counted_as_torch_counts_it() -> None:
    found = planner("siglip --size debug --batch 2 --optim.name muon --checkpointing none")
    model, shapes = found.learner.model, list[tuple[int, int]]()
    for block in [*model.image_tower.blocks, *model.text_tower.blocks]:
        width, hidden = block.mlp.fc.in_features, block.mlp.fc.out_features
        shapes += [(width, width)] * 4 + [(hidden, width), (width, hidden)]
    with FlopCounterMode(display=False) as counter:
        for shape in shapes:
            orthogonal(torch.randn(1, *shape))
    assert found.update == counter.get_total_flops()


class Brightness(Term):
    """A term that kiloword does not know: predicts the mean of each patch from its token."""

    def __init__(self, config: ModelConfig, reads_values: bool) -> None:
        super().__init__()
        self.predict = torch.nn.Linear(config.image.width, 3)
        self.reads_values = reads_values

    def count(self, batch: Batch) -> Tensor:
        return batch.position.new_full((), len(batch))

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        predicted = self.predict(encoded.image_tokens)
        return predicted.square().sum() * (float(predicted.sum()) if self.reads_values else 1.0)


def half_squares(pairs: PairBlocks, positives: Positives) -> Total:
    total = pairs.total(lambda block, *_: (0.5 * block.logits.square().sum(1), block.logits))
    return Total(total, total.new_tensor(float(pairs.shape[0])))


def test_a_method_that_kiloword_does_not_know_is_planned() -> None:
    asked, config = planner("siglip --size debug --batch 6"), sizes()["debug"].image
    found = []
    for reads_values in (False, True):
        terms = {"brightness": (1.0, Part(Brightness, reads_values))}
        strange = replace(preset("siglip"), name="strange", pair_loss=half_squares, terms=terms)
        found.append(Planner(asked.plan, asked.recipe, strange))
    tokens = 6 * (1 + (config.size // config.patch) ** 2)
    assert found[0].micro_batch("none", 6).flop["brightness"] == 2 * tokens * 3 * config.width
    with pytest.raises(ValueError, match="strange reads values"):
        found[1].options()


@pytest.mark.slow
def test_memory_and_traffic_of_layouts() -> None:
    found = planner("siglip --size b32 --gpus 8 --batch 4096")
    kinds = ("none", "selective", "whole")
    ways = product(("ddp", "fsdp"), kinds, (1, 2))
    options = {(way, kind, n): found.option(way, kind, n) for way, kind, n in ways}
    ddp, fsdp = options["ddp", "none", 1], options["fsdp", "none", 1]
    waiting = [options["ddp", kind, 1].memory["activations"] for kind in kinds]
    assert waiting == sorted(waiting, reverse=True)
    assert options["ddp", "none", 2].bytes < ddp.bytes
    assert ddp.memory["weights"] / 8 < fsdp.memory["weights"] < 1.2 * ddp.memory["weights"] / 8
    assert ddp.memory["weights"] == 4 * found.parameters
    assert ddp.traffic == 2 * 7 / 8 * 4 * found.parameters
    assert sum(options["ddp", "whole", 1].flop.values()) > sum(ddp.flop.values()) == sum(fsdp.flop.values())
    assert options["ddp", "none", 2].flop["first pass of micro-batches"] == pytest.approx(ddp.flop["towers"], rel=0.01)


@pytest.mark.slow
def test_a_frozen_trunk_has_no_gradients_and_no_backward_pass() -> None:
    words = "siglip --batch 4 --gpu cpu --precision fp32 --image-tower efficientnet-lite0 --optim.name adamw"
    found = planner(words)
    trunk = EfficientNetLite("efficientnet-lite0")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        trunk.eval()(torch.zeros(4, 3, 224, 224))
    flop = found.micro_batch("none", 4).flop
    assert flop["towers"] > counter.get_total_flops()
    assert flop["backward"] < 2 * flop["towers"] - 1.9 * counter.get_total_flops()
    recipe = Recipe(method="siglip", model=on_trunk.config("frozen"), batch=32)
    on_map = Planner(Plan(gpu="cpu"), recipe)
    frozen = sum(p.numel() for p in on_map.learner.parameters() if not p.requires_grad)
    held = on_map.option("ddp", "none", 4).memory
    assert held["weights"] - held["gradients"] == 4 * frozen > 0


@pytest.mark.parametrize("method", mostly_slow(["clip", "llip"], 1))
def test_inference_is_counted_as_by_torch(method: str) -> None:
    found = planner(f"{method} --size debug --batch 8 --gpu cpu --precision fp32 --tokens 7")
    model, flop = build(sizes()["debug"], found.method), []
    texts = Texts.pack([found.batch(1).texts.ids.tolist()] * CLASSES)
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            images = model.encode_image(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))[1]
        flop.append(counter.get_total_flops())
        features = model.encode_text(texts)[1]
        with FlopCounterMode(display=False) as counter:
            model.head.score(images, features)
        flop.append(counter.get_total_flops())
    assert found.inference["scores"] == flop[1] > 0
    assert flop[0] <= found.inference["image"] <= 1.2 * flop[0]  # torch's counter omits fused attention on a CPU
    assert found.inference["texts"] > found.inference["image"]


def test_the_fastest_that_fits_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    room = "--flops 300 --memory 1.4 --bandwidth 5 --json"
    words = f"plan siglip --size tiny --gpus 2 --batch 512 --samples 1e9 {room}".split()
    output = said(capsys, *words, tmp_path / "p.json")
    found = json.loads((tmp_path / "p.json").read_text())
    options: list[dict[str, Any]] = found["options"]
    assert len(options) == 6
    assert options[0]["pairs_per_second"] == max(o["pairs_per_second"] for o in options if o["fits"])
    for option in options:
        assert option["bytes"] == pytest.approx(sum(option["memory"].values()))
        assert option["fits"] == (option["bytes"] <= 1.4 * 2**30)
        assert option["days"] == pytest.approx(1e9 / option["pairs_per_second"] / 86400)
        assert f"{option['micro']} x {option['micro_batches']}" in output
    ddp, fsdp = ({o["parallel"]: o for o in options}[way] for way in ("ddp", "fsdp"))
    saved = ddp["memory"]["weights"] - fsdp["memory"]["weights"]  # sends weights twice in bf16, gradients once in fp32
    assert fsdp["traffic"] == pytest.approx(2 * saved * fsdp["micro_batches"])
    assert any(option["micro_batches"] > 1 for option in options)
    assert f"{found['parameters'] / 1e6:.2f} million parameters" in output


def test_plan_of_a_recipe_and_of_a_card() -> None:
    asked = read(["--recipe", "fff-cc3m-b16", "--gpus", "2"])
    plan, recipe = asked.plan, asked.recipe
    assert (plan.gpus, plan.gpu, plan.captions, recipe.batch, recipe.precision) == (2, "a100-40", 6, 8096, "bf16")
    assert plan.samples == 32 * 2_876_999
    assert (recipe.model.image.patch, recipe.model.text.context, recipe.optim.weight_decay) == (16, 77, 0.5)
    small = read(["--recipe", "llip-b16", "--size", "debug", "--batch", "64", "--gpus", "1"])
    assert (small.recipe.model.image.size, small.plan.samples, small.recipe.settings["k"]) == (32, 12_800_000_000, 64)
    steps = read(["clip", "--steps", "10"])
    assert (steps.plan.samples, steps.recipe.size) == (10_240, "b16")
    own = replace(CARDS["h100"], link=7e9, network=7e9, memory=3 * 2**30)
    plan = Plan(gpu="h100", flops=100, bandwidth=7, memory=3)
    assert (plan.card("flops"), plan.card("flops_fp32")) == (replace(own, flops=1e14), replace(own, flops_fp32=1e14))


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("siglip", "--samples"),
        ("siglip --samples 1e9 --batch 10 --gpus 3", "3 ranks"),
        ("siglip --samples 1e9 --batch 12 --gpus 3 --micro 3", "micro 3"),
        ("siglip --samples 1e9 --gpu b200", "b200"),
        ("siglip --samples 1e9 --flops nan", "flops"),
        ("siglip --samples 1e9 --size huge", "huge"),
        ("siglip --samples 1e9 --size debug --batch 4 --memory 0.5 --checkpointing whole", "nothing fits"),
        ("siglip --samples 1e9 --epochs 2", "--epochs"),
        ("siglip --samples 1e9 --freeze image", "--freeze"),
        ("siglip --samples 1e9 --image-tower efficientnet-lite1", "efficientnet-lite1"),
        ("--samples 1e9", "method"),
        ("--config mine.toml", "--samples"),
    ],
)
def test_refusals(
    words: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('method = "clip"\nepochs = 3\nbatch = 64\n')
    assert word in refused(capsys, "plan", *words.split())
