"""Masks that begin and end within the run: whole images before and after, and no pass that has no weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kiloword.config.recipes import OptimConfig
from kiloword.methods.method import Between
from kiloword.methods.registry import preset
from kiloword.training.accumulate import backward
from kiloword.training.optimizer import Optimizer
from literal import CAPTIONS, made, pairs

WINDOW = {"masks_from": 0.25, "masks_until": 0.75}


def report(method: str, settings: dict[str, Any], done: float, micro: int = 1) -> tuple[dict[str, Any], list[int]]:
    """The losses where a share of the run is done, and how many images each pass of the image tower encodes."""
    learner, passes = made(method, settings), list[int]()
    learner.done = done
    learner.model.image_tower.register_forward_hook(lambda *args: passes.append(len(args[-1])))
    return backward(learner, pairs(learner.model, CAPTIONS).split(micro)), passes


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("done", [0.0, 0.24, 0.25, 0.74, 0.75, 0.99])
def test_images_are_whole_outside_the_window(done: float, micro: int) -> None:
    """There the losses are those of coca, and each image is encoded once."""
    inside = 0.25 <= done < 0.75
    losses, passes = report("sycoca", WINDOW, done, micro)
    expected, as_many = report("sycoca", {}, done, micro) if inside else report("coca", {}, done, micro)
    assert passes == as_many
    assert losses.keys() == expected.keys()
    assert all(torch.equal(losses[name], value) for name, value in expected.items())
    assert ("mim" in losses) is inside


def test_captions_alone_have_a_window() -> None:
    attentive: dict[str, Any] = {"caption_mask": "attentive"}
    whole, masked = (report("coca", {**attentive, **WINDOW}, done)[0]["caption"] for done in (0.0, 0.5))
    assert torch.equal(whole, report("coca", {}, 0.0)[0]["caption"])
    assert torch.equal(masked, report("coca", attentive, 0.0)[0]["caption"])


def test_without_a_window_weights_are_numbers() -> None:
    assert preset("sycoca").terms["mim"][0] == 1.0
    assert preset("sycoca", WINDOW).terms["mim"][0] == Between(1.0, 0.25, 0.75)


def test_what_is_not_computed_is_as_of_weight_0() -> None:
    """A parameter without a gradient is updated as one whose gradient is zero, with the same state."""
    found = []
    for filled in (False, True):
        learner = made("sycoca", WINDOW)
        backward(learner, [pairs(learner.model, CAPTIONS)])
        without = [p for p in learner.parameters() if p.grad is None]
        assert without
        for p in without if filled else ():
            p.grad = torch.zeros_like(p)
        optimizer = Optimizer(learner, OptimConfig(name="muon", lr=1e-2, weight_decay=0.1), 4)
        optimizer.step(1)
        found.append({**dict(learner.named_parameters()), **optimizer.state_dict()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert any("image_decoder" in name and name.startswith("momentum") for name in found[0])


@pytest.mark.parametrize("method", ["sycoca", "coca"])
@pytest.mark.parametrize("window", [(0.5, 0.5), (0.75, 0.25)])
def test_an_empty_window_is_refused(method: str, window: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="nothing lies between the share"):
        preset(method, dict(zip(WINDOW, window, strict=True)))
    with pytest.raises(ValueError, match=r"masks_from is 1.5: expected 0 to 1"):
        preset(method, {"masks_from": 1.5})
