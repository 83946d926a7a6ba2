"""AdamP is the paper's algorithm, and AdamP and Muon move shards as whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import OptimConfig
from kiloword.distributed import collectives
from kiloword.methods.defaults import default_recipe
from kiloword.training.adamp import AdamP
from kiloword.training.muon import Muon
from runs import Values, whole_and_cut
from threads import over_threads

SHAPES = {"matrix": (7, 4), "filters": (6, 3, 2, 2), "few": (2, 5), "vector": (9,), "scale": (1,)}
SETTINGS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
KINDS = ("rows", "whole", "none")  # what a gradient is orthogonal to


def literally(p: Tensor, gradients: Sequence[Tensor], delta: float = 0.1, wd_ratio: float = 0.1) -> Tensor:
    """Algorithm 2 of arXiv:2006.08217 with Adam and decoupled weight decay, one step after the other."""
    (beta1, beta2), eps, lr = SETTINGS["betas"], SETTINGS["eps"], SETTINGS["lr"]
    p, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        change = m / (v.sqrt() / math.sqrt(1 - beta2**t) + eps)
        ratio = 1.0
        if p.dim() > 1:
            for view in (lambda x: x.reshape(len(x), -1), lambda x: x.reshape(1, -1)):
                cosine = F.cosine_similarity(view(g), view(p), dim=1, eps=eps).abs()
                if cosine.max() < delta / math.sqrt(view(p).shape[1]):
                    direction = view(p) / (view(p).norm(dim=1, keepdim=True) + eps)
                    along = (direction * view(change)).sum(1, keepdim=True)
                    change = (view(change) - along * direction).view_as(p)
                    ratio = wd_ratio
                    break
        p = p * (1 - lr * SETTINGS["weight_decay"] * ratio) - lr / (1 - beta1**t) * change
    return p


def orthogonal(gradient: Tensor, p: Tensor, kind: str) -> Tensor:
    """The gradient without its part along the weights: of each row, of the whole tensor, or as it is."""
    if kind == "none" or p.dim() < 2:
        return gradient
    view = (len(p), -1) if kind == "rows" else (1, -1)
    x, g = p.reshape(view), gradient.reshape(view)
    return (g - x * (x * g).sum(1, keepdim=True) / (x * x).sum(1, keepdim=True)).view_as(p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_literal_transcription(shape: tuple[int, ...], kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    start, gradients = p.detach().clone(), list[Tensor]()
    optimizer = AdamP([p], **SETTINGS)
    for _ in range(4):
        noise = 0.01 * torch.randn(shape, generator=generator, dtype=torch.float64)
        gradients.append(orthogonal(noise, p.detach(), kind))
        p.grad = gradients[-1].clone()
        optimizer.step()
    torch.testing.assert_close(p.detach(), literally(start, gradients), rtol=1e-12, atol=1e-12)
    if p.dim() > 1 and kind != "none":  # the projection did something
        assert float((p.detach() - literally(start, gradients, delta=0)).abs().max()) > 1e-3
    else:
        torch.testing.assert_close(p.detach(), literally(start, gradients, delta=0), rtol=1e-12, atol=1e-12)


# Shards


def adamp(own: Values, sharded: bool) -> AdamP:
    return AdamP(list(own.values()), **SETTINGS, sharded=list(own.values()) if sharded else ())


def muon(own: Values, sharded: bool, at_once: int = Muon.at_once) -> Muon:
    counts = {p: len(SEVERAL[name]) for name, p in own.items()} if sharded else None
    made = Muon(list(own.values()), 0.1, 0.9, 0.2, {own["qkv"]: 3}, counts)
    made.at_once = at_once
    return made


# [7, 4] thrice, so that several are moved at once; fewer rows than ranks; several matrices
GENERATOR = torch.Generator().manual_seed(1)
SIZES = {"a": (7, 4), "b": (7, 4), "qkv": (6, 5), "filters": (6, 3, 2, 2), "few": (2, 5), "c": (7, 4)}
MATRICES = {name: torch.randn(shape, generator=GENERATOR) for name, shape in SIZES.items()}
SEVERAL = {name: x for name, x in MATRICES.items() if x.dim() == 2}
SEVERAL["several"] = torch.randn(2, 3, 5, generator=GENERATOR)


def rows_of(x: Tensor) -> Tensor:
    """This rank's: uneven shares, and none of a tensor with few rows."""
    share = -(-len(x) // collectives.ranks())
    return x[collectives.rank() * share :][:share]


def stepped(make: Callable[[Values, bool], Any], whole: Values, sharded: bool, skip: int) -> Values:
    """Weights and moments after four steps on this rank, of which one may be skipped."""
    generator = torch.Generator().manual_seed(2)
    own = {name: rows_of(x).clone().requires_grad_() for name, x in whole.items()}
    optimizer = make(own, sharded)
    for step in range(4):
        for name, p in own.items():
            drawn = torch.randn(whole[name].shape, generator=generator)
            p.grad = rows_of(orthogonal(drawn, whole[name], KINDS[step % 3])).clone()
        optimizer.found_inf = torch.tensor(float(step == skip))
        optimizer.step()
    state = {f"{key} of {name}": x for name, p in own.items() for key, x in optimizer.state[p].items() if x.dim()}
    return {name: p.detach() for name, p in own.items()} | state


@pytest.mark.parametrize("skip", [-1, 1])
@pytest.mark.parametrize(("make", "whole"), [(adamp, MATRICES), (muon, SEVERAL), (partial(muon, at_once=60), SEVERAL)])
def test_each_rank_moves_its_rows(make: Any, whole: Values, skip: int) -> None:
    """Muon all at once, or in several portions."""
    parts = over_threads(3, lambda: stepped(make, whole, True, skip))
    for name, value in stepped(make, whole, False, skip).items():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("first", [True, False])
def test_a_skipped_step_changes_nothing(first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(4, 3, generator=generator).requires_grad_()
    optimizer = AdamP([p], **SETTINGS)
    if not first:
        p.grad = torch.randn(4, 3, generator=generator)
        optimizer.step()
    weights, state = p.detach().clone(), {key: x.clone() for key, x in optimizer.state[p].items()}
    p.grad, optimizer.found_inf = torch.full((4, 3), math.nan), torch.ones(())
    optimizer.step()
    assert torch.equal(p.detach(), weights)
    for key, value in optimizer.state[p].items():
        assert torch.equal(value, state.get(key, torch.zeros_like(value))), key


@pytest.mark.slow
def test_a_run_resumes(tmp_path: Path) -> None:
    base = default_recipe("pcme++", "debug", ("scenes?n=64",))
    optim = OptimConfig(name="adamp", lr=1e-3, ema=0.5)
    data = replace(base.data, tokenizer_vocab=300)
    whole = whole_and_cut(replace(base, data=data, optim=optim, batch=8, steps=4), tmp_path)
    assert any(name.startswith("optimizer/exp_avg_sq:") for name in whole)
