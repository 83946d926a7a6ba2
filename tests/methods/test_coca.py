"""CoCa's captions against loops: loss, masks, causality, weights; all at once, CapPa's (arXiv:2401.02137, eq. 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor

import literal
from cases import mostly_slow
from kiloword.config.recipes import ModelConfig, TextConfig
from kiloword.methods.coca.coca import word_loss
from kiloword.methods.registry import preset
from kiloword.model.decoder import predicted
from kiloword.randomness import uniform
from kiloword.training.step import backward
from kiloword.types import Batch
from parts import Largest, drawn, gradients, learner


def expected(learner: Any, batch: Batch, memory: Callable[[int], Tensor], smoothing: float = 0.0) -> Tensor:
    """Eq. 4: one caption after the other, one word after the other, from the words before it and text n's memory."""
    extra, losses = len(learner.model.config.text.extra_tokens), []
    for n, ids in enumerate(literal.captions_of(batch.texts)):
        said = ids[: len(ids) - extra]
        for j in range(1, len(said)):
            logits, target = literal.word_logits(said[:j], memory(n), learner.model), torch.tensor([said[j]])
            losses.append(F.cross_entropy(logits[None], target, label_smoothing=smoothing))
    return torch.stack(losses).sum()


def images_of(learner: Any, batch: Batch) -> Tensor:
    """The normalised image of each text."""
    return learner.model.normalise(batch.images)[batch.image_of_text]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("coca", {}),
        ("coca", {"smoothing": 0.3, "tied": True}),
        ("coca", {"decoder_depth": 2, "class_token": False}),
        ("siglip+caption", {}),
        ("siglip+gaussian+caption", {}),
        ("coca+gaussian", {}),
    ],
)
def test_caption_loss(method: str, said: dict[str, Any]) -> None:
    """Value and every gradient, whatever tokens are added; images of several captions share what the decoder sees."""
    coca = literal.made(method, said)
    batch = literal.pairs(coca.model, literal.CAPTIONS)
    assert len(batch.texts) == 7 > len(batch)
    images = images_of(coca, batch)
    slow = expected(coca, batch, lambda n: literal.image_tokens(images[n], coca.model), said.get("smoothing", 0.0))
    literal.assert_equal(coca, literal.term(coca, "caption", batch), slow)
    words = sum(len(words) + 1 for own in literal.CAPTIONS for words in own)
    assert coca.counts([batch])["caption"] == words  # words and ends; no start, no class token


@pytest.mark.parametrize("op", mostly_slow(["drop", "token"], 0))
@pytest.mark.parametrize("mask", ["attentive", "random"])
def test_captions_of_masked_images(mask: str, op: str) -> None:
    """The patches of the lowest score are gone: of each caption its own, or random ones of the image."""
    coca = literal.made("coca", {"caption_mask": mask, "caption_op": op, "caption_share": 0.3})
    batch = literal.pairs(coca.model, literal.CAPTIONS)
    images, noise = images_of(coca, batch), uniform(batch.seeds, "caption.mask", 16)

    def memory(n: int) -> Tensor:
        with torch.no_grad():
            scored = (
                literal.attentive(coca, batch, n) if mask == "attentive" else noise[batch.image_of_text[n]].tolist()
            )
        return literal.image_tokens(images[n], coca.model, literal.lowest(scored, 5), op)

    literal.assert_equal(coca, literal.term(coca, "caption", batch), expected(coca, batch, memory))


@pytest.mark.slow
def test_a_pool_of_queries() -> None:
    """The first query makes the vector, the others what captions see."""
    shape = literal.small()
    head = replace(shape.head, image_pool="attentional", pool_queries=3, pool_width=24, pool_heads=2)
    coca = literal.made("coca", shape=replace(shape, head=head))
    batch = literal.pairs(coca.model, literal.CAPTIONS)
    images = coca.model.normalise(batch.images)
    pool: Any = coca.model.head.get_submodule("pooling.image_pool.attentional")
    assert pool.probes.shape == (4, 24)

    def gathered(n: int) -> Tensor:
        k, v = literal.linear(literal.image_tokens(images[n], coca.model), pool.attention.kv).chunk(2, 1)
        q = literal.linear(literal.norm(pool.probes, pool.norm_query), pool.attention.q)
        return literal.norm(literal.linear(literal.attend(q, k, v, 2), pool.attention.out), pool.norm)

    slow = expected(coca, batch, lambda n: gathered(int(batch.image_of_text[n]))[1:])
    literal.assert_equal(coca, literal.term(coca, "caption", batch), slow)
    for n, vec in enumerate(coca.encode(batch).images["vec"]):
        projected = coca.model.head.pooling.project_image_tokens(gathered(n)[0])
        torch.testing.assert_close(vec, projected / projected.norm(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("parts", [1, 2])
def test_sums_over_the_tokens_of_a_caption(parts: int) -> None:
    """Eq. 4 as printed sums over tokens: a long caption weighs more than a short one. The mean is over captions."""
    losses = {}
    for reduction in ("tokens", "captions"):
        coca = literal.made("coca", {"caption_reduction": reduction})
        losses[reduction] = float(backward(coca, literal.pairs(coca.model, literal.CAPTIONS).split(parts))["caption"])
    words = [len(own) for captions in literal.CAPTIONS for own in captions]
    assert losses["captions"] == pytest.approx(losses["tokens"] * sum(n + 1 for n in words) / len(words), rel=1e-10)


# All words at once: arXiv:2306.07915, section 3.1, and its big_vision code


def parallel_logits(length: int, memory: Tensor, model: Any) -> Tensor:
    """[length, V]: of every place of a caption, from as many mask tokens, all of which see each other and the image."""
    decoder = model.more["text_decoder"]
    x = literal.text_tokens([model.config.text.special["mask"]] * length, model)
    for layer in decoder.layers:
        x = literal.cross_block(literal.self_block(x, layer.own, causal=False), memory, layer.cross)
    table = model.text_tower.tokens / math.sqrt(x.shape[1]) if decoder.output is None else decoder.output
    return literal.norm(x, decoder.norm) @ table.T


@pytest.mark.parametrize(
    ("method", "said"),
    [("coca", {"parallel": 0.5}), ("coca", {"parallel": 1.0, "tied": True, "class_token": False}), ("cappa", {})],
)
def test_captions_that_are_predicted_all_at_once(method: str, said: dict[str, Any]) -> None:
    coca = literal.made(method, said).requires_grad_()  # of cappa, the head too
    batch, share, losses = literal.pairs(coca.model, literal.CAPTIONS), said.get("parallel", 0.75), []
    images, chosen = images_of(coca, batch), uniform(batch.seeds, "caption.parallel", 1)[:, 0] < share
    assert 0 < chosen.sum() < len(chosen) or share == 1
    for n, ids in enumerate(literal.captions_of(batch.texts)):
        words = torch.tensor(ids[: len(ids) - len(coca.model.config.text.extra_tokens)])
        memory = literal.image_tokens(images[n], coca.model)
        if chosen[batch.image_of_text[n]]:
            logits = parallel_logits(len(words) - 1, memory, coca.model)
        else:
            logits = torch.stack(
                [literal.word_logits(words[:j].tolist(), memory, coca.model) for j in range(1, len(words))]
            )
        losses.append(F.cross_entropy(logits, words[1:], reduction="sum"))
    literal.assert_equal(coca, literal.term(coca, "caption", batch), torch.stack(losses).sum())


def test_cappa_trains_captions_alone() -> None:
    cappa = literal.made("cappa")
    report = backward(cappa, literal.pairs(cappa.model, literal.CAPTIONS).split(2))
    assert report["loss"] == report["caption"]
    assert cappa.model.config.head.image_pool == "mean"
    assert preset("cappa", {"contrast_weight": 1.0}).shape(literal.small()).head.image_pool == "cls"


# Vocabulary, weights, shapes


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_texts_say_has_logits(tied: bool) -> None:
    """Special ids behind the words are never predicted; an end token is, wherever it stands."""
    clip = {"start": 49406, "end": 49407, "pad": 0, "mask": 49408, "cls": 49409, "unc": 49410}
    assert predicted(TextConfig(vocab=49411, special=clip)) == predicted(TextConfig(vocab=49408, special=clip)) == 49408
    shape = literal.small()
    text = replace(shape.text, vocab=302, special={**shape.text.special, "cls": 300, "unc": 301})
    coca = literal.made("coca", {"tied": tied}, replace(shape, text=text))
    decoder: Any = coca.model.more["text_decoder"]
    assert decoder.table(coca.model.text_tower.tokens).shape == (300, 32)
    assert literal.term(coca, "caption", literal.pairs(coca.model, [[[299]]])).isfinite()


def test_weights_and_micro_batches() -> None:
    """contrast_weight ITC + caption_weight IC; without ITC the head stays, but for what captions look through."""
    shape = literal.small()
    shape = replace(shape, head=replace(shape.head, image_pool="attentional", pool_queries=2, pool_heads=2))
    found = []
    for weight, parts in ((0.0, 4), (1.0, 1), (0.3, 4)):
        coca = learner("coca", {"contrast_weight": weight, "caption_weight": 3.0}, shape)
        found.append(gradients(coca, literal.pairs(coca.model, literal.CAPTIONS), parts))
        summed = weight * found[-1].get("loss:pair", 0) + 3 * found[-1]["loss:caption"]
        torch.testing.assert_close(found[-1].pop("loss:loss"), summed, rtol=1e-12, atol=0)
    none, whole, some = ({name: g for name, g in one.items() if "loss:" not in name} for one in found)
    for name, value in some.items():
        expected = 0.3 * whole[name] + 0.7 * none.get(name, torch.zeros_like(value))
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=name)
    assert all("image_pool.attentional" in name for name in none if ".head." in name)
    assert any("image_pool.attentional" in name for name in none)


def test_texts_end_in_a_class_token_where_the_last_is_read() -> None:
    def extra(method: str, shape: ModelConfig, **said: Any) -> tuple[str, ...]:
        return preset(method, said).shape(shape).text.extra_tokens

    assert extra("coca", literal.small()) == ("cls",)
    assert extra("coca", literal.small(), class_token=False) == ()
    assert extra("coca", replace(literal.small(), head=replace(literal.small().head, text_pool="max"))) == ()
    assert extra("siglip+caption", literal.small()) == ()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 12), vocab=st.integers(2, 9), chunk=st.integers(1, 13), smoothing=st.sampled_from([0, 0.1, 0.9])
)
def test_word_loss_in_chunks(n: int, vocab: int, chunk: int, smoothing: float) -> None:
    x, table = drawn(n, 5).requires_grad_(), drawn(vocab, 5, seed=1).requires_grad_()
    targets = torch.randint(-1, vocab, (n,), generator=torch.Generator().manual_seed(n))
    fast = 3 * word_loss(x, table, targets, smoothing, chunk)
    slow = 3 * F.cross_entropy(x @ table.T, targets, ignore_index=-1, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(loss, (x, table)) for loss in (fast, slow))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_word_loss_of_what_is_frozen() -> None:
    """The same value and gradients where a side, or both, learn nothing."""
    x, table, targets = drawn(7, 5), drawn(6, 5, seed=1), torch.tensor([0, 5, -1, 2, 2, 1, 4])
    free = [side.clone().requires_grad_() for side in (x, table)]
    both = word_loss(free[0], free[1], targets, 0.1, 3)
    wanted = torch.autograd.grad(both, free)
    for sides, free_one, expected in (((free[0], table), free[0], wanted[0]), ((x, free[1]), free[1], wanted[1])):
        found = word_loss(*sides, targets, 0.1, 3)
        assert torch.equal(found, both)
        assert torch.equal(torch.autograd.grad(found, free_one)[0], expected)
    assert torch.equal(word_loss(x, table, targets, 0.1, 3), both)


def test_word_loss_under_autocast() -> None:
    """Logits in half precision, their exponents and sums in single."""
    x, table = drawn(300, 64).float().requires_grad_(), (drawn(500, 64, seed=1) / 8).float().requires_grad_()
    targets = torch.randint(-1, 500, (300,), generator=torch.Generator().manual_seed(0))
    exact = word_loss(x, table, targets, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        near = word_loss(x, table, targets, 0.1)
    assert near.dtype == torch.float32
    assert near.item() == pytest.approx(exact.item(), rel=1e-3)
    assert near.item() != exact.item()
    for a, b in zip(torch.autograd.grad(near, (x, table)), torch.autograd.grad(exact, (x, table)), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.01


@pytest.mark.parametrize("n", [64, 256])
def test_word_loss_never_holds_all_logits(n: int) -> None:
    """The largest tensor, and what is kept for the backward pass, do not grow with words times vocabulary."""
    vocab, width, chunk, kept = 700, 8, 16, list[int]()
    x, table = drawn(n, width).requires_grad_(), drawn(vocab, width, seed=1).requires_grad_()
    targets = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(0))

    def keep(x: Tensor) -> Any:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Largest() as seen:
        word_loss(x, table, targets, 0.1, chunk).backward()
    assert seen.numbers == chunk * vocab < n * vocab
    assert sum(kept) == (n + vocab) * width
