"""PCME++'s matching loss and the loss of means beside it, against loops over single pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import mostly_slow
from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.method import annotated
from kiloword.methods.pcmepp.matching import WithDeterministic, matching_loss
from kiloword.methods.prolip.gaussian import csd
from kiloword.types import Features, Pairs
from parts import agree, blocks, drawn, mean, model

CHUNKS = [0, 1, 3]
IMAGES, TEXTS = [0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 2, 3, 4, 4]


def features(n: int, seed: int) -> Features:
    """Gaussians in double precision, wide enough to matter."""
    return {"vec": drawn(n, 6, seed=seed), "log_var": drawn(n, 6, seed=seed + 10) - 2.0}


def sides() -> tuple[Features, Features, list[Tensor]]:
    """Images, texts of which some are equal (of one image, and of several), and what both are made of."""
    images, texts = features(len(IMAGES), 0), features(len(TEXTS), 1)
    for name in ("vec", "log_var"):
        texts[name] = texts[name][[0, 0, 2, 0, 4, 5, 6, 4, 0]]
    leaves = [side[name].requires_grad_() for side in (images, texts) for name in ("vec", "log_var")]
    for side, position in ((images, IMAGES), (texts, TEXTS)):  # a gradient away from the sphere says nothing
        side |= {"vec": F.normalize(side["vec"], dim=1), "position": torch.tensor(position)}
    return images, texts, leaves


def gaussian_head(scale: float = 1.7, bias: float = 1.3, loss: str = "sigmoid") -> Any:
    auxiliary = {"loss": loss, "scale": 4.0, "bias": -1.0}
    return model("pcme+++deterministic", {"scale": scale, "bias": bias, "deterministic": auxiliary}).head


def distance(images: Features, i: int, texts: Features, t: int) -> Tensor:
    """arXiv:2305.18171, eq. 1."""
    total = images["vec"].new_zeros(())
    for d in range(6):
        gap = images["vec"][i, d] - texts["vec"][t, d]
        total = total + gap**2 + torch.exp(images["log_var"][i, d]) + torch.exp(texts["log_var"][t, d])
    return total


def entropy(z: Tensor, y: float) -> Tensor:
    p = 1 / (1 + torch.exp(-z))
    return -y * torch.log(p) - (1 - y) * torch.log(1 - p)


def literal(images: Features, texts: Features, y: Any, a: Tensor, b: Tensor, pseudo: float) -> Tensor:
    """The sum over pairs; y[i][t] is 0 or 1."""
    d = [[distance(images, i, texts, t) for t in range(len(TEXTS))] for i in range(len(IMAGES))]

    def near(i: int, t: int, j: int, u: int) -> bool:
        return float((d[i][t] - d[j][u]).detach()) <= 1e-13

    total = a.new_zeros(())
    for i, image in enumerate(IMAGES):
        for t, of in enumerate(TEXTS):
            z = -a * d[i][t] + b
            own_texts = [u for u in range(len(TEXTS)) if TEXTS[u] == image]
            own_images = [j for j in range(len(IMAGES)) if IMAGES[j] == of]
            of_image = y[i][t] or any(near(i, t, i, u) for u in own_texts)
            of_text = y[i][t] or any(near(i, t, j, t) for j in own_images)
            total = total + entropy(z, float(y[i][t]))
            total = total + pseudo * (entropy(z, float(of_image)) + entropy(z, float(of_text))) / 2
    return total


def other(pairs: Pairs) -> Tensor:
    """Annotated pairs, and some more."""
    more = (pairs.images["position"][:, None] - pairs.texts["position"]) == 2
    return (pairs.annotated | more).to(pairs.logits.dtype)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("positives", [annotated, other])
@pytest.mark.parametrize(("reduction", "count"), [("pairs", 45), ("images", 5)])
@pytest.mark.parametrize("pseudo", mostly_slow([0.0, 0.1, 3.0], 1))
def test_matching_loss_and_its_gradients(pseudo: float, reduction: Any, count: int, positives: Any, chunk: int) -> None:
    (images, texts, leaves), head = sides(), gaussian_head()
    pairs = blocks(head, images, texts, chunk)
    total = matching_loss(pairs, positives, pseudo, reduction)
    assert float(total.count) == count
    torch.testing.assert_close(pairs.rows.sum(), total.sum.detach(), rtol=1e-12, atol=0)
    y = [[int(p == t or (positives is other and p - t == 2)) for t in TEXTS] for p in IMAGES]
    expected = literal(images, texts, y, head.log_scale.exp()[0], head.bias[0], pseudo) / count
    agree(mean(total), expected, [*leaves, head.log_scale, head.bias], atol=1e-10)
    with torch.no_grad():
        free = matching_loss(blocks(head, images, texts, chunk), positives, pseudo, reduction)
    torch.testing.assert_close(free.sum, total.sum.detach(), rtol=1e-12, atol=0)


def test_pseudo_positives_are_those_as_near_as_the_farthest_own() -> None:
    """By hand: what lifts the loss of logits -5 is that their pair does not match."""
    vec = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    tilted = F.normalize(torch.tensor([[2.0, 1.0], [1.0, 2.0], [1.0, 1.0]], dtype=torch.float64), dim=1)
    images = {"vec": vec, "log_var": torch.full((2, 2), -9.0).double()}
    texts = {"vec": tilted, "log_var": torch.full((3, 2), -9.0).double(), "position": torch.tensor([0, 0, 1])}
    pairs = blocks(gaussian_head(), images, texts)  # the farthest of image 0's own is text 1; text 2 is nearer
    gap = matching_loss(pairs, annotated, 1.0).sum - matching_loss(pairs, annotated, 0.0).sum
    z = pairs.block(slice(0, 2), slice(0, 3)).logits
    of_image = torch.tensor([[1, 1, 1], [0, 1, 1]])  # text 1 is nearer to image 1 than its own text 2
    of_text = torch.tensor([[1, 1, 1], [0, 1, 1]])  # image 0 is as near to text 2 as image 1: a tie
    expected = sum((F.softplus(z) - y * z).sum() for y in (of_image, of_text)) / 2
    torch.testing.assert_close(gap, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("chunk", [3, 5, 7])
def test_equal_captions_are_equally_near_however_the_pairs_are_cut(chunk: int) -> None:
    """In single precision, where the same product of matrices of other shapes has other last bits."""

    def loss(chunk: int) -> Tensor:
        images, texts = ({k: v.float() for k, v in features(48, seed).items()} for seed in (0, 1))
        texts = {k: v[torch.arange(48) % 5] for k, v in texts.items()}
        return matching_loss(blocks(gaussian_head().float(), images, texts, chunk), annotated, 1.0).sum

    torch.testing.assert_close(loss(chunk), loss(0), rtol=2e-5, atol=0)


@given(st.floats(0.01, 500), st.floats(-20, 20), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_logits_are_of_distances_and_score_of_inverts_them(scale: float, bias: float, seed: int) -> None:
    images, texts = (
        {**side, "vec": F.normalize(side["vec"], dim=1)} for side in (features(5, seed), features(5, seed + 1))
    )
    head = gaussian_head(scale, bias)
    score = head.score(images, texts)
    logits = head.logits(score)
    expected = -head.log_scale.exp() * csd(images, texts) + head.bias
    torch.testing.assert_close(logits.diagonal(), expected, rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(head.score_of(logits), score, rtol=0, atol=1e-9)
    plain = model("prolip", {"scale": scale, "bias": bias}).head
    torch.testing.assert_close(plain.logits(score), plain.log_scale.exp() * score + plain.bias)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("own", [matching_loss, sigmoid_loss])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_loss_of_means_beside_that_of_gaussians(loss: Any, own: Any, chunk: int) -> None:
    (images, texts, leaves), head = sides(), gaussian_head(loss=loss)
    total = WithDeterministic(own, loss, 0.7)(blocks(head, images, texts, chunk), annotated)
    assert total.rows is not None
    torch.testing.assert_close(total.rows.sum(), total.sum.detach(), rtol=1e-12, atol=0)

    first, small = own(blocks(head, images, texts), annotated), head.get_submodule("deterministic")
    cosines = [[(images["vec"][i] * texts["vec"][t]).sum() for t in range(len(TEXTS))] for i in range(len(IMAGES))]
    z = torch.stack([torch.stack(row) for row in cosines]) * small.log_scale.exp()
    y = torch.tensor([[float(p == t) for t in TEXTS] for p in IMAGES], dtype=torch.float64)
    if loss == "sigmoid":
        z = z + small.bias
        second = sum(entropy(z[i, t], float(y[i, t])) for i in range(len(IMAGES)) for t in range(len(TEXTS))) / 5
    else:
        by_image = [-(y[i] / y[i].sum() * z[i].log_softmax(0)).sum() for i in range(len(IMAGES))]
        by_text = [-z[:, t].log_softmax(0)[TEXTS[t]] for t in range(len(TEXTS))]
        second = (torch.stack(by_image).mean() + torch.stack(by_text).mean()) / 2
    parameters = [p for p in (*leaves, head.log_scale, small.log_scale, small.bias) if p is not None]
    agree(mean(total), mean(first) + 0.7 * second, parameters, atol=1e-10)
