"""Text crops, against the published loss of COSMOS by loops and torch's own attention (arXiv:2412.01814)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.methods.registry import preset
from kiloword.methods.text_crops import CROPS, PARTS
from kiloword.model.image import extra
from kiloword.randomness import Draw
from kiloword.training.step import backward
from kiloword.types import Batch, Example, TextGroup, Texts
from kiloword.verify.batch import MethodChoice, batch
from parts import after_step, agree, drawn, ids_of, learner, losses

NAME = "clip+text-crops"
SETTINGS = {"text_crops": {"small": 2, "parts": 2, "heads": 4}}
N = 4  # images


def examples() -> tuple[Batch, list[list[int]], list[list[int]]]:
    """A batch of one caption and two parts an image, as the loader makes it; ids of captions and of parts."""
    some = batch(end=N, method=MethodChoice(NAME, SETTINGS))
    ids = ids_of(some.texts)
    captions, parts = ids[:N], [ids[(n + k) % len(ids)] for n in range(N) for k in (3, 5)]
    some.texts, some.image_of_text = Texts.pack(captions), torch.arange(N)
    some.inputs[PARTS] = TextGroup(Texts.pack(parts), torch.arange(N).repeat_interleave(2))
    return some, captions, parts


def crossed(made: Any, vec: Tensor, tokens: Tensor) -> Tensor:
    """normalize(vec + attention(vec, tokens)) by torch's attention, one vector [D] and tokens [N, W] of the other."""
    attention, key = made.attention, made.norm_key(made.tokens(tokens))[None]
    weights = {
        "in_proj_weight": torch.cat([attention.q.weight, attention.kv.weight]),
        "in_proj_bias": torch.cat([attention.q.bias, attention.kv.bias]),
        "out_proj.weight": attention.out.weight,
        "out_proj.bias": attention.out.bias,
    }
    torchs = nn.MultiheadAttention(attention.out.in_features, attention.heads, batch_first=True).double()
    found, _ = torch.func.functional_call(torchs, weights, (made.norm_query(vec)[None, None], key, key))
    return F.normalize(vec + found[0, 0], dim=0)


def info_nce(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """The mean over both directions, [N, D] each."""
    logits, own = scale * a @ b.T, torch.arange(N)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def literal(model: Any, contrast: Any, some: Batch, captions: list[Any], parts: list[Any]) -> Tensor:
    """The published loss, image by image and view by view."""
    pooling, teacher, crops = model.head.pooling, contrast.teacher, some.inputs[CROPS]

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
    made, (some, captions, parts) = learner(NAME, SETTINGS), examples()
    contrast: Any = made.contrasts["text_crops"]
    with torch.no_grad():
        for n, p in enumerate((*contrast.teacher.parameters(), *contrast.from_words.parameters())):
            p.add_(0.05 * drawn(*p.shape, seed=n))
    found = losses(made, some)["text_crops"]
    weights = [p for p in made.parameters() if p.requires_grad]
    agree(found, literal(made.model, contrast, some, captions, parts), weights)


def test_the_teacher_is_the_average_and_has_no_gradient() -> None:
    made, some = learner(NAME, SETTINGS), examples()[0]
    teacher: Any = made.contrasts["text_crops"].teacher
    backward(made, [some])
    assert all(p.grad is None for p in teacher.parameters())
    now = made.model.text_tower.positions, made.model.head.get_parameter("pooling.text_projection.weight")
    averages = teacher.text_tower.positions, teacher.pooling.text_projection.weight
    assert all(map(torch.equal, now, averages))
    with torch.no_grad():
        for p in now:
            p.add_(1)
    before = [p.clone() for p in averages]
    after_step(made, 1)
    for p, old in zip(averages, before, strict=True):
        torch.testing.assert_close(p, old + 0.001, rtol=0, atol=1e-12)


def test_parts_are_sentences_and_crops_windows_of_the_image() -> None:
    inputs = preset(NAME, {"text_crops": {"parts": 5, "small": 3}}).inputs

    def made(name: str, some: Example) -> Any:
        fetch: Any = None
        return inputs[name].make(some, fetch, Draw(0, 0, 0))

    image = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    example = Example("k", 0, image, ["One dog runs. It is red!", "a hill"])
    parts, crops = made(PARTS, example), made(CROPS, example)
    assert (len(parts), set(parts)) == (5, {"It is red!", "One dog runs.", "a hill"})
    assert crops.shape == (3, 3, 4, 4)
    assert not torch.equal(crops[0], crops[1])
    assert made(PARTS, replace(example, captions=[""])) == [""] * 5
