"""Looking inside: attention maps against the tower's own attention, maps with known answers, figures and files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.explain.inside import SIDE, possible
from kiloword.explain.maps import Explanation, attentions, explain, probabilities, rollout, token_maps
from kiloword.explain.plane import STDS, outline, project
from kiloword.explain.reconstruct import mim_settings, reconstruct
from kiloword.explain.sheets import TOP, write
from kiloword.methods.coca import sycoca
from kiloword.methods.registry import preset
from kiloword.model.heads import Pooling, Single
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.types import Features
from kiloword.verify.batch import batch
from kiloword.verify.batch import config as trunk_config
from noise import noise, noise_file

CAPTIONS = ["a red circle", "two blue squares", "a green star left of a circle"]
IMAGE = ImageConfig(size=48, patch=16, width=32, depth=3, heads=2, mlp=64, extra_tokens=2)  # 3 + 9 tokens


class Mixing(Pooling):
    """A pooling that mixes tokens by what a text says: the least that `explain` asks of one."""

    def __init__(self, inner: Single, tokens: int, heads: int = 2) -> None:
        super().__init__()
        self.inner, self.n, self.heads = inner, tokens, heads
        self.text, self.score, self.score_pairs = inner.text, inner.score, inner.score_pairs

    def image(self, tokens: Tensor) -> Features:
        return {**self.inner.image(tokens), "keys": tokens[:, : self.n]}

    def explain(self, images: Features, texts: Features) -> Tensor:
        keys = images["keys"].unflatten(-1, (self.heads, -1))[..., :8]  # [I, N, M, 8]
        queries = texts["vec"].unflatten(-1, (self.heads, -1))  # [T, M, 8]
        return torch.einsum("inmd,tmd->itmn", keys, queries).softmax(-1)


def config(pool: str = "cls", **image: Any) -> ModelConfig:
    return replace(sizes()["debug"], image=replace(IMAGE, **image), head=HeadConfig(dim=16, image_pool=pool))


def matcher(pool: str = "cls", mixed: int | None = None, **image: Any) -> Matcher:
    model = build(config(pool, **image), preset("siglip"), seed=1)
    if mixed is not None:
        assert isinstance(model.head.pooling, Single)
        model.head.pooling = Mixing(model.head.pooling, mixed)
    return Matcher(model, Tokenizer.train(CAPTIONS, 300))


def pixels(n: int = 2) -> Tensor:
    return noise(n, 48)


def test_probabilities_are_those_the_tower_used() -> None:
    attention = matcher().model.image_tower.blocks[0].get_submodule("attention")
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        p = probabilities(attention, x)
        v = attention.qkv(x).unflatten(-1, (3, 2, -1))[:, :, 2]
        again = attention.out(torch.einsum("ihqk,ikhd->iqhd", p, v).flatten(-2))
        torch.testing.assert_close(again, attention(x))


def test_looking_changes_nothing_and_leaves_nothing() -> None:
    tower = matcher().model.image_tower
    x = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = tower(x)
        with attentions(block.attention for block in tower.blocks) as seen:
            torch.testing.assert_close(tower(x), plain, rtol=0, atol=0)
        tower(x)
    assert [s.shape for s in seen] == [(1, 12, 12)] * 3
    for s in seen:
        torch.testing.assert_close(s.sum(-1), torch.ones(1, 12))


def test_rollout_is_the_product_of_blocks_with_their_residuals() -> None:
    seen = [torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(n)).softmax(-1).double() for n in range(3)]
    half = [0.5 * s + 0.5 * torch.eye(5) for s in seen]
    torch.testing.assert_close(rollout(seen), half[2] @ half[1] @ half[0])


def test_tokens_look_at_patches_and_patches_stand_for_themselves() -> None:
    whole = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.1, 0.1, 0.0, 0.8], [0.25] * 4, [0.25] * 4])[None]
    expected = torch.tensor([[0.6, 0.4], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])[None]
    torch.testing.assert_close(token_maps(whole, 2, 2), expected[:, :2])
    torch.testing.assert_close(token_maps(whole, 2, 4), expected)


@pytest.mark.parametrize("maps", ["last", "rollout"])
@pytest.mark.parametrize("n", [3, 12])
def test_maps_of_a_text_mix_the_tokens_maps(maps: Any, n: int) -> None:
    model = matcher(mixed=n)
    found = model.explain(pixels(3), CAPTIONS[:2], maps, batch=2)
    encoded = model.explain(pixels(3), model.encode_text(CAPTIONS[:2]), maps)
    torch.testing.assert_close(encoded.maps, found.maps)
    assert found.weights is not None
    assert found.tokens is not None
    assert found.weights.shape == (3, 2, 2, n)
    assert found.tokens.shape == (3, n, 9)
    assert found.grid == (3, 3)
    literal = torch.zeros(3, 2, 9)
    for i in range(3):
        for t in range(2):
            for k in range(n):
                literal[i, t] += (found.weights[i, t, 0, k] + found.weights[i, t, 1, k]) / 2 * found.tokens[i, k]
    torch.testing.assert_close(found.maps, literal)
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(3, 2))
    torch.testing.assert_close(found.scores, model.score(pixels(3), CAPTIONS[:2]))


def test_entropy_of_known_weights() -> None:
    weights = torch.tensor([[[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]], [[0.5, 0.5, 0, 0], [0.5, 0, 0, 0.5]]])[None]
    found = Explanation(torch.zeros(1, 2), torch.zeros(1, 2, 9), (3, 3), "", weights)
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy, torch.tensor([[0.5, math.log(2) / math.log(4)]]))
    one = replace(found, weights=torch.ones(1, 2, 2, 1)).entropy
    assert one is not None
    assert one.tolist() == [[0, 0]]


@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize("projected", [True, False])
def test_what_patches_add_is_the_cosine(pool: str, projected: bool) -> None:
    model = matcher(pool)
    if not projected:
        base = config(pool)
        head = replace(base.head, image_projection=False, dim=32)
        model = Matcher(build(replace(base, head=head), preset("siglip"), seed=1), model.tokenizer)
    found = model.explain(pixels(2), CAPTIONS)
    torch.testing.assert_close(found.maps.sum(-1), model.score(pixels(2), CAPTIONS), atol=1e-5, rtol=1e-4)
    assert found.weights is found.tokens is found.entropy is None


@pytest.mark.parametrize("pool", ["cls", "map"])
def test_pooling_by_attention_looks_the_same_way_for_every_text(pool: str) -> None:
    found = matcher(pool).explain(pixels(2), CAPTIONS)
    torch.testing.assert_close(found.maps[:, 0], found.maps[:, 2])
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(2, 3))
    assert "same for every text" in found.about


def llip(**settings: Any) -> Matcher:
    return Matcher(build(config(), preset("llip", {"k": 4, "heads": 2, **settings}), seed=1), matcher().tokenizer)


@pytest.mark.parametrize("patch_keys", [True, False])
def test_llip_mixes_its_tokens(patch_keys: bool) -> None:
    found = llip(patch_keys=patch_keys).explain(pixels(3), CAPTIONS)
    assert found.weights is not None
    assert found.weights.shape == (3, 3, 2, 13 if patch_keys else 4)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(3, 3, 2))
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(3, 3))
    assert not torch.allclose(found.maps[:, 0], found.maps[:, 1], rtol=1e-3)


def test_registers_and_averages_show_the_tokens_that_are_read() -> None:
    with torch.no_grad():
        for pool, read in (("first", 1), ("average", 4)):
            model = llip(pool=pool)
            with attentions([model.model.image_tower.blocks[-1].attention]) as seen:
                model.model.encode_image(pixels(2))
            looks = seen[0][:, :read, 4:]
            expected = (looks / looks.sum(-1, keepdim=True)).mean(1)
            torch.testing.assert_close(model.explain(pixels(2), CAPTIONS).maps[:, 2], expected)
    with pytest.raises(ValueError, match="one vector"):
        llip(pool="learned_average").explain(pixels(2), CAPTIONS)


@pytest.mark.parametrize("depth", [0, 2])
def test_contributions_of_a_trunk_s_tokens_are_the_cosine(depth: int) -> None:
    small = trunk_config("frozen")
    image = replace(small.image, depth=depth, class_token=False)
    model = build(replace(small, image=image, head=replace(small.head, image_pool="max")), preset("siglip"), 0).double()
    data = batch(0, 4, trunks="frozen")
    with torch.no_grad():
        texts = model.encode_text(data.texts)[1]
        shown = explain(model, data.images, texts, "rollout")
        assert torch.allclose(shown.maps.sum(-1), model.encode_image(data.images)[1]["vec"] @ texts["vec"].T, atol=1e-6)
    assert shown.maps.std() > 0


def coca(method: str = "sycoca", pool: str = "cls", **settings: Any) -> Matcher:
    made = preset(method, settings)
    head = HeadConfig(dim=16, pool_heads=2, image_pool=pool, pool_queries=3 if pool == "attentional" else 256)
    small = replace(sizes()["debug"], image=replace(IMAGE, depth=1, extra_tokens=0), head=head)
    return Matcher(build(made.shape(small), made, seed=1), Tokenizer.train(CAPTIONS * 2, 300), made)


def test_what_models_can_show() -> None:
    assert possible(coca()) == ("words", "gradcam", "masks", "reconstruction")
    assert possible(coca("coca")) == ("words", "gradcam")
    assert possible(coca("clip+mim")) == ("gradcam", "masks", "reconstruction")
    assert possible(coca("clip")) == ()


def test_files_of_mixing_weights(tmp_path: Path) -> None:
    images = [noise_file(tmp_path / "a.jpg"), noise_file(tmp_path / "b" / "a.png", 30, 90)]
    lines = write(tmp_path / "deep" / "out", matcher(mixed=12), images, ["a <b>", "a"])
    document = json.loads((tmp_path / "deep" / "out" / "weights.json").read_text())
    names = document["tokens"]
    assert (names[0], names[2:4], names[-1]) == ("class token", ["token 2", "patch 0, 0"], "patch 2, 2")
    assert [image["figure"] for image in document["images"]] == ["a.png", "a-2.png"]
    with pytest.raises(ValueError, match="over the image"):
        write(tmp_path / "b", matcher(), images[1:], ["a"])
    for image in document["images"]:
        with Image.open(tmp_path / "deep" / "out" / image["figure"]) as png:
            assert png.size == (3 * SIDE, SIDE)
        page = (tmp_path / "deep" / "out" / image["figure"].replace("png", "html")).read_text()
        assert page.count("<img") == 1 + 2 * (1 + TOP)
        assert "a &lt;b&gt;" in page
        for found in image["texts"]:
            weights = np.array(found["weights"])
            np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
            assert [t["share"] for t in found["top"]] == pytest.approx(sorted(weights.mean(0), reverse=True)[:TOP])
            assert any(f"entropy {found['entropy']:.2f}" in line for line in lines)


def test_values_and_pages_of_decoders(tmp_path: Path) -> None:
    model, image = coca(), noise_file(tmp_path / "a.jpg")
    captions = [*CAPTIONS[:2], ""]
    write(tmp_path / "out", model, [image], captions)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a.html", "a.png", "weights.json", "inside.json"}
    (shown,) = json.loads((tmp_path / "out" / "inside.json").read_text())["images"]
    assert shown["image"] == str(image)
    for text, found in zip(captions, shown["texts"], strict=True):
        assert [word["word"] for word in found["words"]] == [*text.split(), "(end)"]
        assert sum(found["words"][0]["map"]) == pytest.approx(1, rel=1e-5)
        assert set(found["gradcam"]) == {"for the score", "for writing the caption"}
        masks = found["masks"]
        order = sorted(range(9), key=lambda p: -masks["similarity"][p])
        assert masks["most"] == sorted(order[:4]) == found["reconstruction"]["hidden"]
        assert masks["least"] == sorted(sorted(range(9), key=lambda p: masks["similarity"][p])[:4])
        with torch.no_grad():
            pixels, none = model.pixels([image]), model.tokenizer.encode([""], model.model.config.text)
            hidden = torch.tensor([masks["most"]])
            (painted,) = reconstruct(model.model, pixels, hidden, [none], mim_settings(model))
            true = sycoca.pixels(model.model, pixels, hidden, norm_pix=False)
        assert found["reconstruction"]["l1"]["from no caption"] == pytest.approx(
            float((painted - true).abs().mean()), 1e-4
        )
    names = ["from this caption", "from “two blue squares”", "from no caption"]
    assert list(shown["texts"][0]["reconstruction"]["l1"]) == names
    page = (tmp_path / "out" / "a.html").read_text()
    tiles = [1 + words + 2 + 3 + 2 + guides for words, guides in ((3, 3), (3, 3), (1, 2))]
    assert page.count("<img") == 1 + sum(tiles)


@pytest.mark.parametrize("settings", [{"guide": "none"}, {"norm_pix": True, "mim_op": "drop"}, {"mim_mask": "random"}])
def test_every_way_of_painting(settings: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, coca(**settings), [noise_file(tmp_path / "a.jpg")], CAPTIONS[:2], what=["reconstruction"])
    found = [
        text["reconstruction"] for text in json.loads((tmp_path / "inside.json").read_text())["images"][0]["texts"]
    ]
    assert len(found[0]["l1"]) == (1 if settings.get("guide") == "none" else 3)
    assert (found[0]["hidden"] == found[1]["hidden"]) == (settings.get("mim_mask") == "random")


def test_verb_draws_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "model", coca("coca"), "coca")
    shown = ["score", folder, "--images", str(noise_file(tmp_path / "a.jpg")), "--texts", "a zebra", "a"]
    main([*shown, "--explain", str(tmp_path / "out"), "--explain-what", "words"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"a.html", "inside.json"}
    main([*shown, "--explain", str(tmp_path / "maps"), "--explain-what", "maps"])
    assert {path.name for path in (tmp_path / "maps").iterdir()} == {"a.html", "a.png", "weights.json"}
    for flags, word in (
        (["--explain-what", "words"], "--explain"),
        (["--explain", str(tmp_path / "x"), "--explain-what", "reconstruction"], "no image decoder"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([*shown, *flags])
        said = capsys.readouterr()
        assert (stopped.value.code, said.out.count("a zebra")) == (2, 0)  # before anything is scored
        assert word in said.err


def saved(folder: Path, model: Matcher, method: str) -> str:
    save_model(folder, model.model, model.tokenizer, ModelFile(method=method, settings={}, model=model.model.config))
    return str(folder)


def test_planes_of_two_models(tmp_path: Path) -> None:
    models = [saved(tmp_path / method, coca(method), method) for method in ("prolip", "siglip")]
    images = [str(noise_file(tmp_path / f"{n}.png")) for n in range(3)]
    plane = ["--plane", str(tmp_path / "p.html"), "--beside", models[1]]
    main(["score", models[0], "--images", *images, "--texts", "a <b>", "two", *plane])
    page = (tmp_path / "p.html").read_text()
    assert page.count("<img") == 3
    assert "a &lt;b&gt;" in page
    for name in ("image 1", "text 2"):
        assert len(re.findall(rf">{name}</text>", page)) == 4  # of two models, each for wide and narrow screens
    assert page.index(">prolip<") < page.index("Uncertainty (sum of variances)") < page.index("has no Gaussians")
    with pytest.raises(SystemExit):
        main(["score", models[0], "--images", images[0], "--texts", *["x"] * 200, *plane])


def test_projection_is_that_of_principal_components_and_keeps_distances_of_gaussians() -> None:
    generator = torch.Generator().manual_seed(0)
    part = {name: torch.randn(5, 8, generator=generator) for name in ("vec", "log_var")}
    plane = project([{name: value[:2] for name, value in part.items()}, {n: v[2:] for n, v in part.items()}])
    centred = part["vec"].double().numpy() - part["vec"].double().numpy().mean(0)
    u, s, _ = np.linalg.svd(centred)
    np.testing.assert_allclose(plane.means.abs().numpy(), np.abs(u * s)[:, :2], atol=1e-9)
    axes = np.linalg.lstsq(centred, plane.means.numpy(), rcond=None)[0].T  # [2, D]
    assert plane.spread is not None
    for n in range(5):
        expected = axes @ np.diag(np.exp(part["log_var"][n].double().numpy())) @ axes.T
        np.testing.assert_allclose(plane.spread[n].numpy(), expected, atol=1e-9)
    for point in outline(plane.means[0], plane.spread[0]):
        away = torch.tensor(point).double() - plane.means[0]
        assert math.sqrt(float(away @ torch.linalg.inv(plane.spread[0]) @ away)) == pytest.approx(STDS)
