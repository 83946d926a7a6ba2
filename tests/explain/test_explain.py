"""Looking inside: attention maps against the tower's own attention, maps with known answers, figures and files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from torch import Tensor

from kiloword.api import Matcher
from kiloword.cli.main import main
from kiloword.config.recipes import HeadConfig, ImageConfig, ModelConfig, ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.explain.maps import Explanation, attentions, probabilities, rollout, token_maps
from kiloword.explain.sheets import TOP, _large, file_names, write
from kiloword.methods.registry import preset
from kiloword.model.heads import Pooling, Single
from kiloword.models.build import build
from kiloword.models.model_folder import save_model
from kiloword.report.overlay import SIDE, SMALL, Row, TokenMap, figure, overlay, square, wrap
from kiloword.types import Features
from noise import noise, noise_file
from sheets import holds

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


def test_what_a_patch_adds_is_what_the_cosine_loses_without_it() -> None:
    """Mean pooling, to first order: the pooled vector without one patch's part, at the same length."""
    model = matcher("mean")
    found = model.explain(pixels(1), CAPTIONS)
    pooling = model.model.head.pooling
    with torch.no_grad():
        tokens = model.model.encode_image(pixels(1))[0]
        whole = pooling.project_image_tokens(tokens[0, 3:].mean(0))
        less = pooling.project_image_tokens(tokens[0, 3:].mean(0) - tokens[0, 3 + 4] / 9)
        lost = model.encode_text(CAPTIONS)["vec"] @ (whole - less) / whole.norm()
    torch.testing.assert_close(found.maps[0, :, 4], lost)


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


def test_look_of_attention_pooling_is_what_it_pools_by() -> None:
    pooling = matcher("map").model.head.pooling
    probe = pooling.image_pool.map
    patches = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        probe.kv.weight[32:] = torch.eye(32)  # values are the patches, and
        probe.kv.bias.zero_()
        probe.kv.weight[:32] = torch.cat([probe.kv.weight[:16]] * 2)  # both heads look alike
        probe.q.weight[16:] = probe.q.weight[:16]
        probe.q.bias.zero_()
        probe.out.weight.copy_(torch.eye(32))
        probe.out.bias.zero_()
        probe.mlp.proj.weight.zero_()
        probe.mlp.proj.bias.zero_()
        torch.testing.assert_close(probe.look(patches) @ patches[0], probe(patches))


def test_overlay_glows_where_the_map_is_high_and_not_without_preference() -> None:
    grey = np.full((64, 64, 3), 120, np.uint8)
    one = np.zeros((4, 4))
    one[0, 3] = 1.0
    lit = np.asarray(overlay(grey, one, 64)).astype(int)
    assert lit[6, 58, 0] - lit[6, 58, 2] > 30  # orange
    assert np.ptp(lit[40, 10]) == 0  # grey
    quarter = np.zeros((8, 8))
    quarter[2:6, 2:6] = 1.0
    between = np.asarray(overlay(grey, quarter, 64))  # resized, it is more than 1 within its edge, less than 0 outside
    assert (between.min((0, 1)).tolist(), between.max((0, 1)).tolist()) == ([136, 133, 48], [208, 136, 136])
    flat = np.asarray(overlay(grey, np.full((4, 4), 1 / 16), 64)).astype(int)
    assert np.ptp(flat[32, 32]) == 0
    slight = np.asarray(overlay(grey, np.full((4, 4), 1.0) + 0.2 * one, 64)).astype(int)
    assert 0 < np.ptp(slight[6, 58]) < np.ptp(lit[6, 58]) / 5
    against = np.asarray(overlay(grey, -one, 64)).astype(int)
    assert np.ptp(against[6, 58]) == 0


def test_figure_has_room_for_all(tmp_path: Path) -> None:
    grey = np.full((64, 64, 3), 120, np.uint8)
    plain = figure(grey, "a.png", "about", [Row("a dog", "score 0.1", np.ones((2, 2)))])
    token = TokenMap("token 0", 1.0, np.ones((2, 2)))
    rows = [Row("a dog " * 90, "score 0.1", np.ones((2, 2)), [token] * 4, np.ones((8, n)) / n) for n in (1, 3, 500)]
    full = figure(grey, "x" * 300, "about " * 200, rows)
    assert full.width > plain.width >= 640
    assert full.height > 3 * 240
    assert max(len(line) for line in wrap("w" * 200 + " word", ImageFont.load_default(14), 80, 3)) < 20


def test_files_of_score_explain(tmp_path: Path) -> None:
    images = [noise_file(tmp_path / "a.jpg"), noise_file(tmp_path / "b" / "a.png", 30, 90)]
    lines = write(tmp_path / "deep" / "out", matcher(mixed=3), images, CAPTIONS[:1])
    document = json.loads((tmp_path / "deep" / "out" / "weights.json").read_text())
    assert document["tokens"] == ["class token", "token 1", "token 2"]
    assert [p["figure"] for p in document["images"]] == ["a.png", "a-2.png"]
    for shown in document["images"]:
        with Image.open(tmp_path / "deep" / "out" / shown["figure"]) as png:
            assert png.format == "PNG"
            assert 800 < png.width < 2400
        (pair,) = shown["texts"]
        weights = np.array(pair["weights"])
        assert weights.shape == (2, 3)
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
        assert [t["share"] for t in pair["top"]] == pytest.approx(sorted(weights.mean(0), reverse=True)[:TOP])
        assert pair["top"][0]["place"] == weights.mean(0).argmax()
        assert any(f"entropy {pair['entropy']:.2f}" in line for line in lines)


def test_figures_hold_the_image_and_the_maps_of_every_text(tmp_path: Path) -> None:
    model, path = matcher(mixed=3), noise_file(tmp_path / "a.jpg", 300, 300)
    write(tmp_path / "out", model, [path], CAPTIONS[:2])
    found, large = model.explain(path, CAPTIONS[:2]), _large(model, path)
    assert found.tokens is not None
    with Image.open(tmp_path / "out" / "a.png") as png:
        sheet = png.convert("RGB")
    assert holds(sheet, square(large, 130))
    texts = json.loads((tmp_path / "out" / "weights.json").read_text())["images"][0]["texts"]
    for t, text in enumerate(texts):
        assert holds(sheet, overlay(large, found.maps[0, t].view(found.grid).numpy(), SIDE))
        for one in text["top"]:
            looks = found.tokens[0, one["place"]].view(found.grid).numpy()
            assert holds(sheet, overlay(large, looks, SMALL))
    assert not holds(sheet, overlay(large, np.arange(9.0).reshape(3, 3), SIDE))


def test_patches_that_are_mixed_are_named_by_their_place(tmp_path: Path) -> None:
    write(tmp_path, matcher(mixed=12), [noise_file(tmp_path / "a.jpg")], CAPTIONS)
    names = json.loads((tmp_path / "weights.json").read_text())["tokens"]
    assert len(names) == 12
    assert names[3:5] == ["patch 0, 0", "patch 0, 1"]
    assert names[-1] == "patch 2, 2"


def test_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = matcher("max")
    file = ModelFile(method="siglip", settings={}, model=model.model.config)
    save_model(tmp_path / "model", model.model, model.tokenizer, file)
    shown = ["--images", str(noise_file(tmp_path / "a.jpg")), "--texts", "a red circle"]
    main(["score", str(tmp_path / "model"), *shown, "--explain", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "What each patch adds to the score." in said
    assert (tmp_path / "out" / "a.png").exists()
    assert "weights" not in json.loads((tmp_path / "out" / "weights.json").read_text())["images"][0]["texts"][0]
    with pytest.raises(SystemExit):
        main(["score", str(tmp_path / "model"), *shown, "--explain", str(tmp_path / "a.jpg")])
    assert "is a file. Expected a folder" in capsys.readouterr().err


def test_a_image_is_never_overwritten(tmp_path: Path) -> None:
    photo = noise_file(tmp_path / "a.png")
    before = photo.read_bytes()
    with pytest.raises(ValueError, match=r"over the image .*a\.png: choose another folder"):
        write(tmp_path / "x" / "..", matcher(), [noise_file(tmp_path / "b.jpg"), photo], CAPTIONS)
    assert photo.read_bytes() == before
    assert not (tmp_path / "b.png").exists()


def test_file_names_are_unique() -> None:
    assert file_names([Path("x/a.png"), Path("y/a.jpg"), Path("a-2.png")]) == ["a.png", "a-2.png", "a-2-2.png"]
