"""Attention and towers against slow, obvious references; initialisation; resizing; layers by depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, TextConfig, sizes
from kiloword.model.attention import KeyValueCache, Packing, attention
from kiloword.model.blocks import Init, activate, depths, layers_of, trunk_layers
from kiloword.model.decoder import ImageDecoder
from kiloword.model.heads import Head, Scale, Single
from kiloword.model.image import ConvStem, ImageTower, fold, unfold
from kiloword.model.model import Model, initialise, resize
from kiloword.model.pooling import AttentionalPool, AttentionPool, ImagePool
from kiloword.model.resnet import ResNet
from kiloword.model.text import TextTower
from kiloword.types import Texts
from parts import agree, drawn


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


def same(found: Tensor, expected: Tensor, inputs: Sequence[Tensor]) -> None:
    """Values, and gradients of a weighted sum."""
    weights = drawn(*found.shape, seed=9)
    agree(found * weights, expected * weights, inputs, atol=1e-11)


def leaves(*rows: Sequence[int]) -> list[Tensor]:
    """Queries, keys and values of these leading shapes, of two heads."""
    return [drawn(*shape, 2, 4, seed=n).requires_grad_() for n, shape in enumerate(rows)]


TEXTS = [[3, 2, 4], [5], [1, 1, 6, 1], [2, 3, 1, 40, 2, 3, 1, 4, 2, 3, 33]]  # the last ones padded with their like


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", TEXTS)
def test_packed_attention_is_each_text_alone(lengths: list[int], causal: bool) -> None:
    """Rows behind the last text stay zero."""
    packing, total = Packing.of(packed(lengths), 8), sum(lengths)
    q, k, v = every = leaves(*[(total + packing.tail,)] * 3)
    expected = [one(*own, causal) for own in zip(*(x[:total].split(lengths) for x in every), strict=True)]
    found = attention(q, k, v, packing, packing, causal)
    assert not found[total:].any()
    same(found[:total], torch.cat(expected), every)


@pytest.mark.parametrize("lengths", TEXTS[::3])
def test_tokens_that_nothing_attends_to(lengths: list[int]) -> None:
    total = sum(lengths)
    seen = torch.ones(total, dtype=torch.bool).index_fill(0, torch.tensor([1, 3]), False)
    q, k, v = every = leaves(*[(total,)] * 3)
    own = [[x[s] for x, s in zip(y.split(lengths), seen.split(lengths), strict=True)] for y in (k, v)]
    expected = [one(a, b, c, False) for a, b, c in zip(q.split(lengths), *own, strict=True)]
    packing = replace(Packing.of(packed(lengths)), unseen=~seen)
    same(attention(q, k, v, packing, packing), torch.cat(expected), every)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4), st.integers(1, 5))
def test_packed_texts_look_at_packed_keys_and_dense_images(pairs: list[tuple[int, int]], patches: int) -> None:
    lq, lk = [a for a, _ in pairs], [b for _, b in pairs]
    q, k, v = every = leaves((sum(lq),), (sum(lk),), (sum(lk),))
    expected = [one(a, b, c, False) for a, b, c in zip(q.split(lq), k.split(lk), v.split(lk), strict=True)]
    same(attention(q, k, v, Packing.of(packed(lq)), Packing.of(packed(lk))), torch.cat(expected), every)
    q, k, v = every = leaves((sum(lq),), (len(lq), patches), (len(lq), patches))
    expected = [one(a, k[n], v[n], False) for n, a in enumerate(q.split(lq))]
    same(attention(q, k, v, Packing.of(packed(lq))), torch.cat(expected), every)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention(causal: bool) -> None:
    q, k, v = every = leaves(*[(3, 5)] * 3)
    same(
        attention(q, k, v, causal=causal), torch.stack([one(*own, causal) for own in zip(q, k, v, strict=True)]), every
    )


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


DEBUG = sizes()["debug"]
SMALL = ImageConfig(size=16, patch=4, width=16, depth=2, heads=2, mlp=32, extra_tokens=2)


def image_tower(**changes: Any) -> ImageTower:
    tower = ImageTower(replace(SMALL, **changes)).double()
    initialise(tower, 0)
    return tower


@pytest.mark.parametrize("stem", ["linear", "conv"])
@pytest.mark.parametrize("class_token", [True, False])
def test_patches_in_another_order_are_the_same_tokens_in_that_order(stem: Any, class_token: bool) -> None:
    """Positions travel with them; and an image does not depend on its neighbours."""
    tower, images, before = image_tower(stem=stem, class_token=class_token), drawn(3, 3, 16, 16), 2 + int(class_token)
    whole = tower(images)
    assert whole.shape == (3, before + 16, 16)
    assert torch.allclose(whole[1:2], tower(images[1:2]), rtol=0, atol=1e-12)
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    moved = tower(images, order)
    assert torch.allclose(moved[:, :before], whole[:, :before])
    assert torch.allclose(moved[:, before:], torch.stack([whole[n, before:][order[n]] for n in range(3)]))
    assert tower(images, order[:, :4]).shape[1] == before + 4


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_dropped_patches_are_not_seen_and_masked_ones_hide_their_pixels(stem: Any) -> None:
    tower = image_tower(stem=stem, mask_token=True)
    images = drawn(2, 3, 16, 16)
    hidden = torch.zeros(2, 16, dtype=torch.bool)
    hidden[:, 3:9] = True
    changed = fold(torch.where(hidden[..., None], drawn(2, 16, 48, seed=5), unfold(images, 4)), 4)
    assert torch.equal(tower(images, masked=hidden), tower(changed, masked=hidden))
    assert not torch.allclose(tower(images), tower(changed))
    keep = (~hidden).nonzero()[:, 1].view(2, -1)
    assert torch.equal(tower(images, keep), tower(changed, keep))
    assert torch.equal(tower(images, keep, hidden), tower(changed, keep, hidden))


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


RESNET = replace(sizes()["rn50"].image, width=128, depth=4, heads=4)
NO_RESNET: list[dict[str, int]] = [{"depth": 5}, {"patch": 16}, {"width": 96}, {"size": 100}]
TEXT = TextConfig(context=8, vocab=32, width=16, depth=2, heads=2, mlp=32)


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda: TextTower(TEXT)(Texts.pack([[1] * 9])), "context is 8"),
        (lambda: ImageTower(replace(SMALL, patch=SMALL.size + 1)), "image size"),
        (lambda: ImageTower(replace(SMALL, heads=3)), "3 heads"),
        (lambda: image_tower()(drawn(1, 3, 8, 8)), "16, 16"),
        (lambda: image_tower()(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)), "normalise"),
        (lambda: ImageTower(replace(SMALL, depth=0)), "needs a trunk"),
        (lambda: ImageTower(replace(SMALL, uncertainty_token=True, uncertainty_blocks=3)), "3 blocks"),
        (lambda: TextTower(replace(TEXT, class_place="last")), "class token"),
        (lambda: image_tower()(drawn(1, 3, 16, 16), masked=torch.eye(1, 16) > 0), "mask token"),
        (lambda: model(DEBUG).normalise(torch.zeros(1, 3, 2, 2)), "uint8"),
        (lambda: Head(Single(DEBUG), scale=Scale(start=0.0)), "is 0:"),
        (lambda: Head(Single(DEBUG), scale=Scale(limit=-5.0)), "is -5:"),
        (lambda: Head(Single(DEBUG), scale=Scale(bias=math.nan)), "nan"),
        (lambda: model(DEBUG).head.pooling.explain({}, {}), "explain"),
        (lambda: ImagePool(replace(DEBUG.image, class_token=False), HeadConfig(image_pool="cls")), "class_token"),
        (lambda: Single(replace(DEBUG, head=HeadConfig(dim=16, image_projection=False))), "width 32"),
        *((lambda own=own: ResNet(replace(RESNET, **own)), "ResNet") for own in NO_RESNET),
        (lambda: resize(DEBUG, model(DEBUG).state_dict(), 7), "patch size"),
        (lambda: initialise(Model(DEBUG, Head(Single(DEBUG)), {"gate": Gate()}), 0), "'strength' of Gate"),
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
    plain, wide = model(DEBUG), model(replace(DEBUG, image=replace(DEBUG.image, extra_tokens=3, stem="conv")))
    other = dict(wide.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, other[name]), name
    assert not torch.equal(plain.image_tower.positions, model(DEBUG, 1).image_tower.positions)
    double = model(DEBUG).double()
    initialise(double, 0)
    assert torch.equal(double.text_tower.tokens.float(), plain.text_tower.tokens)
    complete = Gate(strength=Init(mean=0.5))
    initialise(complete, 0)
    assert complete.strength.tolist() == [0.5, 0.5]


class Gate(nn.Module):
    """A part of one's own: `says` is how it starts."""

    def __init__(self, **says: Init) -> None:
        super().__init__()
        self.strength, self.says = nn.Parameter(torch.full((2,), 7.0)), says

    def initial(self) -> dict[str, Init]:
        return self.says


@pytest.mark.parametrize("init_std", [None, 0.1])
def test_starting_deviations(init_std: float | None) -> None:
    """1 over the root of the inputs for what multiplies them; what adds to the stream over that of its blocks too."""
    image = ImageConfig(size=64, patch=8, width=64, depth=2, heads=2, mlp=256, extra_tokens=64, init_std=init_std)
    text = TextConfig(context=64, vocab=512, width=64, depth=2, heads=2, mlp=256)
    config = replace(DEBUG, image=image, text=text)
    tower, pool, mean = ImageTower(image), AttentionalPool(image, HeadConfig()), AttentionPool(image)
    decoder = ImageDecoder(config, 3, dropped=True)
    for part in (tower, decoder, pool, mean):
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
    expected[added] = (*expected.get(added, ()), tower.positions, tower.extra_tokens, decoder.positions, mean.positions)
    for std, weights in expected.items():
        for weight in weights:
            assert weight.std().item() == pytest.approx(std, rel=0.05)
    for token in (tower.class_token, decoder.mask_token):
        assert token is not None
        assert token.std().item() == pytest.approx(added, rel=0.25)
    assert not decoder.pixels.bias.any()


def test_images_are_normalised_once() -> None:
    made = model(DEBUG)
    image = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    preprocess = made.config.preprocess
    expected = [(1 - m) / s for m, s in zip(preprocess.mean, preprocess.std, strict=True)]
    assert made.normalise(image)[0, :, 0, 0].tolist() == pytest.approx(expected)
    assert not {"mean", "std"} & made.state_dict().keys()


def test_resized_positions() -> None:
    config = replace(DEBUG, image=replace(DEBUG.image, size=64, patch=8))
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


# Layers by depth

IMAGE = replace(SMALL, depth=3, extra_tokens=0)


def test_layers_of_an_image_tower() -> None:
    config = replace(IMAGE, stem="conv", extra_tokens=2, mask_token=True)
    assert layers_of(ImageTower(config)) == [
        ["blocks.0", "class_token", "extra_tokens", "mask_token", "patches", "positions", "pre_norm", "stem"],
        ["blocks.1"],
        ["blocks.2", "norm"],
    ]
    beside = ImageTower(replace(IMAGE, uncertainty_token=True, uncertainty_blocks=2))
    assert [layer[1] for layer in layers_of(beside)[1:]] == ["uncertainty_blocks.0", "uncertainty_blocks.1"]


def test_every_parameter_is_in_one_layer() -> None:
    """Of eleven blocks, so that "blocks.1" begins the name of another one."""
    with torch.device("meta"):
        towers = [
            ImageTower(replace(IMAGE, depth=11)),
            TextTower(replace(TEXT, depth=11)),
            ResNet(sizes()["rn50"].image),
        ]
    for tower in towers:
        layers, of = layers_of(tower), depths(tower)
        assert set(of.values()) == set(range(len(layers)))
        for name, depth in of.items():
            holding = [n for n, layer in enumerate(layers) for p in layer if name == p or name.startswith(f"{p}.")]
            assert holding == [depth], name
    resnet = layers_of(towers[2])
    assert len(resnet) == 16
    assert (resnet[0], resnet[3], resnet[15]) == (["stages.0.0", "stem", "stem_norms"], ["stages.1.0"], ["stages.3.2"])


class TwoLayers(nn.Module):
    """Two layers; a third parameter that none of them names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.parts, self.odd = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)

    def blocks(self) -> list[list[str]]:
        return [["stem"], ["parts.0"]]


def test_layers_of_a_trunk_are_below_those_of_the_tower() -> None:
    tower = ImageTower(IMAGE)
    tower.trunk = TwoLayers()  # type: ignore[assignment]
    assert layers_of(tower)[:2] == [["trunk.stem"], ["trunk.parts.0"]]
    assert layers_of(tower)[2:] == layers_of(ImageTower(IMAGE))
    assert trunk_layers(tower) == 2
    of = depths(tower)
    assert [of[name] for name in ("trunk.stem.bias", "trunk.parts.0.bias", "trunk.odd.bias")] == [0, 1, 0]
    names = ("positions", "blocks.0.norm1.bias", "blocks.2.norm1.bias", "norm.bias")
    assert [of[name] for name in names] == [2, 2, 4, 4]
    tower.blocks = nn.ModuleList()
    assert layers_of(tower)[2:] == [["class_token", "patches", "positions", "pre_norm", "norm"]]
