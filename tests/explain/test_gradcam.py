"""Grad-CAM against its definition, with gradients by finite differences, and its two targets and all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import HeadConfig, ImageConfig, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.explain.gradcam import TOGETHER, gradcam
from kiloword.methods.coca.coca import caption_loss
from kiloword.methods.registry import preset
from kiloword.model.decoder import TextDecoder
from kiloword.models.build import build
from noise import noise

CAPTIONS = ["a red circle", "two blue squares", ""]
IMAGE = ImageConfig(size=16, patch=8, width=8, depth=2, heads=2, mlp=16)  # 1 + 4 tokens


def matcher(method: str = "coca", pool: str = "mean", **image: Any) -> Matcher:
    config = replace(
        sizes()["debug"], image=replace(IMAGE, **image), head=HeadConfig(dim=16, image_pool=pool, pool_heads=2)
    )
    made = preset(method)
    return Matcher(build(config, made, seed=1).double(), Tokenizer.train(CAPTIONS[:2] * 3, 300), made)


def pixels(n: int = 2) -> Tensor:
    return noise(n, 16)


def stages(model: Matcher, image: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The stem's patches [P, W] of one image, and what the tower makes of others in their place: [1, E + P, W]."""
    tower = model.model.image_tower

    def rest(a: Tensor) -> Tensor:
        x = torch.cat([(tower.class_token + tower.positions[0])[None], a + tower.positions[1:]])[None]
        x = x if tower.pre_norm is None else tower.pre_norm(x)
        for block in tower.blocks:
            x = block(x)
        return tower.norm(x)

    return tower._patches(model.model.normalise(image[None]), None, None)[0][0], rest


def value(model: Matcher, target: str, caption: str) -> Callable[[Tensor], Tensor]:
    """From one image's tokens to what is explained."""
    m = model.model
    texts = model.tokenizer.encode([caption], m.config.text)
    if target == "score":
        features = m.encode_text(texts)[1]
        return lambda tokens: m.score(m.head.image(tokens), features)[0, 0]
    decoder = m.more["text_decoder"]
    assert isinstance(decoder, TextDecoder)
    keys = lambda tokens: decoder.remember(m.memory(tokens))  # noqa: E731
    return lambda tokens: -caption_loss(m, texts, m.text_tower(texts), keys(tokens))


def literal(model: Matcher, image: Tensor, caption: str, target: str) -> Tensor:
    """Eq. 1 and 2, one activation moved at a time."""
    a, rest = stages(model, image)
    of, step = value(model, target, caption), 1e-5
    gradient = torch.zeros_like(a)
    for p in range(a.shape[0]):
        for c in range(a.shape[1]):
            up, down = a.clone(), a.clone()
            up[p, c] += step
            down[p, c] -= step
            gradient[p, c] = (of(rest(up)) - of(rest(down))) / (2 * step)
    alpha = [sum(gradient[p, c] for p in range(len(a))) / len(a) for c in range(a.shape[1])]
    return torch.stack([sum(alpha[c] * a[p, c] for c in range(a.shape[1])) for p in range(len(a))]).clamp(min=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("stem", ["linear", "conv"])
@pytest.mark.parametrize("target", ["score", "caption"])
def test_against_finite_differences(target: Any, stem: str) -> None:
    model = matcher(stem=stem)
    found = gradcam(model, pixels(), CAPTIONS[:2], target)
    assert found.shape == (2, 2, 4)
    with torch.no_grad():
        for i, t in ((0, 1), (1, 0)):
            expected = literal(model, pixels()[i], CAPTIONS[t], target)
            torch.testing.assert_close(found[i, t], expected, rtol=1e-5, atol=1e-9)
    assert (found > 0).any()
    assert (found == 0).any()


def test_models_of_other_methods_and_half_precision() -> None:
    made = preset("llip", {"k": 2})
    config = replace(sizes()["debug"], image=IMAGE, head=HeadConfig(dim=16))
    model = Matcher(build(config, made, seed=1).to(torch.bfloat16), Tokenizer.train(CAPTIONS * 2, 300))
    found = gradcam(model, pixels(), CAPTIONS)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    with pytest.raises(ValueError, match="no text decoder"):
        gradcam(model, pixels(), CAPTIONS, "caption")


@pytest.mark.parametrize("target", ["score", "caption"])
def test_a_graph_holds_some_images_and_the_maps_are_those_of_each_alone(target: Any) -> None:
    model, images, seen = matcher(), pixels(2 * TOGETHER + 1), list[int]()
    tower = model.model.image_tower
    hook = tower.patches.register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    together = gradcam(model, images, CAPTIONS[:2], target)
    hook.remove()
    assert seen == [TOGETHER, TOGETHER, 1]
    alone = torch.cat([gradcam(model, image, CAPTIONS[:2], target) for image in images[:, None]])
    assert torch.allclose(together, alone, atol=1e-12)


def test_nothing_changes_and_what_cannot_be_is_refused() -> None:
    model = matcher()
    model.model.train()
    before = model.score(pixels(), CAPTIONS)
    gradcam(model, pixels(), CAPTIONS)
    assert model.model.training
    assert all(parameter.grad is None for parameter in model.model.parameters())
    torch.testing.assert_close(model.score(pixels(), CAPTIONS), before, rtol=0, atol=0)
    wrong: list[tuple[dict[str, Any], str]] = [({"texts": []}, "no texts"), ({"target": "x"}, "target")]
    for words, said in wrong:
        with pytest.raises(ValueError, match=said):
            gradcam(model, pixels(), **{"texts": CAPTIONS, **words})
