"""Matcher: pictures and strings in, features and scores out; a sentence for anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import kiloword
from kiloword.api import Matcher
from kiloword.checkpoint import save_model
from kiloword.data.tokenizer import Tokenizer
from kiloword.methods import preset
from kiloword.model import Model, build
from kiloword.recipes import ModelFile, sizes

CAPTIONS = ["a red circle", "two blue squares", "a green star left of a circle"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(CAPTIONS, 300)


def debug_model(method: str = "siglip") -> Model:
    config = sizes()["debug"]
    return build(config, preset(method), seed=0)


@pytest.fixture
def matcher(tokenizer: Tokenizer) -> Matcher:
    return Matcher(debug_model(), tokenizer)


def picture(seed: int, width: int = 40, height: int = 50) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save(matcher: Matcher, folder: Path, method: str = "siglip") -> Path:
    file = ModelFile(method=method, settings={}, model=matcher.model.config)
    save_model(folder, matcher.model, matcher.tokenizer, file)
    return folder


def test_pictures_paths_and_pixels_are_the_same(matcher: Matcher, tmp_path: Path) -> None:
    pictures = [picture(0), picture(1, 60, 33)]
    paths = [tmp_path / "a.png", str(tmp_path / "b.webp")]
    pictures[0].save(paths[0])
    pictures[1].save(paths[1], lossless=True)
    pixels = torch.stack([matcher.preprocess(p) for p in pictures])
    assert pixels.shape == (2, 3, 32, 32)
    assert pixels.dtype == torch.uint8
    expected = matcher.encode_image(pixels)["vec"]
    torch.testing.assert_close(matcher.encode_image(pictures)["vec"], expected)
    torch.testing.assert_close(matcher.encode_image(paths)["vec"], expected)
    torch.testing.assert_close(expected.norm(dim=1), torch.ones(2))


def test_batches_do_not_change_features(matcher: Matcher) -> None:
    pictures = [picture(i) for i in range(5)]
    torch.testing.assert_close(matcher.encode_image(pictures, batch=2), matcher.encode_image(pictures))
    torch.testing.assert_close(matcher.encode_text(CAPTIONS, batch=1), matcher.encode_text(CAPTIONS))


def test_score_takes_features_or_what_makes_them(matcher: Matcher) -> None:
    pictures = [picture(i) for i in range(4)]
    images, texts = matcher.encode_image(pictures), matcher.encode_text(CAPTIONS)
    expected = images["vec"] @ texts["vec"].T
    assert expected.shape == (4, 3)
    torch.testing.assert_close(matcher.score(images, texts), expected)
    torch.testing.assert_close(matcher.score(pictures, CAPTIONS), expected)


def test_classify_gives_probabilities_by_ensembled_prompts(matcher: Matcher) -> None:
    pictures, names = [picture(0), picture(1)], ["circle", "square"]
    probabilities = matcher.classify(pictures, names, templates=["a {c}", "one {c}."])
    rows = []
    for name in names:  # the mean of a class's unit vectors, scaled to norm 1
        mean = matcher.encode_text([f"a {name}", f"one {name}."])["vec"].mean(0)
        rows.append(mean / mean.norm())
    scale, bias = matcher.model.head.log_scale.exp(), matcher.model.head.bias
    logits = scale * matcher.encode_image(pictures)["vec"] @ torch.stack(rows).T + bias
    torch.testing.assert_close(probabilities, logits.softmax(1).detach())
    own = matcher.classify(pictures, names, {name: [f"a {name}", f"one {name}."] for name in names})
    torch.testing.assert_close(own, probabilities)


def test_a_model_in_training_stays_in_training(matcher: Matcher) -> None:
    matcher.model.train()
    features = matcher.encode_text(CAPTIONS)
    assert matcher.model.training
    assert not features["vec"].requires_grad
    with pytest.raises(ValueError):
        matcher.encode_image(torch.zeros(1, 3, 32, 32))
    assert matcher.model.training


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("a.png", "got a str: expected a list"),
        (picture(0), "expected a list"),
        ([], "no pictures"),
        ([3], "got a int as picture 0"),
        (torch.zeros(2, 3, 32, 32), "torch.float32 tensor.*expected torch.uint8"),
        (torch.zeros(3, 32, 32, dtype=torch.uint8), r"\[3, 32, 32\]: expected torch.uint8 \[I, 3, 32, 32\]"),
        (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), r"\[2, 3, 64, 64\]: expected"),
        ([Image.new("F", (8, 8))], "cannot use picture 0: floating-point"),
        (["no/such/picture.png"], "cannot read picture no/such/picture.png: No such file"),
    ],
)
def test_wrong_pictures_get_a_sentence(matcher: Matcher, images: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matcher.encode_image(images)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "message"),
    [("a dog", "got a str: expected a list"), ([], "at least one"), (["a", 1], "a int as text 1"), (3, "got a int")],
)
def test_wrong_texts_get_a_sentence(matcher: Matcher, texts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matcher.encode_text(texts)  # type: ignore[arg-type]


def test_wrong_sizes_of_batches_and_pictures_get_a_sentence(matcher: Matcher, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a batch of -1 rows"):
        matcher.encode_image([picture(0)], batch=-1)
    with pytest.raises(ValueError, match="picture size 0 is not a multiple"):
        kiloword.load(save(matcher, tmp_path), size=0)


def test_a_file_that_is_no_picture_is_named(matcher: Matcher, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"nothing like a picture")
    with pytest.raises(ValueError, match=r"bad\.png: not a picture"):
        matcher.encode_image([tmp_path / "bad.png"])


def test_transparency_and_palettes_are_read_as_files_are(matcher: Matcher, tmp_path: Path) -> None:
    layer = picture(0).convert("RGBA")
    layer.putalpha(Image.new("L", layer.size, 100))
    for i, image in enumerate([layer, picture(1).convert("P"), picture(2).convert("L")]):
        image.save(tmp_path / f"{i}.png")
        both = matcher.encode_image([image])["vec"], matcher.encode_image([tmp_path / f"{i}.png"])["vec"]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("method", ["clip", "siglip"])
def test_load_gives_the_same_scores(tokenizer: Tokenizer, tmp_path: Path, method: str) -> None:
    matcher = Matcher(debug_model(method), tokenizer)
    loaded = kiloword.load(save(matcher, tmp_path / "model", method))
    pictures = [picture(0), picture(1)]
    assert torch.equal(loaded.score(pictures, CAPTIONS), matcher.score(pictures, CAPTIONS))


def test_load_in_half_precision_stays_near(matcher: Matcher, tmp_path: Path) -> None:
    loaded = kiloword.load(save(matcher, tmp_path / "model"), dtype="bf16")
    score = loaded.score([picture(0)], CAPTIONS)
    assert score.dtype == torch.float32
    torch.testing.assert_close(score, matcher.score([picture(0)], CAPTIONS), atol=0.03, rtol=0)


def test_load_at_another_size_interpolates_positions(matcher: Matcher, tmp_path: Path) -> None:
    folder = save(matcher, tmp_path / "model")
    larger = kiloword.load(folder, size=64)
    assert larger.preprocess(picture(0)).shape == (3, 64, 64)
    smooth = Image.linear_gradient("L").convert("RGB")
    near = torch.cosine_similarity(larger.encode_image([smooth])["vec"], matcher.encode_image([smooth])["vec"])
    assert near.item() > 0.9
    assert torch.equal(larger.encode_text(CAPTIONS)["vec"], matcher.encode_text(CAPTIONS)["vec"])
    same = kiloword.load(folder, size=32)
    assert torch.equal(same.encode_image([smooth])["vec"], matcher.encode_image([smooth])["vec"])
    with pytest.raises(ValueError, match="not a multiple of the patch size"):
        kiloword.load(folder, size=50)


def test_squash_keeps_the_whole_picture(tokenizer: Tokenizer) -> None:
    wide = Image.new("RGB", (96, 32))
    wide.paste((255, 0, 0), (0, 0, 16, 32))  # a stripe that a centre crop loses
    config = sizes()["debug"]
    squashed = replace(config, preprocess=replace(config.preprocess, resize="squash"))
    assert Matcher(build(squashed, preset("clip")), tokenizer).preprocess(wide)[0].max() == 255
    assert Matcher(build(config, preset("clip")), tokenizer).preprocess(wide)[0].max() == 0
