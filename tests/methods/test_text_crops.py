"""Text crops, against the published loss of COSMOS by loops and torch's own attention (arXiv:2412.01814)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import TrunkConfig
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.methods.text_crops import CROPS, PARTS, CrossPool, TextCropsContrast, TextCropSettings, after_step
from kiloword.model.heads import Single
from kiloword.model.image import extra
from kiloword.model.model import Model
from kiloword.randomness import Draw
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.types import Batch, Example, TextGroup, Texts
from kiloword.verify.batch import MethodChoice, batch, config
from kiloword.verify.suite import learner, verify
from states import whole_and_cut

NAME = "clip+text-crops"
SMALL = MethodChoice(NAME, {"text_crops": {"small": 2, "parts": 2, "heads": 4}})
N = 4  # images


def contrast_of(made: Learner) -> TextCropsContrast:
    contrast = made.contrasts["text_crops"]
    assert isinstance(contrast, TextCropsContrast)
    return contrast


def examples() -> tuple[Batch, list[list[int]], list[list[int]]]:
    """A batch of one caption and two parts an image, as the loader makes it; ids of captions and of parts."""
    some = batch(end=N, method=SMALL)
    ids = [some.texts.ids[a:b].tolist() for a, b in zip(some.texts.starts[:-1], some.texts.starts[1:], strict=True)]
    captions, parts = ids[:N], [ids[(n + k) % len(ids)] for n in range(N) for k in (3, 5)]
    some.texts, some.image_of_text = Texts.pack(captions), torch.arange(N)
    some.inputs[PARTS] = TextGroup(Texts.pack(parts), torch.arange(N).repeat_interleave(2))
    return some, captions, parts


def torchs(made: CrossPool) -> nn.MultiheadAttention:
    """torch's attention that shares the weights of a pool."""
    attention = made.attention
    dim = attention.out.in_features
    copy = nn.MultiheadAttention(dim, attention.heads, batch_first=True).double()
    del copy.in_proj_weight, copy.in_proj_bias
    copy.in_proj_weight = torch.cat([attention.q.weight, attention.kv.weight])  # type: ignore[assignment]
    copy.in_proj_bias = torch.cat([attention.q.bias, attention.kv.bias])
    copy.out_proj = attention.out  # type: ignore[assignment]
    return copy


def crossed(made: CrossPool, vec: Tensor, tokens: Tensor) -> Tensor:
    """normalize(vec + attention(vec, tokens)), one vector [D] and the tokens [N, W] of the other side."""
    key = made.norm_key(made.tokens(tokens))[None]
    found, _ = torchs(made)(made.norm_query(vec)[None, None], key, key)
    return F.normalize(vec + found[0, 0], dim=0)


def info_nce(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """The mean over both directions, [N, D] each."""
    logits, own = scale * a @ b.T, torch.arange(N)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def literal(model: Model, contrast: TextCropsContrast, some: Batch, captions: list[Any], parts: list[Any]) -> Tensor:
    """The published loss, image by image and view by view."""
    pooling, teacher, crops = model.head.pooling, contrast.teacher, some.inputs[CROPS]
    assert isinstance(pooling, Single)
    assert isinstance(crops, Tensor)

    def text(ids: list[int]) -> tuple[Tensor, Tensor]:
        texts = Texts.pack([ids])
        tokens = model.text_tower(texts)
        return tokens, pooling.text_projection(pooling.text_pool(tokens, texts))[0]

    views: list[list[Tensor]] = [[] for _ in range(6)]  # the image, two crops, the caption, two parts
    taught: list[list[Tensor]] = [[], []]
    for n in range(N):
        of_image = model.image_tokens(torch.cat([some.images[n : n + 1], crops[n]]))
        words = text(captions[n])[0]
        for v in range(3):
            vec = pooling.project_image_tokens(pooling.image_pool(of_image[v : v + 1]))[0]
            views[v].append(crossed(contrast.from_words, vec, words))
        patches = of_image[0, extra(model.config.image) :]
        for v, ids in enumerate([captions[n], parts[2 * n], parts[2 * n + 1]]):
            views[3 + v].append(crossed(contrast.from_patches, text(ids)[1], patches))
        one = Texts.pack([captions[n]])
        taught[0].append(teacher.pooling.image(teacher.image_tower(model.normalise(some.images[n : n + 1])))["vec"][0])
        taught[1].append(teacher.pooling.text(teacher.text_tower(one), one)["vec"][0])
    scale, total = contrast.head.log_scale.exp(), torch.zeros((), dtype=torch.float64)
    for students in (views[:3], views[3:]):
        for target in taught:
            pairs = [info_nce(torch.stack(view), torch.stack(target).detach(), scale) for view in students]
            total = total + torch.stack(pairs).mean() / 4
    return total


def test_the_loss_and_its_gradient_are_the_published_ones() -> None:
    made, (some, captions, parts) = learner(SMALL), examples()
    contrast = contrast_of(made)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in (*contrast.teacher.parameters(), *contrast.from_words.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    expected = literal(made.model, contrast, some, captions, parts)
    ours = made.pair_losses(made.all_inputs(made.encode(some), some))["text_crops"]
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=0)
    weights = [
        *(p for p in contrast.parameters() if p.requires_grad),
        *(p for name, p in made.model.named_parameters() if not name.startswith("head.log_scale")),
    ]
    measured, wanted = (torch.autograd.grad(loss, weights) for loss in (ours, expected))
    for a, b in zip(measured, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_teacher_is_the_average_and_has_no_gradient() -> None:
    made, some = learner(SMALL), examples()[0]
    teacher = contrast_of(made).teacher
    after_step(made, 0)
    backward(made, [some])
    assert all(p.grad is None for p in teacher.parameters())
    assert torch.equal(teacher.text_tower.positions, made.model.text_tower.positions)
    with torch.no_grad():
        for p in (made.model.text_tower.positions, made.model.head.get_parameter("pooling.text_projection.weight")):
            p.add_(1)
    before = teacher.pooling.text_projection.weight.clone()
    after_step(made, 1)
    torch.testing.assert_close(teacher.pooling.text_projection.weight, before + 0.001, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        teacher.text_tower.positions, made.model.text_tower.positions - 0.999, rtol=0, atol=1e-12
    )


def test_parts_are_sentences_and_crops_windows_of_the_image() -> None:
    inputs, fetch = preset(NAME, {"text_crops": {"parts": 5, "small": 3}}).inputs, None
    image = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    example = Example("k", 0, image, ["One dog runs. It is red!", "a hill"])
    parts = inputs[PARTS].make(example, fetch, Draw(0, 0, 0))  # type: ignore[arg-type]
    assert sorted(set(parts)) == ["It is red!", "One dog runs.", "a hill"]  # type: ignore[arg-type]
    assert len(parts) == 5
    crops = inputs[CROPS].make(example, fetch, Draw(0, 0, 0))  # type: ignore[arg-type]
    assert isinstance(crops, Tensor)
    assert crops.shape == (3, 3, 4, 4)
    assert not torch.equal(crops[0], crops[1])
    tokens = replace(example, image=torch.zeros(5, 8))
    with pytest.raises(ValueError, match="--image-features gives tokens"):
        inputs[CROPS].make(tokens, fetch, Draw(0, 0, 0))  # type: ignore[arg-type]
    empty = replace(example, captions=[""])
    assert inputs[PARTS].make(empty, fetch, Draw(0, 0, 0)) == [""] * 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (NAME, {"least": 0.5}, "expected ascending numbers"),
        ("llip+text-crops", {}, "which llip has not"),
        ("vqa+text-crops", {}, "which vqa has not"),
    ],
)
def test_what_does_not_mix_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name, {"text_crops": settings})


def test_towers_that_do_not_fit_are_refused() -> None:
    small = config()
    trunk = TrunkConfig(name="lite", width=8, grid=2)
    for changed, heads, message in (
        (replace(small, image=replace(small.image, trunk=trunk)), 8, "cannot stand on trunks"),
        (replace(small, text=replace(small.text, trunk=trunk)), 8, "cannot stand on trunks"),
        (replace(small, image=replace(small.image, tower="resnet")), 8, "text-crops needs a vision transformer"),
        (small, 3, r"--settings\.text-crops\.heads 3 does not divide the embedding size"),
    ):
        with pytest.raises(ValueError, match=message):
            TextCropsContrast(changed, TextCropSettings(heads=heads))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coca+sub-captions+text-crops", "siglip+compose+text-crops"])
def test_mixes_conform(name: str) -> None:
    assert not [check for check in verify(MethodChoice(name, SMALL.settings), (1, 2, 4)) if not check.passed]


@pytest.mark.slow
def test_a_cut_run_ends_as_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = default_recipe(NAME, "debug", ("scenes?n=64",))
    data = replace(base.data, tokenizer_vocab=300)
    run = replace(base, settings=SMALL.settings, batch=8, micro=4, steps=4, data=data)
    whole, cut = whole_and_cut(run, tmp_path, monkeypatch)
    assert any("text_crops.teacher.text_tower.positions" in name for name in whole)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
