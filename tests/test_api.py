"""Matcher: images and strings in, features and scores out; a sentence for anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import kiloword
from kiloword.api import Matcher
from kiloword.config.recipes import ModelFile, sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.models.model_folder import save_model

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


def photo(seed: int, width: int = 40, height: int = 50) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def save(matcher: Matcher, folder: Path, method: str = "siglip") -> Path:
    file = ModelFile(method=method, settings={}, model=matcher.model.config)
    save_model(folder, matcher.model, matcher.tokenizer, file)
    return folder


def test_images_paths_and_pixels_are_the_same(matcher: Matcher, tmp_path: Path) -> None:
    photos = [photo(0), photo(1, 60, 33)]
    paths = [tmp_path / "a.png", str(tmp_path / "b.webp")]
    photos[0].save(paths[0])
    photos[1].save(paths[1], lossless=True)
    pixels = torch.stack([matcher.preprocess(p) for p in photos])
    assert pixels.shape == (2, 3, 32, 32)
    assert pixels.dtype == torch.uint8
    expected = matcher.encode_image(pixels)["vec"]
    torch.testing.assert_close(matcher.encode_image(photos)["vec"], expected)
    torch.testing.assert_close(matcher.encode_image(paths)["vec"], expected)
    torch.testing.assert_close(expected.norm(dim=1), torch.ones(2))


def test_batches_do_not_change_features(matcher: Matcher) -> None:
    photos = [photo(i) for i in range(5)]
    torch.testing.assert_close(matcher.encode_image(photos, batch=2), matcher.encode_image(photos))
    torch.testing.assert_close(matcher.encode_text(CAPTIONS, batch=1), matcher.encode_text(CAPTIONS))


def test_the_package_lists_what_it_offers() -> None:
    assert {"load", "Matcher"} <= set(dir(kiloword))


def test_templates_as_open_clip_writes_them(matcher: Matcher) -> None:
    written, functions = ["a {c}", "one {c}."], [lambda c: f"a {c}", lambda c: f"one {c}."]
    expected = matcher.classify([photo(0)], ["circle", "square"], written)
    torch.testing.assert_close(matcher.classify([photo(0)], ["circle", "square"], functions), expected)  # type: ignore[arg-type]


def test_scores_that_are_no_numbers_are_named(matcher: Matcher) -> None:
    features = matcher.encode_text(["a star", "a circle"])
    vec = matcher.encode_text(["a star"])["vec"].clone()
    vec[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the score of image 0 with text 0 is nan"):
        matcher.score({**features, "vec": vec}, features)
    with pytest.raises(ValueError, match="the score of image 1 with text 1 is nan"):
        matcher.score_pairs(features, {**features, "vec": torch.cat([features["vec"][:1], vec])})


def test_features_that_lack_what_a_model_compares_are_refused(tokenizer: Tokenizer) -> None:
    matcher = Matcher(debug_model("prolip"), tokenizer)
    texts = matcher.encode_text(CAPTIONS)
    with pytest.raises(ValueError, match="the features lack 'log_var', which this model compares: pass all of"):
        matcher.score({"vec": texts["vec"]}, texts)
    with pytest.raises(ValueError, match="the features lack 'log_var'"):
        matcher.score_pairs({"vec": texts["vec"]}, texts)


def test_score_takes_features_or_what_makes_them(matcher: Matcher) -> None:
    photos = [photo(i) for i in range(4)]
    images, texts = matcher.encode_image(photos), matcher.encode_text(CAPTIONS)
    expected = images["vec"] @ texts["vec"].T
    assert expected.shape == (4, 3)
    torch.testing.assert_close(matcher.score(images, texts), expected)
    torch.testing.assert_close(matcher.score(photos, CAPTIONS), expected)


def test_classify_gives_probabilities_by_ensembled_prompts(matcher: Matcher) -> None:
    photos, names = [photo(0), photo(1)], ["circle", "square"]
    probabilities = matcher.classify(photos, names, templates=["a {c}", "one {c}."])
    rows = []
    for name in names:  # the mean of a class's unit vectors, scaled to norm 1
        mean = matcher.encode_text([f"a {name}", f"one {name}."])["vec"].mean(0)
        rows.append(mean / mean.norm())
    scale, bias = matcher.model.head.log_scale.exp(), matcher.model.head.bias
    logits = scale * matcher.encode_image(photos)["vec"] @ torch.stack(rows).T + bias
    torch.testing.assert_close(probabilities, logits.softmax(1).detach())
    own = matcher.classify(photos, names, {name: [f"a {name}", f"one {name}."] for name in names})
    torch.testing.assert_close(own, probabilities)


def test_a_model_in_training_stays_in_training(matcher: Matcher) -> None:
    matcher.model.train()
    features = matcher.encode_text(CAPTIONS)
    assert matcher.model.training
    assert not features["vec"].requires_grad
    with pytest.raises(ValueError, match="got an int"):
        matcher.encode_image([3])  # type: ignore[list-item]
    assert matcher.model.training


def test_arrays_and_tensors_are_images_too(matcher: Matcher) -> None:
    images = [photo(0), photo(1, 60, 33)]
    arrays = [np.asarray(image) for image in images]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]
    floats = [tensors[0].float() / 255, tensors[1].double() / 255]
    expected = matcher.encode_image(images)["vec"]
    for several in (arrays, tensors, floats, [arrays[0], floats[1]], tuple(images)):
        assert torch.equal(matcher.encode_image(several)["vec"], expected)
    one = matcher.encode_image(images[:1])["vec"]
    for stack in (arrays[0][None], tensors[0][None], floats[0][None]):
        assert torch.equal(matcher.encode_image(stack)["vec"], one)
    assert torch.equal(matcher.preprocess(floats[0]), matcher.preprocess(images[0]))


def test_features_of_one_item_have_no_leading_dimension(matcher: Matcher, tmp_path: Path) -> None:
    image = photo(0)
    image.save(tmp_path / "a.png")
    expected = matcher.encode_image([image])["vec"]
    assert expected.shape == (1, 16)
    pixels = torch.from_numpy(np.asarray(image).copy())
    for one in (image, tmp_path / "a.png", str(tmp_path / "a.png"), pixels.numpy(), pixels.permute(2, 0, 1) / 255):
        assert torch.equal(matcher.encode_image(one)["vec"], expected[0])
    assert torch.equal(matcher.encode_text(CAPTIONS[0])["vec"], matcher.encode_text(CAPTIONS[:1])["vec"][0])


def test_all_else_takes_one_item_as_a_list_of_one(tokenizer: Tokenizer) -> None:
    image, caption = photo(0), CAPTIONS[0]
    for method in ("llip", "prolip"):
        matcher = Matcher(debug_model(method), tokenizer)
        score = matcher.score([image], CAPTIONS)
        torch.testing.assert_close(matcher.score(image, CAPTIONS), score)
        one, texts = matcher.encode_image(image), matcher.encode_text(CAPTIONS)
        torch.testing.assert_close(matcher.score(one, texts), score)
        torch.testing.assert_close(matcher.score(image, caption), score[:, :1])
        text = matcher.encode_text(caption)
        torch.testing.assert_close(matcher.score_pairs(one, text), score[0, :1])
        torch.testing.assert_close(matcher.classify(image, ["a", "b"]), matcher.classify([image], ["a", "b"]))
        torch.testing.assert_close(matcher.explain(image, caption).maps, matcher.explain([image], [caption]).maps)
        assert matcher.pixels(image).shape == (1, 3, 32, 32)
    for value in (matcher.distance(one, texts), matcher.inclusion(one, texts), matcher.includes(one, texts)):
        assert value.shape == (1, 3)
    assert matcher.uncertainty(text).shape == (1,)


def test_a_matcher_says_what_it_is(tokenizer: Tokenizer) -> None:
    model = debug_model("sycoca")
    said = repr(Matcher(model, tokenizer, preset("sycoca")))
    count = sum(p.numel() for p in model.parameters())
    for part in ("sycoca", "32 x 2 / 2", "32 pixels", "32 tokens", "text decoder", f"{count / 1e6:.2f} M", "cpu"):
        assert part in said, part
    assert "unknown method" in repr(Matcher(model, tokenizer))
    assert "\n" not in said


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (3, "got an int as images: expected a Pillow image, a path"),
        (iter([photo(0)]), "or a list of these"),
        ([], "no images"),
        (torch.zeros(0, 3, 32, 32), "no images"),
        ([photo(0), 3], "got an int as image 1: expected a Pillow image, a path"),
        (
            torch.zeros(3, 32, 32) + 1.5,
            r"image 0 is a torch.float32 tensor with values from 1.5 to 1.5: expected 0 to 1",
        ),
        ([torch.full((3, 8, 8), -0.1)], "values from -0.1 to -0.1"),
        (torch.full((3, 8, 8), torch.nan), "values from nan to nan"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), r"image 0 is a torch.int64 tensor \[3, 8, 8\]: expected"),
        (torch.zeros(8, 8, 3), r"torch.float32 tensor \[8, 8, 3\]: expected .* a tensor \[3, H, W\]"),
        (torch.zeros(1, 1, 8, 8), r"image 0 is a torch.float32 tensor \[1, 8, 8\]"),
        (np.zeros((8, 8, 3), np.int32), r"image 0 is a int32 array \[8, 8, 3\]: expected .* an array \[H, W, 3\]"),
        (np.full((8, 8, 3), 255.0), "image 0 is a float64 array with values from 255 to 255: expected 0 to 1"),
        (b"nothing like an image", "image 0 cannot be used: not an image"),
        ([b""], "image 0 cannot be used: "),
        ("https://name:pw@example.org/a.jpg", "https://example.org/a.jpg is an address, which is not fetched"),
        ([np.zeros((3, 8, 8), np.uint8)], r"image 0 is a uint8 array \[3, 8, 8\]"),
        (np.zeros((8, 8), np.uint8), r"image 0 is a uint8 array \[8, 8\]"),
        (np.zeros((0, 8, 3), np.uint8), r"uint8 array \[0, 8, 3\]"),
        ([Image.new("F", (8, 8))], "image 0 cannot be used: floating-point"),
        (["no/such/image.png"], "image no/such/image.png cannot be read: No such file"),
        (Path(__file__).parent, "Is a directory"),
    ],
)
def test_wrong_images_get_a_sentence(matcher: Matcher, images: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matcher.encode_image(images)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "message"), [([], "texts is an empty list"), (["a", 1], "an int as text 1"), (3, "got an int: expected")]
)
def test_wrong_texts_get_a_sentence(matcher: Matcher, texts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matcher.encode_text(texts)  # type: ignore[arg-type]


def test_wrong_sizes_of_batches_and_images_get_a_sentence(matcher: Matcher, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the batch size is -1"):
        matcher.encode_image([photo(0)], batch=-1)
    with pytest.raises(ValueError, match="image size 0 is below"):
        kiloword.load(save(matcher, tmp_path), size=0)


def test_a_file_that_is_no_image_is_named(matcher: Matcher, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"nothing like an image")
    with pytest.raises(ValueError, match=r"bad\.png cannot be used: not an image"):
        matcher.encode_image([tmp_path / "bad.png"])


def test_transparency_and_palettes_are_read_as_files_are(matcher: Matcher, tmp_path: Path) -> None:
    layer = photo(0).convert("RGBA")
    layer.putalpha(Image.new("L", layer.size, 100))
    for i, image in enumerate([layer, photo(1).convert("P"), photo(2).convert("L")]):
        image.save(tmp_path / f"{i}.png")
        both = matcher.encode_image([image])["vec"], matcher.encode_image([tmp_path / f"{i}.png"])["vec"]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("method", ["clip", "siglip"])
def test_load_gives_the_same_scores(tokenizer: Tokenizer, tmp_path: Path, method: str) -> None:
    matcher = Matcher(debug_model(method), tokenizer)
    loaded = kiloword.load(save(matcher, tmp_path / "model", method))
    photos = [photo(0), photo(1)]
    assert torch.equal(loaded.score(photos, CAPTIONS), matcher.score(photos, CAPTIONS))


def test_load_in_half_precision_stays_near(matcher: Matcher, tmp_path: Path) -> None:
    loaded = kiloword.load(save(matcher, tmp_path / "model"), dtype="bf16")
    score = loaded.score([photo(0)], CAPTIONS)
    assert score.dtype == torch.float32
    torch.testing.assert_close(score, matcher.score([photo(0)], CAPTIONS), atol=0.03, rtol=0)


def test_load_at_another_size_interpolates_positions(matcher: Matcher, tmp_path: Path) -> None:
    folder = save(matcher, tmp_path / "model")
    larger = kiloword.load(folder, size=64)
    assert larger.preprocess(photo(0)).shape == (3, 64, 64)
    smooth = Image.linear_gradient("L").convert("RGB")
    near = torch.cosine_similarity(larger.encode_image([smooth])["vec"], matcher.encode_image([smooth])["vec"])
    assert near.item() > 0.9
    assert torch.equal(larger.encode_text(CAPTIONS)["vec"], matcher.encode_text(CAPTIONS)["vec"])
    same = kiloword.load(folder, size=32)
    assert torch.equal(same.encode_image([smooth])["vec"], matcher.encode_image([smooth])["vec"])
    with pytest.raises(ValueError, match="below the patch size"):
        kiloword.load(folder, size=5)


def test_squash_keeps_the_whole_image(tokenizer: Tokenizer) -> None:
    wide = Image.new("RGB", (96, 32))
    wide.paste((255, 0, 0), (0, 0, 16, 32))  # a stripe that a centre crop loses
    config = sizes()["debug"]
    squashed = replace(config, preprocess=replace(config.preprocess, resize="squash"))
    assert Matcher(build(squashed, preset("clip")), tokenizer).preprocess(wide)[0].max() == 255
    assert Matcher(build(config, preset("clip")), tokenizer).preprocess(wide)[0].max() == 0
