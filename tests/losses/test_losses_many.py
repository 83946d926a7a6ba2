"""Losses for many positives, against loops over single pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import OptimConfig
from kiloword.losses.pairs import Balanced, sigmoid_loss, softmax_loss, supcon_loss
from kiloword.training.optimizer import Optimizer
from kiloword.types import Features, PairBlocks, Pairs, Positives, Total
from kiloword.verify.batch import batch
from literal import sigmoid_pairs, softmax_pairs
from parts import agree, blocks, cosine, gradients, learner, mean, units

CHUNKS = [0, 1, 3]
OF = [0, 0, 1, 2, 2, 3, 4, 4]


def sides(of: list[int] = OF) -> tuple[Features, Features]:
    images, texts = units(max(of) + 1, 6), units(len(of), 6, seed=1)
    return {"vec": images.requires_grad_()}, {"vec": texts.requires_grad_(), "position": torch.tensor(of)}


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


def without_derivative(pairs: PairBlocks, positives: Positives) -> Total:
    """The sigmoid loss as a user would write it: values alone."""

    def values(block: Pairs, rows: slice, columns: slice) -> Tensor:
        return F.binary_cross_entropy_with_logits(block.logits, positives(block), reduction="none").sum(1)

    total = pairs.total(values)
    return Total(total, total.new_tensor(float(pairs.shape[0])), pairs.rows)


OUT, IN = (partial(supcon_loss, form=form) for form in ("out", "in"))
LOSSES: list[tuple[Any, Callable[[Tensor, Tensor], Tensor], list[str]]] = [
    (OUT, partial(literal_supcon, form="out"), list(POSITIVES)),
    (IN, partial(literal_supcon, form="in"), list(POSITIVES)),
    (softmax_loss, softmax_pairs, ["many", *(f"balanced {name}" for name in POSITIVES)]),
    (
        sigmoid_loss,
        lambda z, y: sigmoid_pairs(z, y) / len(z),
        ["many", "few", *(f"balanced {name}" for name in POSITIVES)],
    ),
    (partial(sigmoid_loss, reduction="texts"), lambda z, y: sigmoid_pairs(z, y) / len(z.T), ["many"]),
    (without_derivative, lambda z, y: sigmoid_pairs(z, y) / len(z), list(POSITIVES)),
]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(
    ("loss", "literal", "which"),
    [
        pytest.param(loss, literal, which, id=f"{'supcon ' * (n < 2)}{n} {which}")
        for n, (loss, literal, cases) in enumerate(LOSSES)
        for which in cases
    ],
)
def test_values_and_gradients_are_the_literal_ones(loss: Any, literal: Any, which: str, chunk: int) -> None:
    (images, texts), head = sides(), cosine(7.0, -2.0)
    pairs, plain = blocks(head, images, texts, chunk), POSITIVES[which.removeprefix("balanced ")]
    balanced = which.startswith("balanced")
    total = loss(pairs, Balanced(plain).bind(pairs) if balanced else plain)
    torch.testing.assert_close(pairs.rows.sum(), total.sum.detach(), rtol=1e-12, atol=0)
    logits = head.log_scale.exp() * (images["vec"] @ texts["vec"].T) + head.bias
    positions = {"position": torch.arange(5)}, {"position": torch.tensor(OF)}
    y = plain(Pairs(logits, positions[0]["position"][:, None] == positions[1]["position"], *positions))
    if balanced:  # the images of a text share it
        y = torch.stack([column / max(1.0, float(column.sum())) for column in y.T], 1)
    expected = literal(logits, y)
    agree(mean(total), expected, [images["vec"], texts["vec"], head.log_scale, head.bias], rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("loss", [OUT, IN], ids=["supcon out", "supcon in"])
def test_supcon_of_one_text_an_image_is_clip_s_loss_and_finite(loss: Any) -> None:
    sums = [f(blocks(cosine(7.0), *sides([0, 1, 2, 3])), POSITIVES["one"]).sum for f in (loss, softmax_loss)]
    torch.testing.assert_close(*sums, rtol=1e-12, atol=0)
    images, texts = sides([0, 1, 2, 3])
    total = loss(blocks(cosine(1e4), images, texts, 2), POSITIVES["many"])
    assert total.sum.isfinite()
    assert torch.autograd.grad(total.sum, images["vec"])[0].isfinite().all()


@pytest.mark.parametrize("parts", [1, 2])
def test_without_a_pair_loss_the_head_stays(parts: int) -> None:
    made = learner("coca", {"contrast_weight": 0.0})
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    optimizer = Optimizer(made, OptimConfig(weight_decay=0.5), steps=10)
    losses = gradients(made, batch(method="coca"), parts)
    optimizer.step(5)
    torch.testing.assert_close(losses["loss:loss"], 2 * losses["loss:caption"])
    moved = {name for name, p in made.named_parameters() if not torch.equal(before[name], p)}
    assert moved == {name for name in before if ".head." not in name}
