"""Images: what every kind becomes, with every decoder, and what augmentation draws."""

from __future__ import annotations

import io
import math
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kiloword.config.recipes import AugmentConfig
from kiloword.data.images import decode as decode_module
from kiloword.data.images.augmentation import EvalTransform, TrainTransform, random_box
from kiloword.data.images.decode import Decoder, check_decoder, decode, image_size
from kiloword.randomness import Draw
from kiloword.types import BadSample
from tars import encode, noise

DECODERS: tuple[Decoder, ...] = ("pillow", "opencv", "simplejpeg")


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    module = {"opencv": "cv2"}.get(request.param, request.param)
    pytest.importorskip(module if module != "pillow" else "PIL")
    return request.param


def far(a: np.ndarray, b: np.ndarray) -> int:
    """The greatest difference, in levels."""
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def reason(image: bytes, decoder: Decoder) -> str:
    with pytest.raises(BadSample) as caught:
        decode(image, decoder)
    return str(caught.value)


def outcome(image: bytes, decoder: Decoder, at_least: int | None) -> np.ndarray | str:
    """Pixels, or the reason why there are none."""
    try:
        return decode(image, decoder, at_least)
    except BadSample as error:
        return str(error)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "JPEG", "GIF"])
def test_formats_by_content(kind: str, decoder: Decoder) -> None:
    pixels = noise(40, 56)
    options: dict[str, object] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    assert far(decode(encode(pixels, kind, **options), decoder), pixels) <= {"JPEG": 4, "GIF": 160}.get(kind, 0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(kind: str, orientation: int, decoder: Decoder) -> None:
    """Against the definition: where the stored image's first row and column lie in the upright one."""
    upright = noise(24, 40)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, object] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    raw = encode(np.ascontiguousarray(stored), kind, exif=exif, **options)
    assert image_size(raw) == (40, 24)
    assert far(decode(raw, decoder), upright) <= (4 if kind == "JPEG" else 0)


def test_transparency_lies_over_white(decoder: Decoder) -> None:
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:, :2] = (200, 0, 0, 255)
    pixels[:, 2] = (200, 0, 0, 0)
    pixels[:, 3] = (0, 0, 0, 128)
    for kind, options in {"PNG": {}, "WEBP": {"lossless": True, "exact": True}}.items():
        found = decode(encode(pixels, kind, **options), decoder)
        assert found[0].tolist() == [[200, 0, 0], [200, 0, 0], [255, 255, 255], [127, 127, 127]]


def test_other_modes(decoder: Decoder) -> None:
    grey16 = np.array([[0, 257, 32896, 65535]], np.uint16)
    assert decode(encode(grey16), decoder)[0, :, 1].tolist() == [0, 1, 128, 255]
    rgb = noise(16, 16)

    def stored(image: Image.Image, kind: str, **options: object) -> np.ndarray:
        out = io.BytesIO()
        image.save(out, kind, **options)
        return decode(out.getvalue(), decoder)

    image = Image.fromarray(rgb)
    assert far(stored(image.convert("L"), "PNG"), np.asarray(image.convert("L").convert("RGB"))) == 0
    assert far(stored(image.convert("L"), "JPEG", quality=100), np.asarray(image.convert("L").convert("RGB"))) <= 2
    assert far(stored(image.quantize(64), "PNG"), np.asarray(image.quantize(64).convert("RGB"))) == 0
    assert far(stored(image.convert("CMYK"), "JPEG", quality=100), rgb) <= 6
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        found = stored(
            frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
        )
        assert far(found, np.broadcast_to(np.uint8([255, 0, 0]), (8, 8, 3))) == 0
    palette = image.quantize(4)
    palette.info["transparency"] = bytes([0, 255, 255, 255])
    assert (stored(palette, "PNG")[np.asarray(palette) == 0] == 255).all()


def test_bad_images(decoder: Decoder) -> None:
    jpeg, png = encode(noise(200, 200), "JPEG"), encode(noise(64, 64))
    assert reason(b"", decoder) == "the image has zero bytes"
    assert reason(b"hello", decoder) == "not an image in a known format"
    assert "truncated" in reason(jpeg[: len(jpeg) // 2], decoder)
    assert "truncated" in reason(png[: len(png) // 2], decoder)
    assert reason(png_header(20_000, 20_000), decoder) == "image has 400,000,000 pixels, more than 80,000,000"
    assert reason(png_header(9_200, 9_200), decoder) == "image has 84,640,000 pixels, more than 80,000,000"
    assert reason(png_header(100_000, 100_000), decoder) == "image has 10,000,000,000 pixels, more than 80,000,000"
    assert reason(png_header(8, 8), decoder)
    floats = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.float32)).save(floats, "TIFF")
    assert reason(floats.getvalue(), decoder) == "floating-point images are not supported"


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]))
def test_damaged_bytes_give_pixels_or_a_reason(data: st.DataObject, kind: str) -> None:
    raw = bytearray(encode(noise(24, 24), kind))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for decoder in DECODERS[:1] if kind == "TIFF" else DECODERS:
        found = outcome(bytes(raw), decoder, data.draw(st.sampled_from([None, 8])))
        if isinstance(found, str):
            assert 0 < len(found) <= 200
        else:
            assert (found.dtype, found.ndim, found.shape[2]) == (np.uint8, 3, 3)


def test_a_jpeg_is_decoded_no_finer_than_asked(decoder: Decoder) -> None:
    raw = encode(noise(300, 401), "JPEG", quality=95)
    for at_least, height in {None: 300, 301: 300, 151: 300, 150: 150, 75: 75, 38: 75, 37: 38, 1: 38}.items():
        pixels = decode(raw, decoder, at_least)
        assert pixels.shape == (height, math.ceil(401 * height / 300 - 0.01) if height < 300 else 401, 3)
        expected = np.asarray(Image.fromarray(noise(300, 401)).resize(pixels.shape[1::-1], Image.Resampling.BOX))
        assert far(pixels, expected) <= 24


def test_arrays_pass_through() -> None:
    pixels = noise(8, 8)
    assert decode(pixels) is pixels
    assert image_size(noise(8, 9)) == (9, 8)
    for wrong in (pixels[..., 0], pixels.astype(np.float32), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(BadSample, match=r"expected uint8 \[H, W, 3\]"):
            decode(wrong)


def test_decoders_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown decoder 'gdal'. Expected pillow, opencv or simplejpeg"):
        check_decoder("gdal")
    monkeypatch.setattr(decode_module, "_installed", lambda module: False)
    for name, package in {"opencv": "opencv-python-headless", "simplejpeg": "simplejpeg"}.items():
        with pytest.raises(ValueError, match=f"'{name}' needs {package}: pip install 'kiloword.fast.'"):
            TrainTransform(8, decoder=name)  # type: ignore[arg-type]
    EvalTransform(8)


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


def test_without_settings_training_sees_what_evaluation_sees(decoder: Decoder) -> None:
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


def test_every_choice_is_keyed_by_seed_epoch_and_row() -> None:
    augment = AugmentConfig(crop=0.5, flip=0.5, jitter=0.5, grayscale=0.3, blur=0.3)
    transform, pixels = TrainTransform(16, augment), noise(40, 40)
    seen = {d: transform(pixels, d) for d in (Draw(s, e, r) for s in range(2) for e in range(2) for r in range(5))}
    for draw, image in reversed(seen.items()):
        assert torch.equal(transform(pixels, draw), image)
    assert len({image.numpy().tobytes() for image in seen.values()}) == len(seen)


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


def test_drawn_images_are_neither_cropped_nor_mirrored() -> None:
    pixels = noise(16, 16)
    transform = TrainTransform(16, AugmentConfig(crop=0.2, flip=1), natural=False)
    assert np.array_equal(transform(pixels, Draw(0, 0, 0)).permute(1, 2, 0), pixels)


def test_no_warning_leaks(decoder: Decoder) -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x01" * 20
    palette = Image.fromarray(noise(8, 8)).quantize(4)
    palette.info["transparency"] = b"\0\xff\xff\xff"
    out = io.BytesIO()
    palette.save(out, "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(encode(noise(8, 8), "JPEG", exif=exif), decoder)
        decode(out.getvalue(), decoder)
