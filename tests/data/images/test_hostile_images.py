"""Every kind of image, and images made by someone who means harm: pixels as documented, or a reason.

`docs/data.md` has these tables; a test compares.
"""

from __future__ import annotations

import io
import resource
import struct
import sys
import zlib
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from counting import calls
from kiloword.data.images.augmentation import EvalTransform, TrainTransform, fit
from kiloword.data.images.decode import Decoder, decode, image_size
from kiloword.randomness import Draw
from kiloword.types import BadSample
from tars import encode, noise

DECODERS: tuple[Decoder, ...] = ("pillow", "opencv", "simplejpeg")
HIGH, WIDE = 40, 60
Expected = np.ndarray | str


def outcome(image: bytes, decoder: Decoder = "pillow") -> Expected:
    """Pixels, or the reason why there are none."""
    pytest.importorskip({"opencv": "cv2", "pillow": "PIL"}.get(decoder, decoder))
    try:
        return decode(image, decoder)
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


def claimed(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def tiff(tags: dict[int, int]) -> bytes:
    """A TIFF of 16 x 16 colours with these tags, all 32 bits, and no pixels."""
    tags = {256: 16, 257: 16, 258: 8, 262: 1, 277: 1, 273: 8, 279: 100} | tags
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(104)


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


@cache
def kinds() -> dict[str, tuple[bytes, Expected, int, str]]:
    """Name: bytes, expected pixels (or part of the reason), levels they may be off, words for the documentation."""
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
    late = chunk(b"eXIf", b"Exif\0\0"[6:] + orientation(6)[6:])
    jpeg, gamma = saved(rgb, "JPEG", quality=100, subsampling=0), chunk(b"gAMA", struct.pack(">I", 100000))
    turned = np.rot90(pixels, -1)
    anim: dict[str, object] = {"save_all": True, "append_images": frames}
    first, white, plain = "the first frame", "over white", "to RGB, no profile"
    unknown = "not an image in a known format"
    ascii_svg = b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'></svg>"
    return {
        "JPEG": (jpeg, pixels, 4, "as it is"),
        "JPEG, progressive": (saved(rgb, "JPEG", quality=100, subsampling=0, progressive=True), pixels, 4, "as it is"),
        "JPEG, arithmetic coding": (jpeg.replace(b"\xff\xc0", b"\xff\xc9", 1), "any", 0, "as libjpeg reads it"),
        "JPEG, lossless (SOF3)": (jpeg.replace(b"\xff\xc0", b"\xff\xc3", 1), "cannot be decoded", 0, ""),
        "JPEG, RGB inside": (saved(rgb, "JPEG", quality=100, keep_rgb=True, subsampling=0), pixels, 4, "as it is"),
        "JPEG, grey": (saved(rgb.convert("L"), "JPEG", quality=100), flat, 4, "grey in three channels"),
        "JPEG, CMYK (Adobe, inverted)": (saved(rgb.convert("CMYK"), "JPEG", quality=100), pixels, 6, plain),
        "JPEG, garbage behind": (jpeg + b"x" * 5000, pixels, 4, "as it is"),
        "JPEG, garbage that ends as one": (jpeg + b"x" * 500 + b"\xff\xd9", pixels, 4, "as it is"),
        "JPEG, colour profile": (with_profile(jpeg), pixels, 4, "profile not applied"),
        "JPEG, cut": (jpeg[: len(jpeg) // 2], "truncated", 0, ""),
        "JPEG, cut, an end added": (jpeg[: len(jpeg) // 2] + b"\xff\xd9", "any", 0, "as libjpeg reads it"),
        "MPO (two JPEGs)": (saved(rgb, "MPO", quality=100, subsampling=0, **anim), pixels, 4, first),
        "PNG": (saved(rgb, "PNG"), pixels, 0, "as it is"),
        "PNG, gamma": (png(bytes_of(pixels), 8, 2, gamma), pixels, 0, "not applied"),
        "PNG, grey": (saved(rgb.convert("L"), "PNG"), flat, 0, "grey in three channels"),
        "PNG, grey and alpha": (png(bytes_of(np.dstack([grey, alpha[..., 3]])), 8, 4), over_white(
            np.dstack([flat, alpha[..., 3]])), 1, white),
        "PNG, 1 bit": (saved(rgb.convert("1"), "PNG"), black, 0, "black and white"),
        "PNG, 16-bit grey": (encode(grey16), scaled, 0, "divided by 257, to the nearest"),
        "PNG, 16-bit colour": (png(bytes_of(wide16), 16, 2), (wide16 >> 8).astype(np.uint8), 0, "the high bytes"),
        "PNG, alpha": (saved(Image.fromarray(alpha), "PNG"), over_white(alpha), 1, white),
        "PNG, palette": (saved(palette, "PNG"), coloured, 0, "its colours"),
        "PNG, palette with a hole": (saved(palette, "PNG", transparency=3), holed, 0, white),
        "PNG, one colour transparent": (png(bytes_of(pixels), 8, 2, chunk(b"tRNS", struct.pack(">3H", *pixels[0, 0]))),
            np.where((pixels == pixels[0, 0]).all(-1, keepdims=True), 255, pixels), 0, white),
        "PNG, orientation behind the pixels": (png(bytes_of(pixels), 8, 2, last=late), turned, 0, "turned"),
        "PNG, animated": (saved(rgb, "PNG", **anim), pixels, 0, first),
        "PNG, cut": (saved(rgb, "PNG")[:2000], "truncated", 0, ""),
        "PNG named .jpg": (saved(rgb, "PNG"), pixels, 0, "the content decides"),
        "WebP, lossless": (saved(rgb, "WEBP", lossless=True), pixels, 0, "as it is"),
        "WebP, alpha": (
            saved(Image.fromarray(alpha), "WEBP", lossless=True, exact=True), over_white(alpha), 1, white),
        "WebP, animated": (saved(rgb, "WEBP", lossless=True, **anim), pixels, 0, first),
        "GIF, animated": (saved(palette, "GIF", **anim), coloured, 0, first),
        "GIF, hole": (saved(palette, "GIF", transparency=3), holed, 0, white),
        "BMP": (saved(rgb, "BMP"), pixels, 0, "as it is"),
        "TIFF": (saved(rgb, "TIFF"), pixels, 0, "as it is"),
        "TIFF, CMYK": (saved(rgb.convert("CMYK"), "TIFF"), pixels, 1, plain),
        "TIFF, 16-bit grey": (saved(Image.fromarray(grey16), "TIFF"), scaled, 0, "divided by 257, to the nearest"),
        "TIFF, floating point": (saved(rgb.convert("F"), "TIFF"), "floating-point images are not supported", 0, ""),
        "TIFF, a tile of 26,000 x 26,000": (
            tiff({322: 26000, 323: 26000, 259: 5}), "image has 676,000,000 pixels", 0, ""),
        "JPEG 2000": (saved(rgb, "JPEG2000"), pixels, 0, "as it is"),
        "PPM": (saved(rgb, "PPM"), pixels, 0, "as it is"),
        "ICO": (saved(rgb, "ICO"), unknown, 0, ""),
        "EPS (starts other programs)": (b"%!PS-Adobe-3.0 EPSF-3.0\n", unknown, 0, ""),
        "SVG, HTML, text": (ascii_svg, unknown, 0, ""),
        "50,000 x 50,000 in 74 bytes": (claimed(50_000, 50_000), "image has 2,500,000,000 pixels", 0, ""),
        "a size without pixels": (claimed(300, 300), "any", 0, "what is there, black below"),
        "no bytes": (b"", "the image has zero bytes", 0, ""),
    }  # fmt: skip


def orientation(value: int, more: str = "") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    if more:
        exif[0x010E] = more
    return exif.tobytes()


def with_profile(jpeg: bytes) -> bytes:
    body = b"ICC_PROFILE\0\1\1" + b"x" * 5000
    return jpeg[:2] + b"\xff\xe2" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", kinds())
def test_what_becomes_of_every_kind(kind: str, decoder: Decoder) -> None:
    raw, expected, levels, _ = kinds()[kind]
    found = outcome(raw, decoder)
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray), found
        assert found.shape == expected.shape
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= levels
        assert image_size(raw) == (expected.shape[1], expected.shape[0])
    elif expected != "any":
        assert isinstance(found, str)
        assert expected in found


@pytest.mark.parametrize("kind", kinds())
def test_the_decoders_agree(kind: str) -> None:
    pillow = outcome(kinds()[kind][0])
    for decoder in DECODERS[1:]:
        other = outcome(kinds()[kind][0], decoder)
        assert isinstance(pillow, str) == isinstance(other, str)
        if isinstance(pillow, np.ndarray) and isinstance(other, np.ndarray):
            assert np.abs(pillow.astype(int) - other.astype(int)).max() <= 4


def table() -> str:
    """The rows of the documentation."""
    rows = []
    for kind, (_, expected, _, words) in kinds().items():
        counted = isinstance(expected, str) and expected != "any"
        rows.append(f"| {kind} | {f'counted: {expected}' if counted else words} |")
    return "\n".join(rows)


def test_the_documentation_says_the_same() -> None:
    assert table() in (Path(__file__).parents[3] / "docs" / "data.md").read_text()


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["JPEG", "JPEG, progressive", "JPEG, grey", "PNG", "WebP, lossless", "BMP"]),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 1 << 16) | st.none(),
    end=st.sampled_from([b"", b"\xff\xd9", b"garbage"]),
)
def test_damage_is_seen_by_all_decoders_or_none(
    kind: str, changes: list[tuple[int, int]], cut: int | None, end: bytes
) -> None:
    raw = bytearray(kinds()[kind][0])
    for place, value in changes:
        raw[place % len(raw)] = value
    damaged = bytes(raw[: len(raw) if cut is None else cut % len(raw)]) + end
    pillow = outcome(damaged)
    for decoder in DECODERS[1:]:
        other = outcome(damaged, decoder)
        assert isinstance(pillow, str) == isinstance(other, str)
        if isinstance(pillow, np.ndarray) and isinstance(other, np.ndarray):
            assert np.abs(pillow.astype(int) - other.astype(int)).max() <= 4


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("value", [0, 9, 99, 65535])
def test_an_orientation_that_does_not_exist_is_none(value: int, decoder: Decoder) -> None:
    jpeg = encode(noise(HIGH, WIDE), "JPEG", exif=orientation(value))
    assert outcome(jpeg, decoder).shape == (HIGH, WIDE, 3)  # type: ignore[union-attr]


def exifs() -> dict[str, bytes]:
    def directory(count: int, entry: bytes, after: int) -> bytes:
        return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", count) + entry + struct.pack("<I", after)

    turned = struct.pack("<HHII", 0x0112, 3, 1, 6)
    return {
        "60 kB": orientation(6, "x" * 60_000),
        "a directory that is its own next": directory(1, turned, 8),
        "a directory of 65,535 entries, one of them there": directory(65535, turned, 0),
        "a value of 4 GB": directory(2, turned + struct.pack("<HHII", 0x010E, 2, 0xFFFFFFFF, 8), 0),
        "a directory inside itself": directory(2, turned + struct.pack("<HHII", 0x8769, 4, 1, 8), 0),
        "cut": orientation(6)[:12],
        "no EXIF at all": b"Exif\0\0" + b"\xff" * 100,
    }


@pytest.mark.parametrize("name", exifs())
def test_absurd_exif_costs_nothing(name: str) -> None:
    """The turn is applied where it can be read; nothing else of EXIF matters."""
    raw = encode(noise(HIGH, WIDE), "JPEG", exif=exifs()[name])
    found: list[Expected] = []
    assert calls(lambda: found.extend(outcome(raw, decoder) for decoder in DECODERS)) < 20_000
    shapes = {pixels if isinstance(pixels, str) else pixels.shape for pixels in found}
    assert len(shapes) == 1
    assert shapes <= {(HIGH, WIDE, 3), (WIDE, HIGH, 3)}
    assert name not in ("60 kB", "a directory that is its own next") or shapes == {(WIDE, HIGH, 3)}


@pytest.mark.parametrize("shape", [(1, 1), (1, 10_000), (10_000, 1), (1, 65_000), (3, 20_000)])
@pytest.mark.parametrize("size", [32, 512])
def test_a_image_of_one_line_costs_no_memory(shape: tuple[int, int], size: int) -> None:
    """Resized whole, 1 x 10,000 pixels would take 10 GB at 512 a side."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    raw, draw = encode(noise(*shape)), Draw(0, 0, 0)
    for found in (EvalTransform(size)(raw), EvalTransform(size, "squash")(raw), TrainTransform(size)(raw, draw)):
        assert found.shape == (3, size, size)
    kilobytes = 1 if sys.platform.startswith("linux") else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / kilobytes < 700_000


def test_the_centre_alone_equals_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for height, width in ((40, 60), (60, 40), (41, 300), (300, 41)):
        image = Image.fromarray(noise(height, width))
        whole = fit(image, 32).numpy().astype(int)
        with monkeypatch.context() as patch:
            patch.setattr("kiloword.data.images.augmentation.MAX_PIXELS", 0)
            assert np.abs(fit(image, 32).numpy().astype(int) - whole).max() <= 2


def test_animations_without_end_cost_one_frame() -> None:
    """1,000 frames of a GIF and 100 of a WebP: only the first is decoded."""
    gif = saved(Image.new("P", (2000, 2000)), "GIF")
    body, frame = gif[:-1], gif[gif.index(b",") : -1]
    webps = [
        saved(Image.new("RGB", (64, 64)), "WEBP", save_all=True, duration=1, append_images=[
            Image.new("RGB", (64, 64), (n, 0, 0)) for n in range(frames)])
        for frames in (2, 100)
    ]  # fmt: skip
    for decoder in DECODERS:
        for few, many in ((gif, body + frame * 1000 + b";"), webps):
            assert isinstance(outcome(many, decoder), np.ndarray)
            assert calls(partial(outcome, many, decoder)) < calls(partial(outcome, few, decoder)) + 50
