"""FLAIR, against torch's own attention with a token of zeros and loops over pairs (arXiv:2412.03561)."""

from __future__ import annotations

from dataclasses import replace
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
from kiloword.config.recipes import sizes
from kiloword.methods.flair import Attended, FlairLoss
from kiloword.methods.registry import preset
from kiloword.model.image import extra
from kiloword.model.model import initialise
from kiloword.types import Texts
from kiloword.verify.batch import MethodChoice, batch, config
from kiloword.verify.suite import learner, verify


def pooling(heads: int = 4) -> Attended:
    made = Attended(config(), heads).double()
    initialise(made, 3)
    for n, norm in enumerate((made.norm_query, made.norm_key, made.norm_value)):
        nn.init.normal_(norm.bias, generator=torch.Generator().manual_seed(n))
    return made


def literal(made: Attended, tokens: Tensor, words: Tensor) -> Tensor:
    """Scores [I, T] by torch's attention with biases, those of the norms, pair by pair. Args: words: pooled [T, W]."""
    dim = made.out.in_features
    attention = nn.MultiheadAttention(dim, made.heads, batch_first=True, add_zero_attn=True).double()
    weights = torch.cat([made.query.weight, made.key.weight, made.value.weight])
    norms, parts = (made.norm_query, made.norm_key, made.norm_value), (made.query, made.key, made.value)
    biases = torch.cat([part.weight @ norm.bias for norm, part in zip(norms, parts, strict=True)])
    plain = [partial(F.layer_norm, normalized_shape=(dim,), weight=norm.weight) for norm in norms]
    parameters = {"in_proj_weight": weights, "in_proj_bias": biases}
    parameters |= {"out_proj.weight": made.out.weight, "out_proj.bias": torch.zeros(dim, dtype=weights.dtype)}
    rows = []
    for one in tokens:
        patches = one[made.extra :] @ made.image_projection.weight.T
        scores = []
        for word in words:
            text = word @ made.text_projection.weight.T
            texts_and_patches = (text[None, None], patches[None], patches[None])
            sides = tuple(norm(x) for norm, x in zip(plain, texts_and_patches, strict=True))
            pooled, _ = torch.func.functional_call(attention, parameters, sides)
            scores.append(F.cosine_similarity(pooled[0, 0], text, dim=0))
        rows.append(torch.stack(scores))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def sides() -> tuple[Attended, Tensor, Tensor, Texts]:
    """A pooling, tokens of images, and packed tokens of texts of which the last is read."""
    generator, size = torch.Generator().manual_seed(0), config()
    count = extra(size.image) + (size.image.size // size.image.patch) ** 2
    tokens = torch.randn(3, count, size.image.width, generator=generator, dtype=torch.float64)
    texts = Texts.pack([[7, 8], [9, 7, 8], [8], [7, 7]])
    packed = torch.randn(len(texts.ids), size.text.width, generator=generator, dtype=torch.float64)
    return pooling(), tokens, packed, texts


@pytest.mark.parametrize("turned", [0, -6, -12, -20])
def test_texts_that_hardly_attend_to_patches_have_scores_and_gradients(turned: float) -> None:
    """The rest of their attention goes to the empty token, whose value is 0: the mixed vector is small, not wrong."""
    made, generator = pooling(), torch.Generator().manual_seed(0)
    heads, dim = made.heads, made.out.in_features
    towards = F.normalize(torch.randn(heads, dim // heads, generator=generator), dim=-1)
    keys, values = (torch.randn(2, 50, heads, dim // heads, generator=generator) for _ in range(2))
    keys = 0.05 * keys + towards * turned / (4 * made.factor)
    keys[:, -1], values[:, -1] = 0, 0
    query = 4 * towards + 0.1 * torch.randn(3, heads, dim // heads, generator=generator)
    texts = {"vec": F.normalize(torch.randn(3, dim, generator=generator), dim=1), "query": query}
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = keys.to(dtype, copy=True).requires_grad_()
        images = {"vec": torch.ones(2, dim, dtype=dtype), "keys": leaf, "values": values.to(dtype)}
        if dtype == torch.float32:
            scores = made.float().score(images, texts)
        else:
            weights = torch.einsum("inmd,tmd->itmn", leaf, query.double() * made.factor).softmax(-1)
            mixed = torch.einsum("itmn,inmd->itmd", weights, values.double()).flatten(2)
            pooled = F.normalize(mixed @ made.double().out.weight.T, dim=-1)
            scores = torch.einsum("itd,td->it", pooled, texts["vec"].double())
        results.append((scores.detach().double(), torch.autograd.grad(scores.sum(), leaf)[0].double()))
    (fast, fast_gradient), (slow, slow_gradient) = results
    torch.testing.assert_close(fast, slow, atol=2e-6, rtol=0)
    assert float((fast_gradient - slow_gradient).norm() / slow_gradient.norm()) < 1e-3


def test_scores_and_gradients_are_those_of_torchs_attention(sides: tuple[Attended, Tensor, Tensor, Texts]) -> None:
    made, tokens, packed, texts = sides
    measured = []
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    for fast in (True, False):
        leaf, words = tokens.clone().requires_grad_(), packed.clone().requires_grad_()
        pooled = made.text_pool(words, texts)
        scores = made.score(made.image(leaf), made.text(words, texts)) if fast else literal(made, leaf, pooled)
        inputs = [leaf, words, *(p for name, p in made.named_parameters() if not name.startswith("image_pool"))]
        measured.append([scores.detach(), *torch.autograd.grad((weight * scores).sum(), inputs)])
    for a, b in zip(*measured, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_pairs_one_by_one_and_blocks_agree(sides: tuple[Attended, Tensor, Tensor, Texts]) -> None:
    made, tokens, packed, texts = sides
    images, words = made.image(tokens), made.text(packed, texts)
    whole = made.score(images, words)
    alone = made.score_pairs(images, {name: value[:3] for name, value in words.items()})
    torch.testing.assert_close(alone, whole.diagonal(), rtol=1e-12, atol=1e-13)


def test_the_loss_is_the_mean_of_both_over_all_texts() -> None:
    made, some = learner(MethodChoice("flair", {"other_texts": "all"})), batch(method="flair")
    encoded, head = made.encode(some), made.model.head
    target = torch.arange(len(some))[:, None] == some.image_of_text
    sign = 2.0 * target - 1
    whole: Any = head.whole
    attended = F.logsigmoid(sign * head.logits(head.score(encoded.images, encoded.texts))).sum()
    cosines = encoded.images["vec"] @ encoded.texts["vec"].T
    expected = -(attended + F.logsigmoid(sign * whole.logits(cosines)).sum()) / (2 * len(some.texts))
    measured = made.pair_losses(made.all_inputs(encoded, some))["pair"]
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=0)


def test_texts_of_another_image_as_one_are_the_mean_over_all_draws_of_one() -> None:
    """The authors compare an image with its own texts and one text of every other image, and divide by their number."""
    made, some = learner("flair"), batch(end=3, method="flair")
    encoded = made.encode(some)
    own = torch.arange(3)[:, None] == some.image_of_text
    logits = made.model.head.logits(made.model.head.score(encoded.images, encoded.texts))
    losses = F.softplus(torch.where(own, -logits, logits))
    texts = [own[image].nonzero()[:, 0].tolist() for image in range(3)]
    drawn = []
    for image in range(3):
        draws = list(product(*(texts[other] for other in range(3) if other != image)))
        drawn.append(torch.stack([losses[image, [*texts[image], *draw]].sum() for draw in draws]).mean())
    expected = torch.stack(drawn).sum() / (3 + len(some.texts) / 3 - 1)
    made.method = replace(made.method, pair_loss=FlairLoss(0.0, "one"))
    measured = made.pair_losses(made.all_inputs(encoded, some))["pair"]
    pooling = made.model.head.pooling
    assert isinstance(pooling, Attended)
    weights = pooling.query.weight, pooling.value.weight
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, weights, retain_graph=True) for value in (measured, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-15)


def test_attention_of_a_text_goes_to_patches_and_to_nothing() -> None:
    made = learner("flair").model
    some = batch(method="flair")
    images, texts = made.encode_image(some.images)[1], made.encode_text(some.texts)[1]
    weights = made.head.explain(images, texts)
    patches = (made.config.image.size // made.config.image.patch) ** 2
    assert weights.shape == (16, len(some.texts), 8, patches)
    assert 0 < float(weights.detach().sum(-1).max()) < 1


def test_a_model_scores_explains_and_is_found_by_its_shortlist(tmp_path: Path) -> None:
    matcher = kiloword.load(model_folder(tmp_path / "m", "flair"))
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    texts = ["a red star", "two circles"]
    scores = matcher.score(pixels, texts)
    assert scores.shape == (3, 2)
    torch.testing.assert_close(matcher.score(matcher.encode_image(pixels), texts), scores)
    explained = matcher.explain(pixels, texts)
    assert explained.maps.shape == (3, 2, 4)
    assert matcher.classify(pixels, ["star", "circle"]).sum(1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("clip+attended", {}, "has no sigmoid loss"),
        ("llip+attended", {}, "does not pool images into one vector each"),
        ("prolip+attended", {}, "does not pool images into one vector each"),
        ("flair+contextual", {}, "has a pooling that contextual cannot replace"),
    ],
)
def test_what_does_not_mix_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name, settings)


@pytest.mark.slow
def test_texts_of_another_image_as_all_conform() -> None:
    checks = verify(MethodChoice("flair", {"other_texts": "all"}), (1, 2, 4))
    assert not [check for check in checks if not check.passed]


def test_texts_of_another_image_count_as_all_or_one() -> None:
    with pytest.raises(ValueError, match="other_texts"):
        preset("flair", {"other_texts": "two"})


def test_heads_must_divide_the_embedding() -> None:
    with pytest.raises(ValueError, match=r"--settings\.heads 3 does not divide the embedding size"):
        Attended(sizes()["debug"], 3)


def test_the_loss_of_whole_images_can_be_omitted() -> None:
    slots = preset("flair", {"whole": 0.0})
    assert not slots.head(slots.shape(sizes()["debug"])).inner()
    assert preset("siglip+attended").head(sizes()["debug"]).inner().keys() == {"whole"}
