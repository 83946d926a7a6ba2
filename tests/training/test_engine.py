"""Engines: sharded and replicated ranks move the same weights; what checkpointing keeps; bad steps change nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import plan_allocated
from kiloword.config.options import Parallel, RunOptions
from kiloword.config.recipes import Recipe
from kiloword.distributed import collectives
from kiloword.distributed.device import precision_of
from kiloword.methods.defaults import MUON, default_recipe
from kiloword.methods.registry import preset
from kiloword.training import engine
from kiloword.training.optimizer import SETTLED, Average, Optimizer
from kiloword.training.setup import make_learner, spread
from kiloword.training.step import Learner, backward
from kiloword.verify.batch import MethodChoice, batch
from kiloword.verify.suite import learner
from threads import over_threads

STEPS, IMAGES = 3, 15  # over 3 ranks, whose shards of a width of 32 are uneven
MASKED = MethodChoice("sycoca", {"masks_from": 0.3, "masks_until": 0.6})  # in the second step alone
CONFIG = replace(MUON, lr=1e-2, warmup=0, ema=0.5, muon_weight_decay=0.1, clip=0.5)


def trained(way: str) -> dict[str, Tensor]:
    """Weights, averages and moments after a few steps on this rank's share, some of which do not use all parameters."""
    model = learner(MASKED)
    if way == "fsdp":
        engine.shard(model)
        for n, p in model.named_parameters():
            assert isinstance(p, DTensor) == (p.dim() > 1 and not n.startswith(("model.head.", "terms."))), n
    optimizer, reducer = Optimizer(model, CONFIG, STEPS), engine.replicated(model)
    seen(model)  # as a method does that prepares itself
    average = Average(model, 0.5)
    share = IMAGES // collectives.ranks()
    mine = batch(collectives.rank() * share, (collectives.rank() + 1) * share, method=MASKED)
    out: dict[str, Tensor] = {}
    for step in range(STEPS):
        model.done = step / STEPS
        report = backward(model, [mine], reducer=reducer)
        assert ("mim" in report) == (step == 1)
        report |= optimizer.step(step)
        average.update(step)
        out |= {f"{step}:{name}": report[name].double() for name in ("loss", "gradient_norm", "skipped_step")}
    seen(model)
    with average.in_place(model):
        out |= {f"average:{n}": p for n, p in model.named_parameters()}
        out |= {f"seen:{name}": x for name, x in seen(model).items()}
        out |= {f"swapped:{n}": p.clone() for n, p in average.shadow.items()}
    out |= {f"seen after:{name}": x for name, x in seen(model).items()}
    out |= {f"weight:{n}": p for n, p in model.state_dict().items()} | optimizer.state_dict()
    return {name: collectives.whole(x.detach()).contiguous() for name, x in out.items()}


@torch.no_grad()
def seen(model: Learner) -> dict[str, Tensor]:
    """Features of images and texts: of the weights as they are now, whatever was gathered of others."""
    found = model.encode(batch(0, 3, method="sycoca"))
    return {"image": found.images["vec"], "text": found.texts["vec"]}


def recipe(**changes: Any) -> Recipe:
    return replace(default_recipe("sycoca", "debug", ("scenes",)), freeze=("text",), precision="fp64", **changes)


def local_start(way: Parallel = "fsdp") -> dict[str, tuple[Tensor, bool, bool]]:
    """Of every parameter what this rank holds as training begins, whether it learns, whether it is sharded."""
    found = make_learner(recipe(), preset("sycoca"), bare=way == "fsdp")[0]
    stored = {name for name, p in found.named_parameters() if not p.is_meta}
    assert way == "ddp" or all(name.startswith(("model.head.", "terms.")) for name in stored)
    spread(found, recipe(), RunOptions(parallel=way))
    assert not any(b.is_meta for b in found.buffers())
    return {
        n: (collectives.local(p.detach()), p.requires_grad, isinstance(p, DTensor)) for n, p in found.named_parameters()
    }


def test_fsdp_begins_with_the_shards_of_the_weights_of_ddp() -> None:
    """Bit for bit, though no rank ever has all of a tower; over 3 ranks, whose shards are uneven, some empty."""
    ranks = over_threads(3, local_start)
    for name, (p, trained, _) in local_start("ddp").items():
        held, learns, sharded = zip(*(start[name] for start in ranks), strict=True)
        assert set(learns) == {trained}
        assert len(set(sharded)) == 1
        for mine in [torch.cat(held)] if sharded[0] else held:
            assert torch.equal(mine, p), name
    assert sum(sharded for _, _, sharded in ranks[0].values()) > 20


def in_half(way: str) -> dict[str, Tensor]:
    """Gradients of fsdp, whose blocks are gathered in bf16, or of ddp, under autocast."""
    model = learner("prolip", dtype=torch.float32)
    if way == "fsdp":
        engine.shard(model, half=True)
    first = 8 * collectives.rank()
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    backward(model, [batch(first, first + 8, method="prolip")], autocast, engine.replicated(model))
    return {name: collectives.whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def test_blocks_gathered_in_half_precision_compute_as_autocast_does() -> None:
    """To the rounding of sums: vectors are as they are under ddp, and matrices are cast alike."""
    ddp, fsdp = (over_threads(2, partial(in_half, way))[0] for way in ("ddp", "fsdp"))
    assert ddp.keys() == fsdp.keys()
    assert all(g.dtype == torch.float32 for g in fsdp.values())
    a, b = (torch.cat([found[name].flatten() for name in ddp]) for found in (ddp, fsdp))
    assert 1 - float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)) < 1e-4
    assert float(a.norm()) == pytest.approx(float(b.norm()), rel=0.02)


def test_three_ranks_move_the_weights_of_one() -> None:
    """Weights, averages, moments, norms and what is seen of the weights meanwhile, on every rank."""
    one = trained("ddp")
    for way in ("ddp", "fsdp"):
        for found in over_threads(3, partial(trained, way)):
            torch.testing.assert_close(found, one, rtol=1e-9, atol=1e-9)


def gradients_of(module: nn.Module, value: float) -> None:
    for p in module.parameters():
        p.grad = torch.full_like(p, value) if p.requires_grad else None


def moved(optimizer: Optimizer, module: nn.Module) -> dict[str, Tensor]:
    return {n: x.clone() for n, x in {**dict(module.named_parameters()), **optimizer.state_dict()}.items()}


@pytest.mark.parametrize(("value", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1e6, 1.0), (0.01, math.nan)])
def test_a_bad_step_changes_nothing(value: float, loss: float) -> None:
    """Weights (also by decay), moments and the usual norm stay, and the next step is as if it had not been."""
    runs = []
    for bad in (True, False):
        module = learner("clip", dtype=torch.float32)
        optimizer = Optimizer(module, replace(CONFIG, weight_decay=0.1), 100)
        for step in range(SETTLED + 1):
            gradients_of(module, 0.01)
            assert float(optimizer.step(step, torch.tensor(1.0))["skipped_step"]) == 0
        before = moved(optimizer, module)
        if bad:
            gradients_of(module, value)
            assert float(optimizer.step(SETTLED + 1, torch.tensor(loss))["skipped_step"]) == 1
            after = moved(optimizer, module)
            assert all(torch.equal(after[n], x) for n, x in before.items())
        gradients_of(module, 0.02)
        assert float(optimizer.step(SETTLED + 2)["skipped_step"]) == 0
        runs.append(moved(optimizer, module))
    assert all(torch.equal(runs[0][n], x) for n, x in runs[1].items())
    assert any(not torch.equal(before[n], x) for n, x in runs[1].items())


def test_large_gradients_are_no_bad_step_before_the_usual_norm_is_known_or_when_all_is_allowed() -> None:
    for config, steps in ((CONFIG, SETTLED - 1), (replace(CONFIG, explode=0), SETTLED + 5)):
        module = learner("clip", dtype=torch.float32)
        optimizer = Optimizer(module, config, 100)
        for step in range(steps):
            gradients_of(module, 0.01)
            optimizer.step(step)
        gradients_of(module, 1e6)
        assert float(optimizer.step(steps)["skipped_step"]) == 0


def test_checkpointing_keeps_less_the_more_it_repeats() -> None:
    kept, some = {}, batch(method="slip")
    for kind in ("none", "selective", "whole"):
        model = learner("slip", dtype=torch.float32)
        engine.recompute(model.model, kind)  # type: ignore[arg-type]
        kept[kind] = plan_allocated.kept(lambda: model.encode(some))  # noqa: B023
        backward(model, [some], precision_of("bf16", "cpu"))  # of a block that runs several times
    assert kept["whole"] < 0.4 * kept["none"]
    assert kept["whole"] < 0.6 * kept["selective"] < 0.6 * 0.85 * kept["none"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's compiler, of itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", ["blocks", "towers"])
def test_compiled_towers_give_the_same_gradients(kind: Any) -> None:
    """Of batches of several lengths, with checkpointing, without a graph for each."""
    plain, compiled = learner("prolip"), learner("prolip")
    engine.recompute(compiled.model, "whole")
    engine.compile_model(compiled.model, kind)
    torch._dynamo.utils.counters.clear()
    for first in (0, 4, 8):
        for model in (plain, compiled):
            backward(model, [batch(first, first + 8, method="prolip")])
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert float((p.grad - q.grad).abs().max()) < 1e-10 * largest, name  # type: ignore[operator]
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] < 20
