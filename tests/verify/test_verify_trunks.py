"""Methods on trunks of other libraries, frozen, tuned, and with cached tokens."""

from __future__ import annotations

import pytest
import torch

from kiloword.config.recipes import OptimConfig
from kiloword.methods.registry import preset
from kiloword.model.text import LEARNED
from kiloword.model.trunks.trunk import trunks
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import backward
from kiloword.verify.batch import MethodChoice, Trunks, batch, config
from kiloword.verify.suite import learner, verify

TOKENS = MethodChoice("sycoca", {"mim_target": "tokens"})
EVERY = [(method, "cached") for method in ("clip", "siglip", "llip", "prolip", "fff", "coca", TOKENS)]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "way"), [*EVERY, ("llip", "frozen"), ("prolip", "tuned")])
def test_every_check_on_trunks(method: str | MethodChoice, way: Trunks) -> None:
    assert not [check for check in verify(method, (1, 2), way) if not check.passed]


@pytest.mark.parametrize("way", ["frozen", "cached"])
def test_the_vector_of_hidden_words_learns(way: Trunks) -> None:
    """ProLIP hides words above the text trunk: the vector in their place gets a gradient, and a step changes it."""
    model = learner("prolip", trunks=way)
    tokens = model.model.text_tower.tokens
    before = tokens[LEARNED.index("mask")].detach().clone()
    optimizer = Optimizer(model, OptimConfig(lr=1e-2), 10)
    backward(model, [batch(method="prolip", trunks=way)])
    assert tokens.grad is not None
    assert tokens.grad[LEARNED.index("mask")].abs().min() > 0
    assert not tokens.grad[LEARNED.index("pad")].any()
    optimizer.step(9)
    assert (tokens[LEARNED.index("mask")] != before).all()


def test_a_trunk_runs_once_a_step_and_never_trains_its_statistics() -> None:
    model = learner("prolip", trunks="tuned")
    trunk = trunks(model)[0]
    before, runs = {n: x.clone() for n, x in trunk.named_buffers()}, []
    trunk.register_forward_hook(lambda *_: runs.append(1))
    backward(model, [batch(method="prolip", trunks="tuned")])
    assert len(runs) == 1
    assert next(verify("clip", trunks="tuned")).passed  # the trunk has gradients, and tokens of no text need none
    assert not any(part.training for part in trunk.modules())
    assert before.keys() >= {"bn0.running_mean", "bn0.running_var"}
    assert all(torch.equal(before[n], x) for n, x in trunk.named_buffers())


@pytest.mark.parametrize(
    ("method", "of", "word"),
    [
        ("sycoca", "sycoca", "masked images"),
        ("siglip+mim", "sycoca", "masked images"),
        ("coca", "siglip", "--text-tower"),
    ],
)
def test_what_a_trunk_cannot_do_is_refused(method: str, of: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        preset(method).shape(config("frozen", of))
