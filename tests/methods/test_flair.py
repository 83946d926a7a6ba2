"""FLAIR, against torch's own attention with a token of zeros and loops over pairs (arXiv:2412.03561)."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kiloword
from folders import model_folder
from kiloword.model.image import extra
from kiloword.verify.batch import batch
from literal import CAPTIONS, made, pairs, sigmoid_pairs
from parts import agree, learner, losses, model


def literal(pooling: Any, tokens: Tensor, words: Tensor, heads: int) -> Tensor:
    """Scores [I, T] by torch's attention with biases, those of the norms, pair by pair. Args: words: pooled [T, W]."""
    dim = pooling.out.in_features
    attention = nn.MultiheadAttention(dim, heads, batch_first=True, add_zero_attn=True).double()
    weights = torch.cat([pooling.query.weight, pooling.key.weight, pooling.value.weight])
    norms = (pooling.norm_query, pooling.norm_key, pooling.norm_value)
    parts = (pooling.query, pooling.key, pooling.value)
    biases = torch.cat([part.weight @ norm.bias for norm, part in zip(norms, parts, strict=True)])
    plain = [partial(F.layer_norm, normalized_shape=(dim,), weight=norm.weight) for norm in norms]
    parameters = {"in_proj_weight": weights, "in_proj_bias": biases}
    parameters |= {"out_proj.weight": pooling.out.weight, "out_proj.bias": torch.zeros(dim, dtype=weights.dtype)}
    rows = []
    for one in tokens:
        patches = one @ pooling.image_projection.weight.T
        scores = []
        for word in words:
            text = word @ pooling.text_projection.weight.T
            texts_and_patches = (text[None, None], patches[None], patches[None])
            sides = tuple(norm(x) for norm, x in zip(plain, texts_and_patches, strict=True))
            pooled, _ = torch.func.functional_call(attention, parameters, sides)
            scores.append(F.cosine_similarity(pooled[0, 0], text, dim=0))
        rows.append(torch.stack(scores))
    return torch.stack(rows)


def test_scores_and_gradients_are_those_of_torchs_attention() -> None:
    flair = made("flair", {"heads": 4})
    some, head = pairs(flair.model, CAPTIONS), flair.model.head
    encoded, pooling = flair.encode(some), head.get_submodule("pooling")
    patches = encoded.image_tokens[:, extra(flair.model.config.image) :]
    words = encoded.text_tokens[some.texts.starts[1:] - 1]
    found, weights = head.score(encoded.images, encoded.texts), torch.linspace(-1, 1, 28, dtype=torch.float64)
    expected = literal(pooling, patches, words, 4)
    leaves = list(flair.model.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    agree((weights.view(4, 7) * found).sum(), (weights.view(4, 7) * expected).sum(), leaves, atol=1e-11)
    alone = head.score_pairs(encoded.images, {name: value[:4] for name, value in encoded.texts.items()})
    torch.testing.assert_close(alone, found.diagonal(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("turned", [0, -6, -12, -20])
def test_texts_that_hardly_attend_to_patches_have_scores_and_gradients(turned: float) -> None:
    """The rest of their attention goes to the empty token, whose value is 0: the mixed vector is small, not wrong."""
    single, double = (model("flair", {"heads": 4}).to(dtype).head.pooling for dtype in (torch.float32, torch.float64))
    generator, heads, dim = torch.Generator().manual_seed(0), 4, double.out.in_features
    factor = (dim // heads) ** -0.5
    towards = F.normalize(torch.randn(heads, dim // heads, generator=generator), dim=-1)
    keys, values = (torch.randn(2, 50, heads, dim // heads, generator=generator) for _ in range(2))
    keys = 0.05 * keys + towards * turned / (4 * factor)
    keys[:, -1], values[:, -1] = 0, 0
    query = 4 * towards + 0.1 * torch.randn(3, heads, dim // heads, generator=generator)
    texts = {"vec": F.normalize(torch.randn(3, dim, generator=generator), dim=1), "query": query}
    leaves = [keys.to(dtype, copy=True).requires_grad_() for dtype in (torch.float32, torch.float64)]
    found = single.score({"vec": torch.ones(2, dim), "keys": leaves[0], "values": values}, texts)
    weights = torch.einsum("inmd,tmd->itmn", leaves[1], query.double() * factor).softmax(-1)
    mixed = torch.einsum("itmn,inmd->itmd", weights, values.double()).flatten(2)
    pooled = F.normalize(mixed @ single.out.weight.double().T, dim=-1)
    expected = torch.einsum("itd,td->it", pooled, texts["vec"].double())
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    a, b = (torch.autograd.grad(x.sum(), leaf)[0].double() for x, leaf in zip((found, expected), leaves, strict=True))
    assert float((a - b).norm() / b.norm()) < 1e-3


def signed(flair: Any, some: Any) -> tuple[Tensor, Tensor, Any]:
    """Which texts are of an image [I, T], the attended logits, and the features."""
    encoded, head = flair.encode(some), flair.model.head
    own = torch.arange(len(some))[:, None] == some.image_of_text
    return own, head.logits(head.score(encoded.images, encoded.texts)), encoded


def test_the_loss_is_the_mean_of_both_over_all_texts() -> None:
    flair, some = learner("flair", {"other_texts": "all"}), batch(method="flair")
    own, logits, encoded = signed(flair, some)
    whole: Any = flair.model.head.get_submodule("whole")
    of_whole = whole.logits(encoded.images["vec"] @ encoded.texts["vec"].T)
    expected = (sigmoid_pairs(logits, own.double()) + sigmoid_pairs(of_whole, own.double())) / (2 * len(some.texts))
    torch.testing.assert_close(losses(flair, some)["pair"], expected, rtol=1e-12, atol=0)


def test_texts_of_another_image_as_one_are_the_mean_over_all_draws_of_one() -> None:
    """The authors compare an image with its own texts and one text of every other image, and divide by their number."""
    flair, some = learner("flair", {"whole": 0.0}), batch(end=3, method="flair")
    own, logits, _ = signed(flair, some)
    each = F.softplus(torch.where(own, -logits, logits))
    texts = [own[image].nonzero()[:, 0].tolist() for image in range(3)]
    drawn = []
    for image in range(3):
        draws = list(product(*(texts[other] for other in range(3) if other != image)))
        drawn.append(torch.stack([each[image, [*texts[image], *draw]].sum() for draw in draws]).mean())
    expected = torch.stack(drawn).sum() / (3 + len(some.texts) / 3 - 1)
    agree(losses(flair, some)["pair"], expected, list(flair.model.parameters()))
    assert not [name for name, _ in flair.named_parameters() if "whole" in name]


def test_a_model_explains_and_classifies(tmp_path: Path) -> None:
    matcher = kiloword.load(model_folder(tmp_path / "m", "flair"))
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    texts = ["a red star", "two circles"]
    maps, patches = matcher.explain(pixels, texts), matcher.encode_image(pixels)
    weights = matcher.model.head.pooling.explain(patches, matcher.encode_text(texts))
    torch.testing.assert_close(maps.maps, weights.mean(2))
    assert (maps.maps.shape, bool((maps.maps.sum(2) < 1).all())) == ((3, 2, 4), True)  # the rest goes to no patch
    assert matcher.classify(pixels, ["star", "circle"]).sum(1).tolist() == pytest.approx([1, 1, 1])
