"""SLIP: SimCLR's loss over all views, against a literal transcription of arXiv:2002.05709, eq. 1 and algorithm 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.data.open import open_source
from kiloword.methods.registry import preset
from kiloword.methods.slip import nt_xent
from kiloword.types import Record, Source
from kiloword.verify.batch import batch
from parts import agree, blocks, cosine, learner, loader, losses, mean, units


def literal(z: Tensor, temperature: float) -> Tensor:
    """Views 2k and 2k + 1 are of one image: z [2 N, D] of norm 1. Algorithm 1, by loops, counted from 0."""
    n, total = len(z), z.new_zeros(())
    for i in range(n):
        j = i + 1 if i % 2 == 0 else i - 1
        similar = [(z[i] @ z[k] / temperature).exp() for k in range(n) if k != i]
        total = total - ((z[i] @ z[j] / temperature).exp() / torch.stack(similar).sum()).log()
    return total / n


@pytest.mark.parametrize("chunk", [0, 3, 5])
def test_the_loss_and_its_gradient_are_the_paper_s(chunk: int) -> None:
    leaf, place = units(12, 6).requires_grad_(), torch.arange(12)
    side = {"vec": leaf, "position": place // 2, "place": place}
    total = mean(nt_xent(blocks(cosine(1 / 0.3), side, side, chunk)))
    agree(total, literal(leaf, 0.3), [leaf])


def test_the_step_is_clip_and_the_loss_of_views() -> None:
    made, some = learner("slip"), batch(method="slip")
    found, contrast = losses(made, some), made.contrasts["simclr"]
    rows, _ = contrast.features(made.model, some, made.encode(some))
    assert rows["vec"].shape == (32, 256)
    torch.testing.assert_close(found["simclr"], literal(rows["vec"], 0.1), rtol=1e-7, atol=0)
    torch.testing.assert_close(found["loss"], found["pair"] + found["simclr"], rtol=1e-12, atol=0)
    assert found["pair"] == losses(learner("clip"), some)["pair"]
    frozen = {name for name, p in contrast.named_parameters() if not p.requires_grad}
    assert frozen == {"head.log_scale"}


SCENES = open_source("scenes:train?n=8", 32)


class Stored:
    """Scenes of which only tokens are read."""

    name, fingerprint = "stored", "0"

    def __len__(self) -> int:
        return 8

    def tokens(self, epoch: int) -> Tensor:
        return torch.zeros(4, 8)

    def record(self, row: int) -> Record:
        return replace(SCENES.record(row), tokens=self)


@pytest.mark.parametrize(("name", "count"), [("slip", 2), ("siglip+self-distill", 6)])
def test_views_differ_from_each_other_and_between_epochs_but_not_between_runs(name: str, count: int) -> None:
    inputs = preset(name).inputs

    def views(step: int, source: Source = SCENES) -> Any:
        return loader(source, inputs).batch(step).inputs[next(iter(inputs))]

    first = views(0)
    assert first.shape == (8, count, 3, 32, 32)
    assert torch.equal(first, views(0))
    assert not torch.equal(first.sum((1, 2, 3, 4)).sort().values, views(1).sum((1, 2, 3, 4)).sort().values)
    assert not torch.equal(first[:, -1], first[:, -2])
    with pytest.raises(ValueError, match="--image-features"):
        views(0, Stored())
