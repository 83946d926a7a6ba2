"""Losses for many positives, against loops over single pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import sizes
from kiloword.losses.many import Balanced, supcon_loss
from kiloword.losses.pairs import Blocks, logsumexp_over_ranks, sigmoid_loss, softmax_loss
from kiloword.model.heads import Head, Single
from kiloword.model.model import initialise
from kiloword.types import Features, PairBlocks, PairLoss, Pairs, Positives, Total

CHUNKS = [0, 1, 3]


def features(n: int, position: list[int], seed: int) -> Features:
    vec = torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return {"vec": F.normalize(vec, dim=1).requires_grad_(), "position": torch.tensor(position)}


def some(pred: Callable[[Tensor, Tensor], Tensor]) -> Positives:
    return lambda pairs: pred(pairs.images["position"][:, None], pairs.texts["position"]).to(pairs.logits.dtype)


POSITIVES: dict[str, Positives] = {
    "one": some(lambda i, t: i == t),
    "many": some(lambda i, t: (i - t) % 3 == 0),  # of images and of texts
    "few": some(lambda i, t: (i == t) & (i != 2)),  # an image, and its texts, without any
}


def anchor(z: Tensor, y: Tensor, form: str) -> Tensor:
    """One anchor of arXiv:2004.11362, eq. 2 ("out") or 3 ("in"): its logits and which of them are positives."""
    positives = [p for p in range(len(z)) if y[p]]
    if not positives:
        return z.new_zeros(())
    share = [torch.exp(z[p]) / sum(torch.exp(a) for a in z) for p in positives]
    if form == "out":
        return -sum((torch.log(p) for p in share), z.new_zeros(())) / len(positives)
    return -torch.log(sum(share, z.new_zeros(())) / len(positives))


def literal_supcon(z: Tensor, y: Tensor, form: str) -> Tensor:
    """The mean over all anchors, which are images and texts."""
    anchors = [anchor(z[i], y[i], form) for i in range(z.shape[0])]
    anchors += [anchor(z[:, t], y[:, t], form) for t in range(z.shape[1])]
    return torch.stack(anchors).sum() / len(anchors)


def literal_softmax(z: Tensor, y: Tensor) -> Tensor:
    """Targets that need not be 0 or 1: an anchor's are its share of probability, divided by their sum where above 1."""

    def mean(z: Tensor, y: Tensor) -> Tensor:
        total = z.new_zeros(())
        for row, target in zip(z, y, strict=True):
            for p in range(len(row)):
                share = target[p] / max(1.0, float(target.sum()))
                total = total - share * torch.log(torch.exp(row[p]) / sum(torch.exp(a) for a in row))
        return total / len(z)

    return (mean(z, y) + mean(z.T, y.T)) / 2


def literal_sigmoid(z: Tensor, y: Tensor, over: str = "images") -> Tensor:
    total = z.new_zeros(())
    for i in range(z.shape[0]):
        for t in range(z.shape[1]):
            p = 1 / (1 + torch.exp(-z[i, t]))
            total = total - y[i, t] * torch.log(p) - (1 - y[i, t]) * torch.log(1 - p)
    return total / z.shape[0 if over == "images" else 1]


def literal_balance(y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    for t in range(y.shape[1]):
        n = sum(float(y[i, t]) for i in range(len(y)))
        for i in range(len(y)):
            out[i, t] = y[i, t] / n if n else 0.0
    return out


def sigmoid_without_derivative(pairs: PairBlocks, positives: Positives) -> Total:
    def values(block: Pairs, rows: slice, columns: slice) -> Tensor:
        return F.binary_cross_entropy_with_logits(block.logits, positives(block), reduction="none").sum(1)

    total = pairs.total(values)
    return Total(total, total.new_tensor(float(pairs.shape[0])), pairs.rows)


def softmax_without_derivative(pairs: PairBlocks, positives: Positives) -> Total:
    """Of one block, which sees all pairs."""

    def values(block: Pairs, rows: slice, columns: slice) -> Tensor:
        z, y = block.logits, positives(block)
        by_image = (z.logsumexp(1, keepdim=True) - z) * y / y.sum(1, keepdim=True).clamp_min(1)
        by_text = (z.logsumexp(0) - z) * y / y.sum(0).clamp_min(1)
        return 0.5 * (by_image + by_text * len(z) / z.shape[1]).sum(1)

    total = pairs.total(values)
    return Total(total, total.new_tensor(float(pairs.shape[0])), pairs.rows)


def compare(loss: Any, positives: Positives, literal: Callable[[Tensor, Tensor], Tensor], chunk: int) -> None:
    """Value and gradients of a loss against those of a literal function of logits and positives."""
    images, texts = features(5, [0, 1, 2, 3, 4], 0), features(8, [0, 0, 1, 2, 2, 3, 4, 4], 1)
    head = Head(Single(sizes()["debug"]), scale=7.0, bias=-2.0).double()
    initialise(head, 0)
    parameters = [images["vec"], texts["vec"], head.log_scale, head.bias]
    blocks = Blocks(head, images, texts, chunk)
    bound = positives.bind(blocks) if isinstance(positives, Balanced) else positives
    total = loss(blocks, bound)
    found = torch.autograd.grad(total.sum / total.count, parameters, allow_unused=True)
    assert float(blocks.rows.sum()) == pytest.approx(float(total.sum.detach()), rel=1e-12)

    logits = head.log_scale.exp() * (images["vec"] @ texts["vec"].T) + head.bias
    plain = positives.positives if isinstance(positives, Balanced) else positives
    y = plain(Pairs(logits, images["position"][:, None] == texts["position"], images, texts))
    expected = literal(logits, literal_balance(y) if isinstance(positives, Balanced) else y)
    assert float((total.sum / total.count).detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for mine, reference in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        assert (mine - reference).abs().max() < 1e-10


@pytest.mark.parametrize("which", list(POSITIVES))
@pytest.mark.parametrize(
    ("loss", "built_in", "chunk"),
    [
        *((sigmoid_without_derivative, sigmoid_loss, chunk) for chunk in CHUNKS),
        (softmax_without_derivative, softmax_loss, 0),
    ],
)
def test_a_loss_without_its_derivative_equals_the_built_in_one(
    loss: PairLoss, built_in: PairLoss, chunk: int, which: str
) -> None:
    found = []
    for function in (loss, built_in):
        images, texts = features(5, [0, 1, 2, 3, 4], 0), features(8, [0, 0, 1, 2, 2, 3, 4, 4], 1)
        head = Head(Single(sizes()["debug"]), scale=7.0, bias=-2.0).double()
        initialise(head, 0)
        blocks = Blocks(head, images, texts, chunk)
        total = function(blocks, POSITIVES[which])
        mean = total.sum / total.count
        parameters = [images["vec"], texts["vec"], head.log_scale, head.bias]
        found.append([mean.detach(), blocks.rows, *torch.autograd.grad(mean, parameters)])
    for mine, reference in zip(*found, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("which", list(POSITIVES))
@pytest.mark.parametrize("form", ["out", "in"])
def test_supcon(form: Any, which: str, chunk: int) -> None:
    compare(partial(supcon_loss, form=form), POSITIVES[which], partial(literal_supcon, form=form), chunk)


@pytest.mark.parametrize("form", ["out", "in"])
def test_supcon_of_one_text_a_image_is_clip_s_loss(form: Any) -> None:
    images, texts = features(4, [0, 1, 2, 3], 0), features(4, [0, 1, 2, 3], 1)
    head = Head(Single(sizes()["debug"]), scale=7.0).double()
    initialise(head, 0)
    found, expected = (
        f(Blocks(head, images, texts), POSITIVES["one"]).sum for f in (partial(supcon_loss, form=form), softmax_loss)
    )
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)


@pytest.mark.parametrize("form", ["out", "in"])
def test_supcon_with_large_logits_stays_finite(form: Any) -> None:
    images, texts = features(4, [0, 1, 2, 3], 0), features(4, [0, 1, 2, 3], 1)
    head = Head(Single(sizes()["debug"]), scale=1e4).double()
    initialise(head, 0)
    total = supcon_loss(Blocks(head, images, texts, 2), POSITIVES["many"], form)
    assert total.sum.isfinite()
    assert torch.autograd.grad(total.sum, [images["vec"]])[0].isfinite().all()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("which", list(POSITIVES))
@pytest.mark.parametrize(("loss", "literal"), [(sigmoid_loss, literal_sigmoid), (softmax_loss, literal_softmax)])
def test_balanced_positives(loss: Any, literal: Any, which: str, chunk: int) -> None:
    compare(loss, Balanced(POSITIVES[which]), literal, chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_softmax_over_many(chunk: int) -> None:
    compare(softmax_loss, POSITIVES["many"], literal_softmax, chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("over", ["images", "texts"])
def test_sigmoid_over_images_or_texts(over: Any, chunk: int) -> None:
    compare(partial(sigmoid_loss, reduction=over), POSITIVES["many"], partial(literal_sigmoid, over=over), chunk)


def test_balanced_positives_of_a_text_sum_to_one() -> None:
    images, texts = features(6, [0, 1, 2, 3, 4, 5], 0), features(4, [0, 1, 2, 3], 1)
    blocks = Blocks(Head(Single(sizes()["debug"])).double(), images, texts, 4)
    bound = Balanced(POSITIVES["many"]).bind(blocks)
    sums = torch.zeros(4, dtype=torch.float64)
    for rows, columns in blocks.blocks():
        sums[columns] += bound(blocks.block(rows, columns)).sum(0)
    assert sums.tolist() == pytest.approx([1, 1, 1, 1])
    assert math.isclose(float(bound(blocks.block(slice(0, 1), slice(0, 1)))), 0.5)  # images 0 and 3 share it


def test_a_text_that_no_rank_has_a_number_of_stays_without_one() -> None:
    logs = torch.tensor([[-torch.inf, 0.5], [2.0, -torch.inf]])
    found, beside = logsumexp_over_ranks(logs, torch.ones(1, 2))
    assert torch.equal(found, logs)
    assert torch.equal(beside, torch.ones(1, 2))
