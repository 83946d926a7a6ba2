"""SLIP: SimCLR's loss over all views, against a literal transcription of arXiv:2002.05709, eq. 1 and algorithm 1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.config.recipes import DataConfig
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.losses.pairs import Blocks
from kiloword.methods.registry import preset
from kiloword.methods.slip import VIEWS, SimclrContrast, SimclrSettings, nt_xent
from kiloword.model.heads import cosine_head
from kiloword.model.model import initialise
from kiloword.training.accumulate import backward
from kiloword.types import Record, Source
from kiloword.verify.batch import batch, config
from kiloword.verify.suite import learner


def literal(z: Tensor, temperature: float) -> Tensor:
    """Views 2k and 2k + 1 are of one image: z [2 N, D] of norm 1. Algorithm 1, by loops, counted from 0."""
    n, total = len(z), z.new_zeros(())
    for i in range(n):
        j = i + 1 if i % 2 == 0 else i - 1
        similar = [(z[i] @ z[k] / temperature).exp() for k in range(n) if k != i]
        total = total - ((z[i] @ z[j] / temperature).exp() / torch.stack(similar).sum()).log()
    return total / n


@pytest.mark.parametrize("chunk", [0, 3])
def test_the_loss_and_its_gradient_are_the_papers(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(10, 6, generator=generator, dtype=torch.float64), dim=1)
    head = cosine_head(1.0, fixed=True).double()
    initialise(head, 0)
    head.log_scale.fill_(-math.log(0.3))
    place = torch.arange(10)
    gradients = []
    for fast in (True, False):
        leaf = z.clone().requires_grad_()
        if fast:
            side = {"vec": leaf, "position": place // 2, "place": place}
            total = nt_xent(Blocks(head, side, side, chunk))
            loss = total.sum / total.count
        else:
            loss = literal(leaf, 0.3)
        (gradient,) = torch.autograd.grad(loss, leaf)
        gradients.append((loss.detach(), gradient))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def slips_own(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """What facebookresearch/SLIP's losses.py computes of two views [N, D], in one process: cross-entropies."""
    labels, itself = torch.arange(len(a)), 1e9 * torch.eye(len(a), dtype=a.dtype)
    sides = ((a, b), (b, a))
    logits = [torch.cat([x @ y.T, x @ x.T - itself * temperature], 1) / temperature for x, y in sides]
    return sum((torch.nn.functional.cross_entropy(z, labels) / 2 for z in logits), a.new_zeros(()))


def test_the_loss_and_its_gradient_are_those_of_the_published_code() -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.nn.functional.normalize(torch.randn(12, 6, generator=generator, dtype=torch.float64), dim=1)
    head = cosine_head(1.0, fixed=True).double()
    initialise(head, 0)
    head.log_scale.fill_(-math.log(0.1))
    leaf, place = z.requires_grad_(), torch.arange(12)
    side = {"vec": leaf, "position": place // 2, "place": place}
    total = nt_xent(Blocks(head, side, side, 5))
    ours, theirs = total.sum / total.count, slips_own(leaf[::2], leaf[1::2], 0.1)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_micro_batches_leave_the_gradient() -> None:
    gradients = []
    for parts in (1, 4):
        made = learner("slip")
        backward(made, batch(method="slip").split(parts))
        gradients.append([p.grad for p in made.parameters() if p.requires_grad])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_the_step_is_clip_and_the_loss_of_views() -> None:
    made, some = learner("slip"), batch(method="slip")
    values = backward(made, [some])
    contrast: Any = made.contrasts["simclr"]
    rows, columns = contrast.features(made.model, some, made.encode(some))
    assert rows is columns
    assert rows["vec"].shape == (32, 256)
    scale = float(contrast.head.log_scale.detach().exp())
    torch.testing.assert_close(values["simclr"], literal(rows["vec"].detach(), 1 / scale), rtol=1e-10, atol=0)
    torch.testing.assert_close(values["loss"], values["pair"] + values["simclr"], rtol=1e-12, atol=0)
    clip = backward(learner("clip"), [some])
    torch.testing.assert_close(values["pair"], clip["pair"], rtol=0, atol=0)


def test_the_temperature_is_fixed_and_the_projection_fits_the_tower() -> None:
    made = learner("slip")
    contrast = made.contrasts["simclr"]
    assert isinstance(contrast, SimclrContrast)
    assert not contrast.head.log_scale.requires_grad
    assert float(contrast.head.log_scale.exp()) == pytest.approx(10, rel=1e-6)
    assert contrast.projection[0].out_features == 8 * config().image.width
    assert SimclrContrast(config(), SimclrSettings(hidden=7)).projection[0].out_features == 7


def test_a_view_of_the_other_image_is_no_positive() -> None:
    """Views of one image that are alike, and unlike those of others, have the least loss."""
    head = cosine_head(10.0, fixed=True).double()
    initialise(head, 0)
    place = torch.arange(4)
    near, far = (torch.eye(2, dtype=torch.float64)[index] for index in ([0, 0, 1, 1], [0, 1, 0, 1]))
    losses = []
    for vec in (near, far):
        side = {"vec": vec, "position": place // 2, "place": place}
        total = nt_xent(Blocks(head, side, side))
        losses.append(float(total.sum / total.count))
    assert losses[0] < 0.01
    assert losses[1] > 9


class Stored:
    """Tokens in place of images."""

    def tokens(self, epoch: int) -> Tensor:
        return torch.zeros(4, 8)


class WithStored:
    """Scenes of which only tokens are read."""

    name, fingerprint = "stored", "0"

    def __len__(self) -> int:
        return 8

    def record(self, row: int) -> Record:
        return replace(SCENES.record(row), tokens=Stored())


SCENES = open_source("scenes:train?n=8", 32)


def views(step: int, source: Source = SCENES) -> Tensor:
    tokenizer, inputs = Tokenizer.train(["a"], 300), preset("slip").inputs
    loader = Loader(source, Order(8, 8, 0), DataConfig(), config().text, 32, tokenizer, inputs=inputs)
    made = next(loader.batches(step)).inputs[VIEWS]
    assert isinstance(made, Tensor)
    return made


def test_stored_tokens_have_no_views() -> None:
    with pytest.raises(ValueError, match="--image-features gives tokens in their place: omit it"):
        views(0, WithStored())


def test_views_differ_between_epochs_and_not_between_runs() -> None:
    assert torch.equal(views(0), views(0))
    assert not torch.equal(views(0).sum((1, 2, 3, 4)).sort().values, views(1).sum((1, 2, 3, 4)).sort().values)
