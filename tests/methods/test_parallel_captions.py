"""Captions that are predicted all at once, written out: arXiv:2306.07915, section 3.1; its big_vision code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.randomness import uniform
from kiloword.training.accumulate import backward
from kiloword.verify.batch import MethodChoice
from kiloword.verify.suite import verify
from literal import (
    CAPTIONS,
    assert_equal,
    captions_of,
    cross_block,
    image_tokens,
    made,
    norm,
    pairs,
    self_block,
    small,
    term,
    text_tokens,
    word_logits,
)


def parallel_logits(length: int, memory: Tensor, model: Model) -> Tensor:
    """[length, V]: of every place of a caption, from as many mask tokens, all of which see each other and the image."""
    decoder: Any = model.more["text_decoder"]
    x = text_tokens([model.config.text.special["mask"]] * length, model)
    for layer in decoder.layers:
        x = cross_block(self_block(x, layer.own, causal=False), memory, layer.cross)
    table = model.text_tower.tokens / math.sqrt(x.shape[1]) if decoder.output is None else decoder.output
    return norm(x, decoder.norm) @ table.T


@pytest.mark.parametrize(
    ("method", "settings"),
    [("coca", {"parallel": 0.5}), ("coca", {"parallel": 1.0, "tied": True, "class_token": False}), ("cappa", {})],
)
def test_the_loss_and_every_gradient(method: str, settings: dict[str, Any]) -> None:
    learner = made(method, settings).requires_grad_()  # of cappa, the head too
    model = learner.model
    batch = pairs(model, CAPTIONS)
    images, share = model.normalise(batch.images), settings.get("parallel", 0.75)
    chosen = (uniform(batch.seeds, "caption.parallel", 1)[:, 0] < share).tolist()
    assert sum(chosen) > 0
    assert sum(chosen) < len(chosen) or share == 1
    losses = []
    for n, ids in enumerate(captions_of(batch.texts)):
        words = torch.tensor(ids[: len(ids) - len(model.config.text.extra_tokens)])
        i = int(batch.image_of_text[n])
        memory = image_tokens(images[i], model)
        if chosen[i]:
            logits = parallel_logits(len(words) - 1, memory, model)
        else:
            logits = torch.stack([word_logits(words[:j].tolist(), memory, model) for j in range(1, len(words))])
        losses.append(F.cross_entropy(logits, words[1:], reduction="sum"))
    assert_equal(learner, term(learner, "caption", batch), torch.stack(losses).sum())


def test_a_parallel_caption_sees_no_word_and_every_place() -> None:
    learner = made("coca", {"parallel": 1.0})
    model = learner.model
    batch = pairs(model, [[[9, 30, 17, 40]], [[50]]])
    inner: list[Tensor] = []
    layer: Any = model.more["text_decoder"].layers[0]  # type: ignore[index]
    layer.own.register_forward_hook(lambda module, args, out: inner.append(out))
    layer.own.register_forward_pre_hook(lambda module, args: (args[0].detach().requires_grad_(), *args[1:]))
    seen: list[Tensor] = []
    layer.own.norm1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    term(learner, "caption", batch)
    for token, text in ((0, slice(0, 5)), (4, slice(0, 5)), (5, slice(5, 7))):
        (gradient,) = torch.autograd.grad(inner[0][token].sum(), seen[0], retain_graph=True)
        touched = gradient.abs().sum(1).nonzero()[:, 0].tolist()
        assert touched == list(range(text.start, text.stop))
    same = pairs(model, [[[8, 8, 8, 8]], [[8]]])
    tokens: list[Tensor] = []
    learner.model.more["text_decoder"].register_forward_pre_hook(lambda module, args: tokens.append(args[0]))
    for some in (batch, same):
        term(learner, "caption", some)
    assert torch.equal(*tokens)


def test_a_share_of_0_is_word_by_word_and_draws_differ_by_image() -> None:
    values = []
    for share in (0.0, 1e-9):
        learner = made("coca", {"parallel": share})
        values.append(term(learner, "caption", pairs(learner.model, CAPTIONS)))
    assert torch.equal(*values)


def test_cappa_trains_captions_alone() -> None:
    learner = made("cappa")
    report = backward(learner, pairs(learner.model, CAPTIONS).split(2))
    assert report["loss"] == report["caption"]
    assert learner.model.config.head.image_pool == "mean"
    assert preset("cappa", {"contrast_weight": 1.0}).shape(small()).head.image_pool == "cls"
    with pytest.raises(ValueError, match=r"parallel is 1\.5: expected 0 to 1"):
        preset("coca", {"parallel": 1.5})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("coca", {"parallel": 0.75, "caption_mask": "attentive"}),
        ("sycoca", {"parallel": 0.5}),
        ("llip+caption", {"caption": {"parallel": 0.5}}),
        ("coca+gaussian", {"parallel": 0.5}),
    ],
)
def test_it_is_verified(method: str, settings: dict[str, Any]) -> None:
    assert not [check for check in verify(MethodChoice(method, settings), (1, 2)) if not check.passed]
