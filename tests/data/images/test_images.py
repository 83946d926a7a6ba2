"""Images: every kind by every decoder, and what evaluation and training see of them, against Pillow and torchvision."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from kiloword.config.recipes import AugmentConfig
from kiloword.data.images.augmentation import EvalTransform, TrainTransform, random_box
from kiloword.data.images.decode import Decoder, decode, image_size
from kiloword.model.trunks.libraries import torchvision_ready
from kiloword.randomness import Draw
from kiloword.types import BadSample
from tars import encode, far, noise

DECODERS: tuple[Decoder, ...] = ("pillow", "simplejpeg")
HIGH, WIDE = 40, 60
Expected = np.ndarray | str


def outcome(image: bytes, decoder: Decoder = "pillow", at_least: int | None = None) -> Expected:
    """Pixels, or the reason why there are none."""
    pytest.importorskip({"pillow": "PIL"}.get(decoder, decoder))
    try:
        return decode(image, decoder, at_least)
    except BadSample as error:
        return str(error)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(rows: np.ndarray, depth: int, colour: int, first: bytes = b"", last: bytes = b"") -> bytes:
    """A PNG from rows of bytes [H, n]; `first` and `last` are chunks around the pixels."""
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    header = struct.pack(">IIBBBBB", rows.shape[1] * 8 // bits, rows.shape[0], depth, colour, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    parts = chunk(b"IHDR", header) + first + chunk(b"IDAT", pixels) + last + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def bytes_of(pixels: np.ndarray) -> np.ndarray:
    """Rows of big-endian bytes."""
    return np.ascontiguousarray(pixels.astype(pixels.dtype.newbyteorder(">"))).view(np.uint8).reshape(len(pixels), -1)


def over_white(rgba: np.ndarray) -> np.ndarray:
    """By the definition of "over", [H, W, 4] to [H, W, 3]."""
    alpha = rgba[..., 3:].astype(float) / 255
    return np.round(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8)


def orientation(value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif.tobytes()


def segment(kind: int, body: bytes) -> bytes:
    return bytes([0xFF, kind]) + struct.pack(">H", len(body) + 2) + body


def scans(count: int, image: Image.Image) -> bytes:
    """A progressive JPEG of so many scans: its last one over and over."""
    jpeg = saved(image, "JPEG", progressive=True)
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * (count - jpeg.count(b"\xff\xda")) + b"\xff\xd9"


@cache
def kinds() -> dict[str, tuple[bytes, Expected, int]]:
    """Name: bytes, expected pixels (or part of the reason), levels they may be off."""
    pixels = noise(HIGH, WIDE)
    rgb, rng = Image.fromarray(pixels), np.random.default_rng(0)
    grey, frames = np.asarray(rgb.convert("L")), [Image.fromarray(noise(HIGH, WIDE, seed)) for seed in (1, 2)]
    flat = np.repeat(grey[..., None], 3, 2)
    alpha = np.dstack([pixels, rng.integers(0, 256, (HIGH, WIDE), np.uint8)])
    wide16 = rng.integers(0, 65536, (HIGH, WIDE, 3), np.uint16)
    grey16 = (np.arange(HIGH * WIDE).reshape(HIGH, WIDE) * 27).astype(np.uint16)
    scaled = np.repeat(np.round(grey16 / 257).astype(np.uint8)[..., None], 3, 2)
    palette = rgb.quantize(64)
    coloured, black = np.asarray(palette.convert("RGB")), np.asarray(rgb.convert("1").convert("RGB"))
    holed = np.where((np.asarray(palette) == 3)[..., None], 255, coloured).astype(np.uint8)
    jpeg = saved(rgb, "JPEG", quality=100, subsampling=0)
    anim: dict[str, object] = {"save_all": True, "append_images": frames}
    unknown, film = "not an image in a known format", b"\xff\xda\0\x08" * 5000
    profile = b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes([n, 255]) + bytes(1000)) for n in range(1, 256))
    return {
        "JPEG": (jpeg, pixels, 4),
        "JPEG, lossless (SOF3)": (jpeg.replace(b"\xff\xc0", b"\xff\xc3", 1), "cannot be decoded", 0),
        "JPEG, RGB inside": (saved(rgb, "JPEG", quality=100, keep_rgb=True, subsampling=0), pixels, 4),
        "JPEG, grey": (saved(rgb.convert("L"), "JPEG", quality=100), flat, 4),
        "JPEG, CMYK (Adobe, inverted)": (saved(rgb.convert("CMYK"), "JPEG", quality=100), pixels, 6),
        "JPEG, a film behind": (jpeg + film * 20, pixels, 4),
        "JPEG, thumbnails": (jpeg[:20] + segment(0xE1, film) * 4 + jpeg[20:], pixels, 4),
        "JPEG, colour profile": (jpeg[:20] + profile + jpeg[20:], pixels, 4),
        "JPEG, cut": (jpeg[: len(jpeg) // 2], "truncated", 0),
        "JPEG, 101 scans": (scans(101, rgb), "more than 100 scans", 0),
        "MPO (two JPEGs)": (saved(rgb, "MPO", quality=100, subsampling=0, **anim), pixels, 4),
        "PNG, gamma": (png(bytes_of(pixels), 8, 2, chunk(b"gAMA", struct.pack(">I", 100000))), pixels, 0),
        "PNG, grey and alpha": (
            png(bytes_of(np.dstack([grey, alpha[..., 3]])), 8, 4), over_white(np.dstack([flat, alpha[..., 3]])), 1),
        "PNG, 1 bit": (saved(rgb.convert("1"), "PNG"), black, 0),
        "PNG, 16-bit grey": (encode(grey16), scaled, 0),
        "PNG, 16-bit colour": (png(bytes_of(wide16), 16, 2), (wide16 >> 8).astype(np.uint8), 0),
        "PNG, alpha": (saved(Image.fromarray(alpha), "PNG"), over_white(alpha), 1),
        "PNG, palette": (saved(palette, "PNG"), coloured, 0),
        "PNG, palette with a hole": (saved(palette, "PNG", transparency=3), holed, 0),
        "PNG, one colour transparent": (png(bytes_of(pixels), 8, 2, chunk(b"tRNS", struct.pack(">3H", *pixels[0, 0]))),
            np.where((pixels == pixels[0, 0]).all(-1, keepdims=True), 255, pixels), 0),
        "PNG, orientation behind the pixels": (
            png(bytes_of(pixels), 8, 2, last=chunk(b"eXIf", orientation(6)[6:])), np.rot90(pixels, -1), 0),
        "PNG, animated": (saved(rgb, "PNG", **anim), pixels, 0),
        "WebP, alpha": (saved(Image.fromarray(alpha), "WEBP", lossless=True, exact=True), over_white(alpha), 1),
        "WebP, animated": (saved(rgb, "WEBP", lossless=True, **anim), pixels, 0),
        "GIF, animated": (saved(palette, "GIF", **anim), coloured, 0),
        "TIFF, 16-bit grey": (saved(Image.fromarray(grey16), "TIFF"), scaled, 0),
        "TIFF, floating point": (saved(rgb.convert("F"), "TIFF"), "floating-point images are not supported", 0),
        "EPS (starts other programs)": (b"%!PS-Adobe-3.0 EPSF-3.0\n", unknown, 0),
    }  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", kinds())
def test_what_becomes_of_every_kind(kind: str, decoder: Decoder) -> None:
    raw, expected, levels = kinds()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = outcome(raw, decoder)
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray), found
        assert far(found, expected) <= levels
        assert image_size(raw) == (expected.shape[1], expected.shape[0])
    else:
        assert isinstance(found, str)
        assert expected in found


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation(kind: str, decoder: Decoder) -> None:
    """Against the definition: where the stored image's first row and column lie in the upright one."""
    upright = noise(24, 40)
    stored = {
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }
    options: dict[str, object] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    for value in (*range(10), 65535):
        pixels = np.ascontiguousarray(stored.get(value, upright))
        raw = encode(pixels, kind, exif=orientation(value), **options)
        assert image_size(raw) == (40, 24)
        found = outcome(raw, decoder)
        assert isinstance(found, np.ndarray)
        assert far(found, upright) <= (4 if kind == "JPEG" else 0), value


@pytest.mark.parametrize("shape", [(1, 1), (1, 65_000), (3, 20_000)])
def test_an_image_of_one_line(shape: tuple[int, int]) -> None:
    """Resized whole, 1 x 65,000 pixels would take 51 GB at 512 a side."""
    raw, draw = encode(noise(*shape)), Draw(0, 0, 0)
    for found in (EvalTransform(512)(raw), EvalTransform(512, "squash")(raw), TrainTransform(512)(raw, draw)):
        assert found.shape == (3, 512, 512)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_jpeg_is_decoded_no_finer_than_asked(decoder: Decoder) -> None:
    raw = encode(noise(300, 401), "JPEG", quality=95)
    for at_least, factor in {None: 1, 301: 1, 151: 1, 150: 2, 75: 4, 38: 4, 37: 8, 1: 8, 0: 8}.items():
        found = outcome(raw, decoder, at_least)
        assert isinstance(found, np.ndarray)
        assert found.shape == (-(-300 // factor), -(-401 // factor), 3)
        expected = np.asarray(Image.fromarray(noise(300, 401)).resize(found.shape[1::-1], Image.Resampling.BOX))
        assert far(found, expected) <= 24
    assert decode(encode(noise(30, 40)), at_least=1).shape == (30, 40, 3), "a PNG is decoded whole"


def test_arrays_that_are_no_images() -> None:
    for wrong in (noise(8, 9)[..., 0], noise(8, 9).astype(np.float32), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(BadSample, match=r"uint8 \[H, W, 3\]"):
            decode(wrong)


# What evaluation and training see


def literal_eval(image: Image.Image, size: int) -> np.ndarray:
    """The field's evaluation transform in Pillow calls: Resize(size, bicubic), CenterCrop(size)."""
    short, long = sorted(image.size)
    other = int(size * long / short)
    scaled = (size, other) if image.width <= image.height else (other, size)
    resized = image.resize(scaled, Image.Resampling.BICUBIC)
    left, top = round((scaled[0] - size) / 2), round((scaled[1] - size) / 2)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


@given(width=st.integers(1, 90), height=st.integers(1, 90), size=st.sampled_from([8, 17, 32]))
def test_evaluation_equals_pillow(width: int, height: int, size: int) -> None:
    pixels = noise(height, width)
    found = EvalTransform(size)(encode(pixels))
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.uint8, (3, size, size), True)
    assert np.array_equal(found.permute(1, 2, 0), literal_eval(Image.fromarray(pixels), size))
    squashed = np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
    assert np.array_equal(EvalTransform(size, "squash")(pixels).permute(1, 2, 0), squashed)


def test_crop_equals_pillow_to_one_level() -> None:
    augment = AugmentConfig(crop=0.3)
    for row in range(20):
        pixels, draw = noise(75, 100, row), Draw(1, 2, row)
        left, top, wide, high = random_box(100, 75, augment, draw)
        box = (round(left * 100), round(top * 75), round((left + wide) * 100), round((top + high) * 75))
        expected = Image.fromarray(pixels).crop(box).resize((32, 32), Image.Resampling.BICUBIC)
        found = TrainTransform(32, augment)(pixels, draw).permute(1, 2, 0).numpy()
        assert far(found, np.asarray(expected)) <= 1


def test_each_setting_does_what_it_says() -> None:
    pixels, draws = noise(16, 16), [Draw(0, 0, row) for row in range(400)]
    plain = TrainTransform(16, resize=16)(pixels, draws[0])
    assert np.array_equal(plain.permute(1, 2, 0), pixels)

    def share(predicate: object, **settings: object) -> float:
        transform = TrainTransform(16, AugmentConfig(**settings))  # type: ignore[arg-type]
        return sum(predicate(transform(pixels, d)) for d in draws) / len(draws)  # type: ignore[operator]

    rough = plain.float().diff(dim=-1).abs().mean()
    about = pytest.approx(0.3, abs=0.06)
    assert share(lambda x: torch.equal(x, plain.flip(-1)), flip=0.3) == about
    assert share(lambda x: torch.equal(x[0], x[1]) and torch.equal(x[1], x[2]), grayscale=0.3) == about
    assert share(lambda x: not torch.equal(x, plain), jitter=0.3) == about
    still = (0.0, 0.0, 0.0, 0.0)
    assert share(lambda x: far(x.numpy(), plain.numpy()) <= 6, jitter=1, jitter_strength=still) == 1  # HSV rounds
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
    for transform in (EvalTransform, TrainTransform):
        with pytest.raises(ValueError, match=r"resize 200 .* 224"):
            transform(224, resize=200)
