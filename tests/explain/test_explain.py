"""Looking inside: attention, words and Grad-CAM against their definitions written out; pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from folders import model_folder
from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.explain.maps import Explanation, attentions, probabilities, token_maps
from kiloword.explain.plane import STDS, outline, project
from kiloword.explain.sheets import possible
from kiloword.explain.words import END, explain_words, gradcam, words_of
from kiloword.methods.coca.coca import caption_loss
from kiloword.methods.registry import preset
from kiloword.model.attention import Packing
from kiloword.model.decoder import TextDecoder
from kiloword.model.image import unfold
from kiloword.models.build import build
from kiloword.types import Texts
from tars import draw, noise_batch

CAPTIONS = ["a red circle", "two blue squares", "a green star left of a circle"]
IMAGE = ImageConfig(size=48, patch=16, width=32, depth=3, heads=2, mlp=64, extra_tokens=2)  # 3 + 9 tokens
TOKENIZER = Tokenizer.train(CAPTIONS[:2] * 3, 300)


def config(pool: str = "cls", **image: Any) -> ModelConfig:
    head = HeadConfig(dim=16, image_pool=pool, pool_heads=2, pool_queries=5 if pool == "attentional" else 256)
    return replace(sizes()["debug"], image=replace(IMAGE, **image), head=head)


def matcher(method: str = "siglip", config: ModelConfig | None = None, **settings: Any) -> Matcher:
    made = preset(method, settings)
    return Matcher(build(made.shape(config or replace(CONFIG)), made, seed=1), TOKENIZER, made)


CONFIG = config()


def pixels(n: int = 2) -> Tensor:
    return noise_batch(n, 48)


def test_probabilities_are_those_the_tower_used_and_looking_changes_nothing() -> None:
    tower = matcher().model.image_tower
    attention = tower.blocks[0].get_submodule("attention")
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    images = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        p = probabilities(attention, x)
        v = attention.qkv(x).unflatten(-1, (3, 2, -1))[:, :, 2]
        again = attention.out(torch.einsum("ihqk,ikhd->iqhd", p, v).flatten(-2))
        torch.testing.assert_close(again, attention(x))
        plain = tower(images)
        with attentions(attention) as seen:
            torch.testing.assert_close(tower(images), plain, rtol=0, atol=0)
        tower(images)
    assert [s.shape for s in seen] == [(1, 12, 12)]
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(1, 12))


def test_tokens_look_at_patches_and_patches_stand_for_themselves() -> None:
    whole = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.1, 0.1, 0.0, 0.8], [0.25] * 4, [0.25] * 4])[None]
    expected = torch.tensor([[0.6, 0.4], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])[None]
    torch.testing.assert_close(token_maps(whole, 2, 2), expected[:, :2])
    torch.testing.assert_close(token_maps(whole, 2, 4), expected)


@pytest.mark.parametrize("patch_keys", [True, False])
def test_maps_of_a_text_mix_the_tokens_maps(patch_keys: bool) -> None:
    model = matcher("llip", k=4, heads=2, patch_keys=patch_keys)
    found = model.explain(pixels(3), CAPTIONS[:2], batch=2)
    torch.testing.assert_close(model.explain(pixels(3), model.encode_text(CAPTIONS[:2])).maps, found.maps)
    assert found.weights is not None
    assert found.tokens is not None
    assert found.weights.shape == (3, 2, 2, 13 if patch_keys else 4)
    assert found.grid == (3, 3)
    literal = torch.zeros(3, 2, 9)
    for i in range(3):
        for t in range(2):
            for k in range(found.weights.shape[-1]):
                literal[i, t] += (found.weights[i, t, 0, k] + found.weights[i, t, 1, k]) / 2 * found.tokens[i, k]
    torch.testing.assert_close(found.maps, literal)
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(3, 2))
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(3, 2, 2))
    torch.testing.assert_close(found.scores, model.score(pixels(3), CAPTIONS[:2]))
    assert not torch.allclose(found.maps[:, 0], found.maps[:, 1], rtol=1e-3)


def test_entropy_of_known_weights() -> None:
    weights = torch.tensor([[[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]], [[0.5, 0.5, 0, 0], [0.5, 0, 0, 0.5]]])[None]
    found = Explanation(torch.zeros(1, 2), torch.zeros(1, 2, 9), (3, 3), "", weights)
    torch.testing.assert_close(found.shares, weights.mean(2))
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy, torch.tensor([[0.5, math.log(2) / math.log(4)]]))


def test_poolings_of_one_vector_show_what_they_read() -> None:
    """Attention pooling its attention, tokens where they look, and the mean how the score falls without each patch."""
    with torch.no_grad():
        for settings, read in (({}, 1), ({"pool": "first"}, 1), ({"pool": "average"}, 4)):
            model = matcher("llip", k=4, heads=2, **settings) if settings else matcher()
            with attentions(model.model.image_tower.blocks[-1].get_submodule("attention")) as seen:
                model.model.encode_image(pixels())
            looks = seen[0][:, :read, -9:]
            expected = (looks / looks.sum(-1, keepdim=True)).mean(1)
            torch.testing.assert_close(model.explain(pixels(), CAPTIONS).maps[:, 2], expected)
        found = matcher(config=config("map")).explain(pixels(), CAPTIONS).maps
        torch.testing.assert_close(found.sum(-1), torch.ones(2, 3))
        torch.testing.assert_close(found[:, 0], found[:, 2])
        model = matcher(config=config("mean"))
        tokens, texts = model.model.image_tokens(pixels()), model.encode_text(CAPTIONS)
        found, score = model.explain(pixels(), CAPTIONS).maps, model.score(pixels(), CAPTIONS)
        for patch in range(9):
            others = tokens.clone()
            others[:, 3 + patch] = tokens[:, 3:].mean(1)
            fall = score - model.model.score(model.model.head.image(others), texts)
            torch.testing.assert_close(found[..., patch], fall, atol=1e-6, rtol=1e-4)


def looks_of(model: Matcher, image: Tensor, caption: str) -> tuple[Tensor, Tensor]:
    """One image, one caption, head by head: attention [L, 9] of every predicting place, log probabilities [L]."""
    m, decoder = model.model, model.model.more["text_decoder"]
    assert isinstance(decoder, TextDecoder)
    texts = model.tokenizer.encode([caption], m.config.text)
    end = len(texts.ids) - len(m.config.text.extra_tokens)
    x = m.text_tower(texts)[: end - 1]
    patches = m.image_tokens(image[None])[0]
    memory, pool = patches, torch.eye(10)
    if m.config.head.image_pool == "attentional":
        memory = m.memory(patches[None])[0]
        own: Any = m.head.pooling
        attention = own.image_pool.attentional.attention
        queries = own.image_pool.attentional.norm_query(own.image_pool.attentional.probes[1:])
        pool = heads(attention.q(queries), attention.kv(patches)[:, : queries.shape[1]], attention.heads)
    for layer in decoder.layers:
        part: Any = layer
        whole = Texts(texts.ids[: end - 1], torch.tensor([0, end - 1]), end - 1)
        packing = Packing.of(whole)
        x = part.own(x, packing, True)
        cross = part.cross
        keys = cross.attention.kv(cross.norm_memory(memory))[:, : x.shape[1]]
        looks = heads(cross.attention.q(cross.norm1(x)), keys, cross.attention.heads) @ pool  # the last layer's remain
        x = cross(x, cross.keys(memory[None]), packing)
    log_p = (decoder.norm(x) @ decoder.table(m.text_tower.tokens).T).log_softmax(-1)
    chosen = log_p[torch.arange(end - 1), texts.ids[1:end]]
    return looks[:, 1:], chosen


def heads(q: Tensor, k: Tensor, n: int) -> Tensor:
    """Mean over heads of softmax(q k^T / sqrt(d)): [L, M]."""
    d = q.shape[1] // n
    parts = [(q[:, h * d : h * d + d] @ k[:, h * d : h * d + d].T / d**0.5).softmax(-1) for h in range(n)]
    return sum(parts) / n  # type: ignore[return-value]


@pytest.mark.parametrize(("method", "pool"), [("coca", "cls"), ("coca", "attentional"), ("llip+caption", "cls")])
def test_word_maps_are_the_attention_written_out(method: str, pool: str) -> None:
    model = matcher(method, config(pool, extra_tokens=0, depth=2), **({"k": 1} if "llip" in method else {}))
    with torch.no_grad():
        found = [explain_words(model, image[None], CAPTIONS) for image in pixels()]
        for i, row in enumerate(found):
            for caption, maps in zip(CAPTIONS, row, strict=True):
                looks, log_p = looks_of(model, pixels()[i], caption)
                ids = model.tokenizer.encode([caption], model.model.config.text).ids.tolist()
                groups = words_of(model.tokenizer, ids[1 : len(looks)])
                assert maps.words == [*caption.split(), END]
                for n, places in enumerate([*(places for _, places in groups), [len(looks) - 1]]):
                    own = torch.stack([looks[place] / looks[place].sum() for place in places]).mean(0)
                    torch.testing.assert_close(maps.maps[n], own)
                    torch.testing.assert_close(maps.probabilities[n], log_p[places].sum().exp())
    assert not torch.allclose(found[0][0].maps[0], found[1][0].maps[0], rtol=1e-3)


def test_captions_of_every_kind() -> None:
    """None of the training words, one word, no word, too many; words keep all tokens in order."""
    model, text = matcher("coca"), sizes()["debug"].text
    captions = ["naïve, 日本!", "x", "", "word " * 200]
    found = explain_words(model, pixels(1), captions)
    assert [one.words for one in found[:3]] == [["naïve,", "日本!", END], ["x", END], [END]]
    assert 5 < len(found[3].words) < model.model.config.text.context
    for maps in found:
        torch.testing.assert_close(maps.maps.sum(1), torch.ones(len(maps.words)))
    for caption in ("a  red\tcircle", "réd", " é日 ", "a.b , c", "🦓 zebra"):
        ids = TOKENIZER.encode([caption], text).ids.tolist()[1:-1]
        groups = words_of(TOKENIZER, ids)
        assert [n for _, tokens in groups for n in tokens] == list(range(len(ids))), caption
        assert [word for word, _ in groups] == caption.split()


def stages(model: Matcher, image: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The stem's patches [P, W] of one image, and what the tower makes of others in their place: [1, E + P, W]."""
    tower = model.model.image_tower

    def rest(a: Tensor) -> Tensor:
        x = torch.cat([(tower.class_token + tower.positions[0])[None], a + tower.positions[1:]])[None]
        x = x if tower.pre_norm is None else tower.pre_norm(x)
        for block in tower.blocks:
            x = block(x)
        return tower.norm(x)

    pixels = model.model.normalise(image[None])
    first = tower.patches(unfold(pixels, tower.config.patch))
    return (first if tower.stem is None else first + tower.stem(pixels))[0], rest


def explained(model: Matcher, target: str, caption: str) -> Callable[[Tensor], Tensor]:
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


def cam_of(model: Matcher, image: Tensor, caption: str, target: str) -> Tensor:
    """Eq. 1 and 2: activations weighted by their mean gradient, where positive."""
    a, rest = stages(model, image)
    a = a.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(explained(model, target, caption)(rest(a)), a)
    return (a.detach() * gradient.mean(0)).sum(1).clamp(min=0)


@pytest.mark.parametrize("stem", ["linear", "conv"])
@pytest.mark.parametrize("target", ["score", "caption"])
def test_gradcam_is_that_of_the_paper(target: Any, stem: str) -> None:
    small = config("mean", size=16, patch=8, width=8, depth=2, mlp=16, extra_tokens=0, stem=stem)
    model, images = matcher("coca", small), noise_batch(3, 16)
    model.model.double().train()
    found = torch.stack([gradcam(model, image[None], CAPTIONS[:2], target) for image in images])
    assert found.shape == (3, 2, 4)
    assert (found > 0).any()
    assert (found == 0).any()
    assert model.model.training
    assert all(parameter.grad is None for parameter in model.model.parameters())
    for i, t in ((0, 1), (1, 0)):
        torch.testing.assert_close(found[i, t], cam_of(model, images[i], CAPTIONS[t], target), rtol=1e-9, atol=1e-12)


def test_what_models_can_show() -> None:
    shown = {"sycoca": ["words", "gradcam", "reconstruction"], "coca": ["words", "gradcam"], "clip": []}
    for method, more in {**shown, "clip+mim": ["gradcam", "reconstruction"]}.items():
        assert possible(matcher(method)) == ["maps", *more]
    answers = matcher("coca")
    answers.model.more["fuser"] = torch.nn.Identity()
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: possible(matcher("clip"), ["words"]), "text decoder"),
        (lambda: possible(answers, ["words"]), "questions"),
        (lambda: possible(matcher("coca"), ["reconstruction"]), "image decoder"),
        (lambda: gradcam(matcher("clip"), pixels(), CAPTIONS, "caption"), "text decoder"),
    ]
    for ask, word in refused:
        with pytest.raises(ValueError, match=word):
            ask()


def test_pages_of_a_model_and_of_a_plane(tmp_path: Path) -> None:
    images = [str(draw(tmp_path / "a.jpg", 0, 70, 50)), str(draw(tmp_path / "b" / "a.png", 1, 30, 90))]
    sycoca, prolip, clip = (str(model_folder(tmp_path / method, method)) for method in ("sycoca", "prolip", "clip"))
    texts = ["--texts", "a <b>", "two"]
    main(["score", sycoca, "--images", *images, *texts, "--explain", str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a-1.html", "a-2.html"}
    page = (tmp_path / "out" / "a-1.html").read_text()
    maps, words, cams, painted = 1, 3 + 2, 2, 4
    assert page.count("<img") == 2 * (4 + maps + cams + painted) + words
    assert "a &lt;b&gt;" in page
    main(
        ["score", sycoca, "--images", images[0], *texts, "--explain", str(tmp_path / "g"), "--explain-what", "gradcam"]
    )
    assert (tmp_path / "g" / "a.html").read_text().count("<img") == 2 * (1 + cams)
    main(["score", prolip, "--images", *images, *texts, "--plane", str(tmp_path / "p.html"), "--beside", clip])
    page = (tmp_path / "p.html").read_text()
    assert page.count("<img") == 2
    assert "a &lt;b&gt;" in page
    assert page.index(">prolip<") < page.index(">clip<")


def test_projection_is_that_of_principal_components_and_keeps_distances_of_gaussians() -> None:
    generator = torch.Generator().manual_seed(0)
    part = {name: torch.randn(5, 8, generator=generator) for name in ("vec", "log_var")}
    means, spread = project([{n: v[:2] for n, v in part.items()}, {n: v[2:] for n, v in part.items()}])
    centred = part["vec"].double().numpy() - part["vec"].double().numpy().mean(0)
    u, s, _ = np.linalg.svd(centred)
    np.testing.assert_allclose(means.abs().numpy(), np.abs(u * s)[:, :2], atol=1e-9)
    axes = np.linalg.lstsq(centred, means.numpy(), rcond=None)[0].T  # [2, D]
    for n in range(5):
        expected = axes @ np.diag(np.exp(part["log_var"][n].double().numpy())) @ axes.T
        np.testing.assert_allclose(spread[n].numpy(), expected, atol=1e-9)
    away = outline(means[0], spread[0]) - means[0]
    radii = (away @ torch.linalg.inv(spread[0]) * away).sum(1).sqrt()
    torch.testing.assert_close(radii, torch.full_like(radii, STDS))
    assert project([{"vec": part["vec"]}])[1] == []
