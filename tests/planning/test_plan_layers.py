"""Each formula of `plan` against torch's counts, exactly, at sizes so small that no term hides in a tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import plan_measure
from kiloword.config import recipes
from kiloword.config.recipes import ImageConfig, TextConfig, sizes
from kiloword.methods.registry import preset
from kiloword.model.blocks import Block, CrossBlock
from kiloword.model.image import ImageTower, extra
from kiloword.model.model import build
from kiloword.model.text import TextTower
from kiloword.planning.heads import image_head, text_head
from kiloword.planning.layers import AttendedTokens, block, cross_block
from kiloword.planning.shapes import Kernels, Lengths, Sequences
from kiloword.planning.towers import image_tower, patches, text_tower
from kiloword.types import Batch, Features, Texts
from plan_measure import Case, Measured, compare, method_of, planned

KERNELS = Kernels.of("fp32", cuda=False)
WIDTH, HEADS, MLP = 8, 2, 24
IMAGE = ImageConfig(size=12, patch=4, width=WIDTH, depth=2, heads=HEADS, mlp=MLP)
TEXT = TextConfig(context=16, vocab=40, width=WIDTH, depth=2, heads=HEADS, mlp=MLP)
WHOLE = (  # makes the same FLOP in every run, and nothing at random
    Case("sycoca", "debug", 3, captions=2),
    Case("fff", "debug", 6, captions=3),
    Case("pcme++", "debug", 6),
)


def flops(run: Callable[[], Tensor]) -> tuple[int, int]:
    """Forward and backward."""
    counts = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH):
        with counts[0]:
            out = run()
        with counts[1]:
            out.sum().backward()
    return counts[0].get_total_flops(), counts[1].get_total_flops()


def kept(module: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of what autograd saves, each storage once, but for parameters."""
    own, saved = {p.untyped_storage().data_ptr() for p in module.parameters()}, list[Tensor]()

    def keep(x: Tensor) -> Tensor:
        saved.append(x.detach())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    return sum(size for place, size in storages.items() if place not in own)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_block() -> None:
    module, x = Block(WIDTH, HEADS, MLP, "gelu", 1e-5, depth=2), rows(3, 5, WIDTH)
    work = block(WIDTH, HEADS, MLP, Sequences.dense(3, 5), KERNELS)
    assert (work.forward, work.backward) == flops(lambda: module(x))
    assert work.kept == work.block == kept(module, lambda: module(x))
    again = flops(lambda: checkpoint(module, x, use_reentrant=False))
    assert (work.forward, work.backward + work.again) == again
    assert work.whole == kept(module, lambda: checkpoint(module, x, use_reentrant=False)) == x.nbytes


def test_a_block_of_which_some_tokens_go_on() -> None:
    module, x = Block(WIDTH, HEADS, MLP, "gelu", 1e-5, depth=2), rows(3, 5, WIDTH)
    only = torch.tensor([[0, 2], [1, 3], [2, 4]])
    work = block(WIDTH, HEADS, MLP, Sequences.dense(3, 5), KERNELS, passed=only.numel())
    assert (work.forward, work.backward) == flops(lambda: module(x, only=only))


def test_a_block_that_looks_at_a_memory() -> None:
    module, x, memory = CrossBlock(WIDTH, HEADS, MLP, "gelu", 1e-5, 2, 12), rows(3, 5, WIDTH), rows(3, 7, 12)
    seen = AttendedTokens(tokens=21, slots=21, copied=False, pairs=3 * 5 * 7, width=12)
    work = cross_block(WIDTH, HEADS, MLP, Sequences.dense(3, 5), seen, KERNELS)
    assert (work.forward, work.backward) == flops(lambda: module(x, module.keys(memory)))
    assert work.kept + memory.nbytes == kept(module, lambda: module(x, module.keys(memory)))


@pytest.mark.parametrize(
    ("config", "left_out"),
    [
        (IMAGE, 0),
        (replace(IMAGE, class_token=True, extra_tokens=3, pre_norm=True), 0),
        (replace(IMAGE, size=16, patch=8, stem="conv"), 2 * 2 * 2 * 4),  # statistics of two norms of two images
    ],
    ids=["plain", "tokens and a norm before", "convolutions"],
)
def test_an_image_tower(config: ImageConfig, left_out: int) -> None:
    tower, images = ImageTower(config), torch.randn(2, 3, config.size, config.size)
    work = image_tower(config, 2, KERNELS)
    assert (work.forward, work.backward) == flops(lambda: tower(images))
    assert work.kept + left_out == kept(tower, lambda: tower(images))


def test_a_text_tower() -> None:
    """Of what is kept, the indices of its tokens are left out: of tables, positions and rows."""
    tower, texts = TextTower(TEXT), Texts.pack([[1] * n for n in (3, 9, 5)])
    work = text_tower(TEXT, Lengths.of(texts), KERNELS)
    assert (work.forward, work.backward) == flops(lambda: tower(texts))
    assert work.kept + 3 * 8 * len(texts.ids) == kept(tower, lambda: tower(texts))


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.method)
def test_a_whole_step(case: Case) -> None:
    """FLOP exactly; of what is kept, a few small buffers are left out."""
    found = compare(case)
    assert found["flops"][0] == found["flops"][1]
    assert found["activations"][0] == pytest.approx(found["activations"][1], rel=0.006)


QUERIES = {"image_pool": "attentional", "pool_queries": 5, "pool_width": 16, "pool_heads": 2}
PARTS = (  # preset, its settings, those of the head, captions, micro-batches, relative difference of FLOP and of bytes
    ("coca", {"caption_mask": "random"}, QUERIES, 2, 1, 0.0, 0.001),
    ("coca", {"caption_mask": "attentive", "caption_op": "token"}, {}, 2, 1, 0.0, 0.001),
    ("sycoca", {}, {}, 2, 3, 0.0, 0.005),
    ("sycoca", {"mim_op": "drop", "guide": "none", "mim_mask": "random"}, {}, 1, 1, 0.0, 0.007),
    ("prolip", {"masked_every": 1, "spread": 0.1}, {}, 2, 1, 0.0, 0.011),
    ("prolip", {"masked_every": 1, "hide_words": "drop", "mask_words": 1.0}, {}, 1, 1, 0.0, 0.011),
    ("siglip", {}, {"image_pool": "map"}, 2, 1, 0.0, 0.001),
    ("llip", {}, {}, 2, 2, 0.0013, 0.015),
    ("vqa", {}, {}, 2, 1, 0.001, 0.005),  # of the head, whose features teach nothing here, no backward pass runs
)


def evened(batch: Batch, length: int, extra: int) -> Batch:
    """The same with captions of one length, so that no mean stands for what differs."""
    cut = [text.tolist() for text in torch.tensor_split(batch.texts.ids, batch.texts.starts[1:-1])]
    tail = 1 + extra
    return replace(batch, texts=Texts.pack([[t[0], *[t[1]] * (length - 1 - tail), *t[-tail:]] for t in cut]))


@pytest.mark.parametrize(("name", "own", "head", "captions", "micro_batches", "flops", "kept"), PARTS)
def test_a_step_of_every_kind_of_term_with_captions_of_one_length(
    name: str, own: dict[str, Any], head: dict[str, Any], captions: int, micro_batches: int, flops: float, kept: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """FLOP exactly but where the table says so; of what is kept, a few small buffers are left out."""
    debug = sizes()["debug"]
    debug = replace(debug, head=replace(debug.head, **head))
    monkeypatch.setattr(recipes, "sizes", lambda: {"debug": debug})
    monkeypatch.setattr(plan_measure, "method_of", lambda name: preset(name, own))
    real = Measured(Case(name, "debug", 6, captions, micro_batches))
    real.batch = evened(real.batch, 10, len(real.learner.model.config.text.extra_tokens))
    plan = planned(real)
    assert plan["flops"] == pytest.approx(real.flops(), rel=flops, abs=0)
    assert plan["activations"] == pytest.approx(real.activations(), rel=kept, abs=0)


POOLS = [("siglip", {"image_pool": pool}) for pool in ("mean", "max", "map")] + [("siglip", QUERIES)]


@pytest.mark.parametrize(
    ("method", "pool"), [*((m, {}) for m in ("siglip", "prolip", "prolip-released", "llip")), *POOLS]
)
def test_a_head(method: str, pool: dict[str, Any]) -> None:
    """From tokens to all features that learn."""
    debug = sizes()["debug"]
    model = build(replace(debug, head=replace(debug.head, **pool)), method_of(method))
    config = model.config
    tail = [config.text.special["end"], *(config.text.special[name] for name in config.text.extra_tokens)]
    texts = Texts.pack([[1] * n + tail for n in (3, 5, 4)])
    words = rows(len(texts.ids), config.text.width)
    tokens = rows(2, extra(config.image) + patches(config.image), config.image.width)

    def joined(features: Features) -> Tensor:
        return torch.cat([value.flatten() for value in features.values() if value.requires_grad])

    image, text = image_head(model, 2, KERNELS), text_head(model, Lengths.of(texts), KERNELS)
    assert (text.forward, text.backward) == flops(lambda: joined(model.head.text(words, texts)))
    assert (image.forward, image.backward) == flops(lambda: joined(model.head.image(tokens)))
