"""Attention and towers against slow, obvious references; initialisation; resizing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, TextConfig, sizes
from kiloword.model.attention import KeyValueCache, Packing, attention
from kiloword.model.blocks import Init, activate
from kiloword.model.decoder import ImageDecoder
from kiloword.model.heads import Head, Scale, Single
from kiloword.model.image import ConvStem, ImageTower, fold, unfold
from kiloword.model.model import Model, initialise, resize
from kiloword.model.pooling import AttentionalPool
from kiloword.model.text import TextTower
from kiloword.types import Texts
from parts import drawn


def packed(lengths: list[int]) -> Texts:
    return Texts.pack([list(range(n)) for n in lengths])


def one(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Literal attention of one sequence: q [Lq, H, d], k and v [Lk, H, d]."""
    out = torch.zeros_like(q)
    late = len(k) - len(q)
    for h in range(q.shape[1]):
        for i in range(len(q)):
            seen = i + late + 1 if causal else len(k)
            weights = (k[:seen, h] @ q[i, h] / math.sqrt(q.shape[2])).softmax(0)
            out[i, h] = weights @ v[:seen, h]
    return out


def agree(ours: Tensor, literal: Tensor, *inputs: Tensor) -> None:
    """Values and gradients, in double precision."""
    assert torch.allclose(ours, literal, rtol=0, atol=1e-12)
    weights = drawn(*ours.shape, seed=9)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((literal * weights).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(lengths, st.booleans())
def test_packed_attention_is_each_text_alone(ls: list[int], causal: bool) -> None:
    packing = Packing.of(packed(ls))
    q, k, v = (drawn(sum(ls), 2, 4, seed=s).requires_grad_() for s in range(3))
    literal = [one(a, b, c, causal) for a, b, c in zip(q.split(ls), k.split(ls), v.split(ls), strict=True)]
    agree(attention(q, k, v, packing, packing, causal), torch.cat(literal), q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_one_long_text_among_short_ones(causal: bool) -> None:
    """Texts of similar lengths are padded together; rows behind the last text stay zero."""
    ls = [2, 3, 1, 40, 2, 3, 1, 4, 2, 3, 33]
    packing, total = Packing.of(packed(ls), 8), sum(ls)
    q, k, v = (drawn(total + packing.tail, 2, 4, seed=s).requires_grad_() for s in range(3))
    own = [x[:total].split(ls) for x in (q, k, v)]
    literal = [one(a, b, c, causal) for a, b, c in zip(*own, strict=True)]
    ours = attention(q, k, v, packing, packing, causal)
    assert not ours[total:].any()
    agree(ours[:total], torch.cat(literal), q, k, v)


@pytest.mark.parametrize("ls", [[3, 2, 4], [2, 3, 1, 40, 4]])
def test_tokens_that_nothing_attends_to(ls: list[int]) -> None:
    packing, total = Packing.of(packed(ls)), sum(ls)
    seen = torch.ones(total, dtype=torch.bool).index_fill(0, torch.tensor([1, 3]), False)
    q, k, v = (drawn(total, 2, 4, seed=s).requires_grad_() for s in range(3))
    own = [[x[s] for x, s in zip(y.split(ls), seen.split(ls), strict=True)] for y in (k, v)]
    literal = [one(a, b, c, False) for a, b, c in zip(q.split(ls), *own, strict=True)]
    packing = replace(packing, unseen=~seen)
    agree(attention(q, k, v, packing, packing), torch.cat(literal), q, k, v)


@settings(max_examples=20, deadline=None)
@given(lengths, st.integers(1, 5))
def test_packed_texts_look_at_dense_images(ls: list[int], patches: int) -> None:
    q = drawn(sum(ls), 2, 4).requires_grad_()
    k, v = (drawn(len(ls), patches, 2, 4, seed=s).requires_grad_() for s in (1, 2))
    literal = torch.cat([one(a, k[n], v[n], False) for n, a in enumerate(q.split(ls))])
    agree(attention(q, k, v, Packing.of(packed(ls))), literal, q, k, v)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4))
def test_packed_texts_look_at_packed_keys(pairs: list[tuple[int, int]]) -> None:
    lq, lk = [a for a, _ in pairs], [b for _, b in pairs]
    q = drawn(sum(lq), 2, 4).requires_grad_()
    k, v = (drawn(sum(lk), 2, 4, seed=s).requires_grad_() for s in (1, 2))
    literal = [one(a, b, c, False) for a, b, c in zip(q.split(lq), k.split(lk), v.split(lk), strict=True)]
    agree(attention(q, k, v, Packing.of(packed(lq)), Packing.of(packed(lk))), torch.cat(literal), q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention(causal: bool) -> None:
    q, k, v = (drawn(3, 5, 2, 4, seed=s).requires_grad_() for s in range(3))
    agree(attention(q, k, v, causal=causal), torch.stack([one(q[n], k[n], v[n], causal) for n in range(3)]), q, k, v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cached_decoding_is_causal_attention(dtype: torch.dtype) -> None:
    q, k, v = (drawn(2, 6, 2, 4, seed=s).to(dtype) for s in range(3))
    cache, parts = KeyValueCache(), []
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        some = [x[:, start:stop] for x in (q, k, v)]
        parts.append(attention(some[0], some[1], some[2], causal=True, cache=cache))
    tolerance = 1e-12 if dtype == torch.float64 else 0.02
    assert (torch.cat(parts, 1) - attention(q, k, v, causal=True)).abs().max() < tolerance


def test_activations() -> None:
    x = drawn(50)
    assert torch.allclose(activate(x, "quick_gelu"), x * torch.sigmoid(1.702 * x))
    assert torch.allclose(activate(x, "gelu"), x * (1 + torch.erf(x / math.sqrt(2))) / 2)
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(activate(x, "gelu_tanh"), tanh)


SMALL = ImageConfig(size=16, patch=4, width=16, depth=2, heads=2, mlp=32, extra_tokens=2)


def image_tower(config: ImageConfig, mask_token: bool = False) -> ImageTower:
    tower = ImageTower(replace(config, mask_token=mask_token)).double()
    initialise(tower, 0)
    return tower


def test_unfolding_reads_as_a_strided_convolution() -> None:
    images, weight = drawn(2, 3, 8, 8), drawn(5, 3, 4, 4)
    assert torch.allclose(
        F.linear(unfold(images, 4), weight.flatten(1)), F.conv2d(images, weight, stride=4).flatten(2).transpose(1, 2)
    )
    assert torch.equal(fold(unfold(images, 4), 4), images)


@pytest.mark.parametrize("stem", ["linear", "conv"])
@pytest.mark.parametrize("class_token", [True, False])
def test_kept_patches_are_those_kept(stem: str, class_token: bool) -> None:
    tower = image_tower(replace(SMALL, stem=stem, class_token=class_token))  # type: ignore[arg-type]
    images = drawn(3, 3, 16, 16)
    whole = tower(images)
    assert whole.shape == (3, 16 + 2 + class_token, 16)
    # all patches in another order: the same tokens in that order, since positions travel with them
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    before = 2 + int(class_token)
    assert torch.allclose(tower(images, order)[:, :before], whole[:, :before])
    assert torch.allclose(
        tower(images, order)[:, before:], torch.stack([whole[n, before:][order[n]] for n in range(3)])
    )
    assert tower(images, order[:, :4]).shape[1] == before + 4


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_dropped_patches_are_not_seen_and_masked_ones_hide_their_pixels(stem: str) -> None:
    tower = image_tower(replace(SMALL, stem=stem), mask_token=True)  # type: ignore[arg-type]
    images = drawn(2, 3, 16, 16)
    hidden = torch.zeros(2, 16, dtype=torch.bool)
    hidden[:, 3:9] = True
    changed = fold(torch.where(hidden[..., None], drawn(2, 16, 48, seed=5), unfold(images, 4)), 4)
    assert torch.equal(tower(images, masked=hidden), tower(changed, masked=hidden))
    assert not torch.allclose(tower(images), tower(changed))
    keep = (~hidden).nonzero()[:, 1].view(2, -1)
    if stem == "linear":  # convolutions look a few pixels over the border
        assert torch.equal(tower(images, keep), tower(changed, keep))
    assert torch.equal(tower(images, keep, hidden), tower(changed, keep, hidden))


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_a_image_does_not_depend_on_its_neighbours(stem: str) -> None:
    tower = image_tower(replace(SMALL, stem=stem))  # type: ignore[arg-type]
    images = drawn(3, 3, 16, 16)
    assert torch.allclose(tower(images)[1:2], tower(images[1:2]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("patch", "channels"), [(16, [2, 4]), (14, [2]), (4, [2]), (3, []), (2, [])])
def test_a_convolutional_stem_is_a_few_convolutions(patch: int, channels: list[int]) -> None:
    """Strided 3x3 ones with norm and GELU while the patch can be halved, at most two; then one of what is left."""
    stem = ConvStem(replace(SMALL, patch=patch, size=3 * patch)).double()
    initialise(stem, 0)
    *fine, last = [p for p in stem.parameters() if p.dim() == 4]
    assert [weight.shape[0] for weight in fine] == channels
    assert all(weight.std().item() == pytest.approx(weight[0].numel() ** -0.5, rel=0.3) for weight in (*fine, last))
    x = images = drawn(2, 3, 3 * patch, 3 * patch)
    for weight in fine:
        x = F.gelu(F.group_norm(F.conv2d(x, weight, stride=2, padding=1), 1))
    x = F.conv2d(x, last, stride=patch >> len(fine))
    assert x.shape == (2, 16, 3, 3)
    assert torch.allclose(stem(images), x.flatten(2).transpose(1, 2), rtol=0, atol=1e-12)


TEXT = TextConfig(context=8, vocab=32, width=16, depth=2, heads=2, mlp=32)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=8), min_size=1, max_size=4), st.booleans())
def test_a_text_does_not_depend_on_its_neighbours(sequences: list[list[int]], causal: bool) -> None:
    tower = TextTower(replace(TEXT, causal=causal)).double()
    initialise(tower, 0)
    alone = [tower(Texts.pack([s])) for s in sequences]
    assert torch.allclose(tower(Texts.pack(sequences)), torch.cat(alone), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda: TextTower(TEXT)(Texts.pack([[1] * 9])), "context is 8"),
        (lambda: ImageTower(replace(SMALL, patch=SMALL.size + 1)), "image size"),
        (lambda: ImageTower(replace(SMALL, heads=3)), "3 heads"),
        (lambda: image_tower(SMALL)(drawn(1, 3, 8, 8)), "16, 16"),
        (lambda: image_tower(SMALL)(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)), "normalise"),
        (lambda: ImageTower(replace(SMALL, depth=0)), "needs a trunk"),
        (lambda: ImageTower(replace(SMALL, uncertainty_token=True, uncertainty_blocks=3)), "3 blocks"),
        (lambda: TextTower(replace(TEXT, class_place="last")), "class token"),
        (lambda: image_tower(SMALL)(drawn(1, 3, 16, 16), masked=torch.eye(1, 16) > 0), "mask token"),
    ],
)
def test_refused(use: Callable[[], object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        use()


def model(config: ModelConfig, seed: int = 0) -> Model:
    made = Model(config, Head(Single(config), scale=Scale(bias=-10.0)))
    initialise(made, seed)
    return made


def test_same_names_start_equal() -> None:
    config = sizes()["debug"]
    plain, wide = model(config), model(replace(config, image=replace(config.image, extra_tokens=3, stem="conv")))
    other = dict(wide.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, other[name]), name
    assert not torch.equal(plain.image_tower.positions, model(config, 1).image_tower.positions)
    double = Model(config, Head(Single(config), scale=Scale(bias=-10.0))).double()
    initialise(double, 0)
    assert torch.equal(double.text_tower.tokens.float(), plain.text_tower.tokens)


class Gate(torch.nn.Module):
    """A part of one's own: `says` is how it starts."""

    def __init__(self, **says: Init) -> None:
        super().__init__()
        self.strength, self.says = torch.nn.Parameter(torch.full((2,), 7.0)), says

    def initial(self) -> dict[str, Init]:
        return self.says


def test_a_parameter_without_an_initial_value_is_named_with_its_class() -> None:
    config, forgot = sizes()["debug"], Gate()
    with pytest.raises(ValueError, match=r"'strength' of Gate"):
        initialise(Model(config, Head(Single(config)), {"gate": forgot}), 0)
    complete = Gate(strength=Init(mean=0.5))
    initialise(complete, 0)
    assert complete.strength.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("init_std", [None, 0.1])
def test_starting_deviations(init_std: float | None) -> None:
    """1 over the root of the inputs for what multiplies them; what adds to the stream over that of its blocks too."""
    image = ImageConfig(size=64, patch=8, width=64, depth=2, heads=2, mlp=256, extra_tokens=64, init_std=init_std)
    text = TextConfig(context=64, vocab=512, width=64, depth=2, heads=2, mlp=256)
    config = replace(sizes()["debug"], image=image, text=text)
    tower, decoder, pool = (
        ImageTower(image),
        ImageDecoder(config, 3, dropped=True),
        AttentionalPool(image, HeadConfig()),
    )
    for part in (tower, decoder, pool):
        initialise(part, 0)
    words: Any = model(config).text_tower
    block, last, added = words.blocks[1], decoder.layers[2], init_std or 64**-0.5
    expected = {
        (4 * 64) ** -0.5: (block.attention.out.weight, block.mlp.proj.weight),
        64**-0.5: (block.attention.qkv.weight, decoder.pixels.weight, pool.probes),
        128**-0.5: (block.mlp.fc.weight,),
        0.02: (words.tokens,),
        0.01: (words.positions,),
        (3 * 8 * 8) ** -0.5: (tower.patches.weight,),
        (2 * 6 * 64) ** -0.5: (last.own.mlp.proj.weight, last.cross.mlp.proj.weight),
    }
    expected[added] = (*expected.get(added, ()), tower.positions, tower.extra_tokens, decoder.positions)
    for std, weights in expected.items():
        for weight in weights:
            assert weight.std().item() == pytest.approx(std, rel=0.05)
    for token in (tower.class_token, decoder.mask_token):
        assert token is not None
        assert token.std().item() == pytest.approx(added, rel=0.25)
    assert not decoder.pixels.bias.any()


def test_images_are_normalised_once() -> None:
    made = model(sizes()["debug"])
    image = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    preprocess = made.config.preprocess
    expected = [(1 - m) / s for m, s in zip(preprocess.mean, preprocess.std, strict=True)]
    assert made.normalise(image)[0, :, 0, 0].tolist() == pytest.approx(expected)
    with pytest.raises(ValueError, match="must be uint8"):
        made.normalise(image.float())
    assert not {"mean", "std"} & made.state_dict().keys()


def test_resized_positions() -> None:
    config = sizes()["debug"]
    config = replace(config, image=replace(config.image, size=64, patch=8))
    made = model(config)
    same_config, same = resize(config, made.state_dict(), 64)
    assert same_config == config
    assert torch.allclose(same["image_tower.positions"], made.image_tower.positions)
    # a constant map stays constant, the class token's position is kept
    state = made.state_dict()
    state["image_tower.positions"][1:] = torch.arange(32.0)
    larger, resized = resize(config, state, 96)
    places = resized["image_tower.positions"]
    assert places.shape == (1 + 12 * 12, 32)
    assert torch.allclose(places[1:], torch.arange(32.0).expand(144, -1), atol=1e-4)
    assert torch.equal(places[0], state["image_tower.positions"][0])
    model(larger).load_state_dict(resized)
    with pytest.raises(ValueError, match="below the patch size"):
        resize(config, state, 7)
