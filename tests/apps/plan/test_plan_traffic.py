"""What `kiloword plan` counts of a loss that sums over ranks, against the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases import mostly_slow
from kiloword.apps.plan.simulation import Simulation
from kiloword.losses import many as losses_many
from kiloword.losses import pairs
from kiloword.methods import pcmepp as losses_matching
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training.step import Learner
from kiloword.verify import batch as verify_batch
from plan_measure import without_content

COLUMNS = [
    ("siglip", {}, 0),
    ("clip", {}, 3),
    ("clip+supcon", {}, 3),
    ("clip+supcon", {"supcon": {"form": "in"}}, 5),
    ("pcme++", {}, 1),
    ("pcme++", {"pseudo": 0.0}, 0),
    ("pcme+++deterministic", {"deterministic": {"loss": "softmax"}}, 4),
]


@pytest.mark.parametrize(("name", "own", "numbers"), mostly_slow(COLUMNS, 1, 2, 4))
def test_numbers_of_every_text_that_a_loss_sums(
    name: str, own: dict[str, Any], numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, batch, counted = preset(name, own), verify_batch.batch(method=name), 0
    learner = Learner(build(verify_batch.config(), method), method)
    simulation = Simulation(verify_batch.config(), method, "cpu", "fp32")
    _, images, texts = simulation.micro_batch(without_content(simulation, batch))
    planned = simulation.pair_loss(images, texts, len(batch), len(batch.texts)).reduced

    def count(x: torch.Tensor, *which: str) -> torch.Tensor:
        nonlocal counted
        counted += x.numel() if x.dim() and x.shape[-1] == len(batch.texts) else 0
        return x.detach()

    for module in (pairs, losses_many, losses_matching):
        for function in ("sum_over_ranks", "extreme_over_ranks"):
            monkeypatch.setattr(module, function, count, raising=False)
    learner.pair_losses(learner.inputs(batch, learner.encode(batch)))
    assert planned == numbers == counted / len(batch.texts)
