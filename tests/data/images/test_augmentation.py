"""What evaluation and training see of an image, against Pillow's and torchvision's calls, and what is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kiloword.config.recipes import AugmentConfig
from kiloword.data.images.augmentation import EvalTransform, TrainTransform, random_box
from kiloword.data.images.decode import Decoder
from kiloword.interop.open_clip_config import torchvision_ready
from kiloword.randomness import Draw
from tars import encode, far, noise


def literal_eval(image: Image.Image, size: int) -> np.ndarray:
    """The field's evaluation transform in Pillow calls: Resize(size, bicubic), CenterCrop(size)."""
    short, long = sorted(image.size)
    other = int(size * long / short)
    scaled = (size, other) if image.width <= image.height else (other, size)
    resized = image.resize(scaled, Image.Resampling.BICUBIC)
    left, top = round((scaled[0] - size) / 2), round((scaled[1] - size) / 2)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 90), height=st.integers(1, 90), size=st.sampled_from([8, 17, 32]))
def test_evaluation_equals_pillow(width: int, height: int, size: int) -> None:
    pixels = noise(height, width)
    found = EvalTransform(size)(encode(pixels))
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.uint8, (3, size, size), True)
    assert np.array_equal(found.permute(1, 2, 0), literal_eval(Image.fromarray(pixels), size))
    squashed = np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
    assert np.array_equal(EvalTransform(size, "squash")(pixels).permute(1, 2, 0), squashed)


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
def test_without_settings_training_sees_what_evaluation_sees(decoder: Decoder) -> None:
    pytest.importorskip({"pillow": "PIL"}.get(decoder, decoder))
    for height, width in ((40, 56), (57, 31), (32, 32)):
        raw = encode(noise(height, width))
        for resize in ("shortest", "squash"):
            train = TrainTransform(32, resize=resize, decoder=decoder)(raw, Draw(0, 0, 0))
            assert (
                far(train.numpy(), EvalTransform(32, resize)(raw).numpy()) <= 6
            )  # the centre is placed by half pixels


def test_crop_equals_pillow_to_one_level() -> None:
    augment = AugmentConfig(crop=0.3)
    for row in range(20):
        pixels, draw = noise(75, 100, row), Draw(1, 2, row)
        left, top, wide, high = random_box(100, 75, augment, draw)
        box = (round(left * 100), round(top * 75), round((left + wide) * 100), round((top + high) * 75))
        expected = Image.fromarray(pixels).crop(box).resize((32, 32), Image.Resampling.BICUBIC)
        found = TrainTransform(32, augment)(pixels, draw).permute(1, 2, 0).numpy()
        assert far(found, np.asarray(expected)) <= 1


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 2000), height=st.integers(1, 2000), row=st.integers(0, 1000), crop=st.floats(0.05, 1))
def test_boxes_lie_inside_and_keep_their_ratio(width: int, height: int, row: int, crop: float) -> None:
    left, top, wide, high = random_box(width, height, AugmentConfig(crop=crop, ratio=4 / 3), Draw(0, 0, row))
    assert min(left, top) >= 0
    assert max(left + wide, top + high) <= 1 + 1e-9
    assert wide * width >= 1 - 1e-9 or height * 4 / 3 < 1
    if min(width, height) > 100:
        assert 0.74 < wide * width / (high * height) < 1.35


def test_crop_areas_are_uniform() -> None:
    augment = AugmentConfig(crop=0.2)
    boxes = [random_box(1000, 1000, augment, Draw(0, 0, row)) for row in range(2000)]
    areas = np.array([wide * high for *_, wide, high in boxes if wide * high <= 0.75])  # all ratios fit up to 3/4
    assert abs(areas.mean() - 0.475) < 0.015
    assert areas.min() >= 0.199
    ratios = np.log([wide / high for *_, wide, high in boxes if wide * high <= 0.75])
    assert abs(ratios.mean()) < 0.02
    assert ratios.std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), abs=0.01)


def test_each_setting_does_what_it_says() -> None:
    pixels, draws = noise(16, 16), [Draw(0, 0, row) for row in range(400)]
    plain = TrainTransform(16)(pixels, draws[0])
    assert np.array_equal(plain.permute(1, 2, 0), pixels)

    def share(predicate: object, **settings: object) -> float:
        transform = TrainTransform(16, AugmentConfig(**settings))  # type: ignore[arg-type]
        return sum(predicate(transform(pixels, d)) for d in draws) / len(draws)  # type: ignore[operator]

    assert share(lambda x: torch.equal(x, plain.flip(-1)), flip=0.3) == pytest.approx(0.3, abs=0.06)
    assert share(lambda x: torch.equal(x[0], x[1]) and torch.equal(x[1], x[2]), grayscale=0.3) == pytest.approx(
        0.3, abs=0.06
    )
    assert share(lambda x: not torch.equal(x, plain), jitter=0.3) == pytest.approx(0.3, abs=0.06)
    still = (0.0, 0.0, 0.0, 0.0)
    assert share(lambda x: far(x.numpy(), plain.numpy()) <= 6, jitter=1, jitter_strength=still) == 1  # HSV rounds
    rough = plain.float().diff(dim=-1).abs().mean()
    assert share(lambda x: bool(x.float().diff(dim=-1).abs().mean() < rough), blur=1, blur_sigma=(1, 2)) == 1


@pytest.mark.parametrize(("width", "height"), [(90, 61), (61, 90), (64, 64), (500, 40)])
def test_torchvisions_resize_and_centre_crop(width: int, height: int) -> None:
    torchvision_ready()
    transforms = pytest.importorskip("torchvision.transforms", reason="torchvision is not installed")
    pixels = noise(height, width)
    resize = transforms.Resize(64, transforms.InterpolationMode.BICUBIC)
    both = transforms.Compose([resize, transforms.CenterCrop(56), transforms.PILToTensor()])
    assert torch.equal(EvalTransform(56, 64)(pixels), both(Image.fromarray(pixels)))


def test_training_without_a_random_crop_sees_the_same_part() -> None:
    drawn = TrainTransform(16, AugmentConfig(crop=0.2, flip=1), natural=False)(noise(16, 16), Draw(0, 0, 0))
    assert np.array_equal(drawn.permute(1, 2, 0), noise(16, 16)), "drawn images are neither cropped nor mirrored"
    pixels, draw = np.zeros((64, 128, 3), dtype=np.uint8), Draw(0, 0, 0)
    pixels[4:60, 36:92] = 255  # what a crop of 56 from 64 sees
    assert bool((EvalTransform(56, 64)(pixels) == 255).all())
    assert bool((TrainTransform(56, AugmentConfig(), 64)(pixels, draw) == 255).all())
    assert not bool((TrainTransform(56, AugmentConfig())(pixels, draw) == 255).all())
    squashed = TrainTransform(56, AugmentConfig(), "squash")(pixels, draw)
    assert [int(squashed[:, :, x].max()) for x in (0, 27, -1)] == [0, 255, 0], "the whole image"
    with pytest.raises(ValueError, match=r"resize 200 .* 224"):
        EvalTransform(224, resize=200)
