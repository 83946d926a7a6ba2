"""The weight of the pair loss: exact over micro-batches, and of 0 the head stays as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kiloword.config.recipes import OptimConfig
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.training.optimizer import Optimizer
from kiloword.verify.batch import batch, config


def gradients(weight: float, parts: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses and gradients of one step of coca, fp64."""
    method = replace(preset("coca"), pair_weight=weight)
    made = Learner(build(config(), method), method).double()
    losses = backward(made, batch(method="coca").split(parts))
    return losses, {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("parts", [1, 4])
def test_the_loss_is_the_weighted_sum(parts: int) -> None:
    losses, _ = gradients(0.3, parts)
    assert losses["loss"].item() == pytest.approx(0.3 * losses["pair"].item() + 2 * losses["caption"].item(), abs=1e-12)


@pytest.mark.parametrize("parts", [1, 4])
def test_gradients_are_linear_in_the_weight(parts: int) -> None:
    _, none = gradients(0.0, 1)
    _, whole = gradients(1.0, 1)
    _, some = gradients(0.3, parts)
    for name, found in some.items():
        expected = 0.3 * whole[name] + 0.7 * none.get(name, torch.zeros_like(whole[name]))
        assert torch.allclose(found, expected, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("parts", [1, 2])
def test_without_a_pair_loss_the_head_stays(parts: int) -> None:
    method = preset("coca", {"contrast_weight": 0.0})
    made = Learner(build(config(), method), method)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    optimizer = Optimizer(made, OptimConfig(weight_decay=0.5), steps=10)
    losses = backward(made, batch(method="coca").split(parts))
    optimizer.step(5)
    after = dict(made.named_parameters())
    assert losses["pair"] == 0
    assert losses["loss"].item() == pytest.approx(2 * losses["caption"].item(), rel=1e-5)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not [name for name in moved if ".head." in name]
    assert moved == {name for name in before if ".head." not in name}


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_what_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="contrast_weight is"):
        preset("coca", {"contrast_weight": weight})


def test_who_writes_captions_sees_whole_ones() -> None:
    dropped = {name: default_recipe(name, "tiny", ("photos",)).data.augment.drop_words for name in ("clip", "sycoca")}
    assert dropped == {"clip": 0.1, "sycoca": 0.0}
