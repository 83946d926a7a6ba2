"""The weight of the pair loss: exact over micro-batches, and of 0 the head stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kiloword.config.recipes import OptimConfig
from kiloword.methods.defaults import default_recipe
from kiloword.training.optimizer import Optimizer
from kiloword.verify.batch import batch
from parts import gradients, learner


@pytest.mark.parametrize("parts", [1, 4])
def test_losses_and_gradients_are_linear_in_the_weight(parts: int) -> None:
    def found(weight: float, parts: int = 1) -> Any:
        return gradients(learner("coca", {"contrast_weight": weight}), batch(method="coca"), parts)

    none, whole, some = found(0.0), found(1.0), found(0.3, parts)
    expected = 0.3 * some.pop("loss:pair") + 2 * some.pop("loss:caption")
    torch.testing.assert_close(some.pop("loss:loss"), expected, rtol=0, atol=1e-12)
    for name, value in some.items():
        expected = 0.3 * whole[name] + 0.7 * none.get(name, torch.zeros_like(value))
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("parts", [1, 2])
def test_without_a_pair_loss_the_head_stays(parts: int) -> None:
    made = learner("coca", {"contrast_weight": 0.0})
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    optimizer = Optimizer(made, OptimConfig(weight_decay=0.5), steps=10)
    losses = gradients(made, batch(method="coca"), parts)
    optimizer.step(5)
    assert losses["loss:pair"] == 0
    torch.testing.assert_close(losses["loss:loss"], 2 * losses["loss:caption"])
    moved = {name for name, p in made.named_parameters() if not torch.equal(before[name], p)}
    assert moved == {name for name in before if ".head." not in name}


def test_who_writes_captions_sees_whole_ones() -> None:
    dropped = {name: default_recipe(name, "tiny", ("photos",)).data.augment.drop_words for name in ("clip", "sycoca")}
    assert dropped == {"clip": 0.1, "sycoca": 0.0}
