"""CoCa's captions against loops: loss, masks, causality, weights; what is refused (arXiv:2401.02137, eq. 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import mostly_slow
from kiloword.config.recipes import ModelConfig, TextConfig
from kiloword.methods.coca import masking
from kiloword.methods.registry import preset
from kiloword.model.decoder import predicted
from kiloword.models.build import build
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.types import Batch
from kiloword.verify.batch import config
from literal import (
    CAPTIONS,
    assert_equal,
    attend,
    attentive,
    captions_of,
    image_tokens,
    linear,
    lowest,
    made,
    norm,
    pairs,
    small,
    term,
    word_logits,
)


def cross_entropy(logits: Tensor, target: int, smoothing: float) -> Tensor:
    return F.cross_entropy(logits[None], torch.tensor([target]), label_smoothing=smoothing)


def expected(learner: Learner, batch: Batch, memory: Callable[[int], Tensor], smoothing: float = 0.0) -> Tensor:
    """Eq. 4: one caption after the other, one word after the other, from the words before it and text n's memory."""
    extra, losses = len(learner.model.config.text.extra_tokens), []
    for n, ids in enumerate(captions_of(batch.texts)):
        said = ids[: len(ids) - extra]
        for j in range(1, len(said)):
            losses.append(cross_entropy(word_logits(said[:j], memory(n), learner.model), said[j], smoothing))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("said", [{}, {"smoothing": 0.3, "tied": True}, {"decoder_depth": 2, "class_token": False}])
def test_caption_loss(said: dict[str, Any]) -> None:
    """Value and every gradient; images of several captions share what the decoder sees."""
    learner = made("coca", said)
    batch = pairs(learner.model, CAPTIONS)
    assert len(batch.texts) == 7 > len(batch)
    images = learner.model.normalise(batch.images)
    slow = expected(
        learner,
        batch,
        lambda n: image_tokens(images[batch.image_of_text[n]], learner.model),
        said.get("smoothing", 0.0),
    )
    fast = term(learner, "caption", batch)
    assert_equal(learner, fast, slow)
    words = sum(len(words) + 1 for own in CAPTIONS for words in own)
    assert learner.counts([batch])["caption"] == words  # words and ends; no start, no class token


@pytest.mark.parametrize("op", mostly_slow(["drop", "token"], 0))
@pytest.mark.parametrize("mask", ["attentive", "random"])
def test_captions_of_masked_images(mask: str, op: str) -> None:
    """The patches of the lowest score are gone: of each caption its own, or random ones of the image."""
    learner = made("coca", {"caption_mask": mask, "caption_op": op, "caption_share": 0.3})
    model = learner.model
    batch = pairs(model, CAPTIONS)
    images, noise = model.normalise(batch.images), masking.noise(batch, "caption.mask", 16)

    def memory(n: int) -> Tensor:
        i = int(batch.image_of_text[n])
        scored = noise[i].tolist()
        if mask == "attentive":
            with torch.no_grad():
                scored = attentive(learner, batch, n)
        return image_tokens(images[i], model, lowest(scored, 5), op)

    assert_equal(learner, term(learner, "caption", batch), expected(learner, batch, memory))


@pytest.mark.slow
def test_a_pool_of_queries() -> None:
    """The first query makes the vector, the others what captions see."""
    shape = small()
    head = replace(shape.head, image_pool="attentional", pool_queries=3, pool_width=24, pool_heads=2)
    learner = made("coca", shape=replace(shape, head=head))
    batch = pairs(learner.model, CAPTIONS)
    images = learner.model.normalise(batch.images)
    pool: Any = learner.model.head.pooling.image_pool.attentional  # type: ignore[attr-defined]
    assert pool.probes.shape == (4, 24)

    def gathered(n: int) -> Tensor:
        k, v = linear(image_tokens(images[n], learner.model), pool.attention.kv).chunk(2, 1)
        q = linear(norm(pool.probes, pool.norm_query), pool.attention.q)
        return norm(linear(attend(q, k, v, 2), pool.attention.out), pool.norm)

    slow = expected(learner, batch, lambda n: gathered(int(batch.image_of_text[n]))[1:])
    assert_equal(learner, term(learner, "caption", batch), slow)
    for n, vec in enumerate(learner.encode(batch).images["vec"]):
        projected = learner.model.head.project_image_tokens(gathered(n)[0])
        torch.testing.assert_close(vec, projected / projected.norm(), rtol=0, atol=1e-12)


# Nothing leaks


@pytest.mark.parametrize("more", ["coca", "siglip+caption", "siglip+gaussian+caption", "coca+gaussian"])
def test_a_word_sees_what_is_before_it(more: str) -> None:
    """What predicts word j depends on all words before j and on none from j on, of its own caption alone."""
    learner = made(more)
    model = learner.model
    lengths, words = (4, 1, 3), iter(range(10, 60))
    batch = pairs(model, [[[next(words) for _ in range(n)]] for n in lengths])
    extra = len(model.config.text.extra_tokens)
    assert extra == {"coca": 1, "siglip+caption": 0, "siglip+gaussian+caption": 1, "coca+gaussian": 2}[more]
    out: list[Tensor] = []
    model.more["text_decoder"].register_forward_hook(lambda *args: out.append(args[-1]))
    term(learner, "caption", batch)
    place = 0
    for ids in captions_of(batch.texts):
        for j in range(len(ids) - extra - 1):
            (found,) = torch.autograd.grad(out[0][place].sum(), model.text_tower.tokens, retain_graph=True)
            assert set(found.abs().sum(1).nonzero()[:, 0].tolist()) == set(ids[: j + 1])
            place += 1
    assert place == len(out[0])


@pytest.mark.parametrize("stem", ["linear", "conv"])
@pytest.mark.parametrize("op", ["drop", "token"])
def test_captions_do_not_see_hidden_patches(op: str, stem: str) -> None:
    learner = made("coca", {"caption_mask": "random", "caption_op": op}, small(stem=stem))
    batch = pairs(learner.model, [[[9, 30]], [[40]]])
    pixels = learner.model.normalise(batch.images).requires_grad_()
    learner.model.image_tower.register_forward_pre_hook(lambda tower, args: (pixels, *args[1:]))
    (found,) = torch.autograd.grad(term(learner, "caption", batch), pixels)
    by_patch = found.abs().unfold(2, 8, 8).unfold(3, 8, 8).sum((1, 4, 5)).flatten(1)
    for row, scored in zip(by_patch, masking.noise(batch, "caption.mask", 16).tolist(), strict=True):
        hidden = lowest(scored, 8)
        assert [place for place in range(16) if row[place] == 0] == hidden


# Vocabulary


def test_only_what_texts_say_has_logits() -> None:
    """Special ids behind the words are never predicted; an end token is, wherever it stands."""
    own = TextConfig(vocab=300)
    assert predicted(own) == 300
    clip = {"start": 49406, "end": 49407, "pad": 0, "mask": 49408, "cls": 49409, "unc": 49410}
    assert predicted(TextConfig(vocab=49411, special=clip)) == predicted(TextConfig(vocab=49408, special=clip)) == 49408
    for tied in (True, False):
        shape = small()
        text = replace(shape.text, vocab=302, special={**shape.text.special, "cls": 300, "unc": 301})
        learner = made("coca", {"tied": tied}, replace(shape, text=text))
        decoder: Any = learner.model.more["text_decoder"]
        assert decoder.table(learner.model.text_tower.tokens).shape == (300, 32)
        assert term(learner, "caption", pairs(learner.model, [[[299]]])).isfinite()


def test_decoders_start_as_towers_of_as_many_blocks() -> None:
    """A layer adds to the stream twice as often as a tower's block; the painter without text as often."""
    for method, said, blocks in (("coca", {}, 6), ("clip+mim", {"guide": "none", "mim_mask": "random"}, 3)):
        depth = {"decoder_depth": 3} if method == "coca" else {"image_decoder_depth": 3}
        learner = made(method, {**said, **depth} if method == "coca" else {"mim": {**said, **depth}})
        (decoder,) = learner.model.more.values()
        added = [
            p for name, p in decoder.named_parameters() if name.endswith(("attention.out.weight", "mlp.proj.weight"))
        ]
        assert len(added) == 2 * blocks
        for p in added:
            assert p.std().item() == pytest.approx((2 * blocks * 32) ** -0.5, rel=0.08)


# Weights of the losses


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_weights_and_micro_batches(weight: float) -> None:
    """contrast_weight ITC + caption_weight IC; without ITC the head stays, but for what captions look through."""
    shape = small()
    shape = replace(shape, head=replace(shape.head, image_pool="attentional", pool_queries=2, pool_heads=2))
    said = {"contrast_weight": weight, "caption_weight": 3.0}
    found = []
    for micro in (1, 4):
        learner = made("coca", said, shape)
        report = backward(learner, pairs(learner.model, CAPTIONS).split(micro))
        assert report["loss"].item() == pytest.approx(
            (weight * report["pair"] + 3 * report["caption"]).item(), rel=1e-12
        )
        found.append((report, {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}))
    assert found[0][1].keys() == found[1][1].keys()
    for name, g in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], g, rtol=0, atol=1e-11, msg=name)
    for name, value in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], value, rtol=1e-12, atol=0)
    head = {name.split(".")[3] for name in found[0][1] if name.startswith("head.pooling.image_pool")}
    assert head == {"attentional"}
    assert ("head.log_scale" in found[0][1]) == (weight > 0)


# Refusals and mixes


OUT_OF_RANGE = [
    ({"caption_weight": 0.0}, "caption_weight is 0.0: expected above 0; to disable it, use"),
    ({"caption_weight": float("nan")}, "caption_weight is nan"),
    ({"contrast_weight": -1.0}, "contrast_weight is -1.0: expected at least 0"),
    ({"contrast_weight": float("inf")}, "contrast_weight is inf"),
    ({"smoothing": 1.0}, "smoothing is 1.0: expected 0 to below 1"),
    ({"smoothing": float("nan")}, "smoothing is nan"),
    ({"decoder_depth": -1}, "decoder_depth is -1: expected 0 to 1024"),
    ({"caption_mask": "low"}, "caption_mask"),
    ({"caption_op": "blur"}, "caption_op"),
    ({"similarity": "euclid"}, "similarity"),
]


@pytest.mark.parametrize(("said", "sentence"), OUT_OF_RANGE)
def test_settings_out_of_range_are_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"settings of coca: .*{sentence}"):
        preset("coca", said)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(s, "above 0 and below 1") for s in (0.0, 1.0, float("nan"))],
)
def test_no_share_is_refused(share: float, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"caption_share is .*: expected {expected}"):
        made("coca", {"caption_mask": "random", "caption_share": share})


def test_what_shows_a_word_to_itself_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"attends to later words: use a causal one.*\(--settings\.bidirectional False"
    ):
        build(config(), preset("prolip+caption"))
    build(config(), preset("prolip+caption", {"bidirectional": False}))
    padded = replace(config(), text=replace(config().text, pad_to_context=True))
    with pytest.raises(ValueError, match="this text tower attends to pads"):
        build(padded, preset("coca"))


def test_what_cannot_mix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"coca predicts captions already: omit \+caption"):
        preset("coca+caption")
    none = replace(config(), head=replace(config().head, image_pool="attentional", pool_queries=0))
    with pytest.raises(ValueError, match="pool_queries is 0: expected at least 1"):
        build(none, preset("coca"))
    shape = small(size=8)
    with pytest.raises(ValueError, match="images of one patch cannot be masked"):
        made("coca", {"caption_mask": "random"}, shape)
    head = replace(config().head, image_pool="attentional", pool_width=16)
    with pytest.raises(
        ValueError, match=r"attentive masks project patches of width 32.*pooled queries.*: use random masks"
    ):
        made("coca", {"caption_mask": "attentive"}, replace(config(), head=head))
    made("coca", {"caption_mask": "random"}, replace(config(), head=head))


MIXES = [
    "siglip+caption",
    "llip+caption",
    "coca+contextual",
    "coca+gaussian",
    "siglip+gaussian+caption",
    "clip-c+caption",
]


@pytest.mark.parametrize("method", MIXES)
@pytest.mark.parametrize("pool", ["cls", "attentional"])
def test_any_causal_method_may_write(method: str, pool: Any) -> None:
    shape = small()
    shape = replace(shape, head=replace(shape.head, image_pool=pool, pool_width=24, pool_heads=2))
    learner = made(method, shape=shape)
    report = backward(learner, [pairs(learner.model, CAPTIONS)])
    assert report["caption"].isfinite()
    silent = [n for n, p in learner.model.named_parameters() if p.requires_grad and p.grad is None]
    assert not silent


def test_texts_end_in_a_class_token_where_the_last_is_read() -> None:
    def extra(method: str, shape: ModelConfig, **said: Any) -> tuple[str, ...]:
        return preset(method, said).shape(shape).text.extra_tokens

    assert extra("coca", config()) == ("cls",)
    assert extra("coca", config(), class_token=False) == ()
    assert extra("coca", replace(config(), head=replace(config().head, text_pool="max"))) == ()
    assert extra("siglip+caption", config()) == ()
