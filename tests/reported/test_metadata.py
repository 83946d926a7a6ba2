"""Metadata that cannot be parsed costs its values, never the image; a Pillow image that is cut is named."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from users import Run

import kiloword
from kiloword.data.map_style import MapStyleSource
from tars import encode, noise, pairs, write_tar

PIXELS = noise(48, 64)


@pytest.fixture(scope="module")
def matcher(model: Path) -> Any:
    return kiloword.load(str(model))


def chunk(kind: bytes, content: bytes, place: int = 33, wrong: int = 0) -> bytes:
    """A PNG with a chunk before its pixels, or at another place. Args: wrong: added to the checksum."""
    whole, checksum = encode(PIXELS), struct.pack(">I", zlib.crc32(kind + content) ^ wrong)
    return whole[:place] + struct.pack(">I", len(content)) + kind + content + checksum + whole[place:]


CHUNKS = {  # for which Pillow refuses the whole file
    "png-short": chunk(b"pHYs", b"ab"),
    "png-gamma": chunk(b"gAMA", b""),
    "png-profile": chunk(b"iCCP", b"name\0\7no profile"),
    "png-checksum": chunk(b"tEXt", b"Comment\0a cat", wrong=1),
    "png-long-text": chunk(b"zTXt", b"parameters\0\0" + zlib.compress(b"a cat " * 400_000)),
}
DAMAGED = {
    "png": encode(PIXELS, "PNG", exif=b"abc"),
    "png-late": chunk(b"eXIf", b"abc", place=-12),
    "png-text": chunk(b"tEXt", b"Raw profile type exif\0\nexif\n  12\nno hexadecimal digits"),
    "png-cut": encode(PIXELS, "PNG", exif=b"II*\0"),
    "webp": encode(PIXELS, "WEBP", lossless=True, exif=b"abc"),
    "webp-cut": encode(PIXELS, "WEBP", lossless=True, exif=b"MM\0*\0"),
    "webp-exif": encode(PIXELS, "WEBP", lossless=True, exif=b"Exif\0\0no header"),
}


@pytest.mark.parametrize("image", DAMAGED.values(), ids=DAMAGED)
def test_an_image_with_damaged_exif_is_read(tmp_path: Path, run: Run, matcher: Any, image: bytes) -> None:
    (tmp_path / "image").write_bytes(image)
    for given in (image, tmp_path / "image", Image.open(io.BytesIO(image))):
        assert matcher.preprocess(given).equal(matcher.preprocess(PIXELS))
    assert_no_bad_sample(tmp_path, run, image)


@pytest.mark.parametrize("image", CHUNKS.values(), ids=CHUNKS)
def test_a_png_with_damaged_chunks_beside_its_pixels_is_read(
    tmp_path: Path, run: Run, matcher: Any, image: bytes
) -> None:
    (tmp_path / "a.png").write_bytes(image)
    right = matcher.encode_image(encode(PIXELS))["vec"]
    for given in (image, tmp_path / "a.png"):
        assert (matcher.encode_image(given)["vec"] - right).abs().max() == 0
    assert_no_bad_sample(tmp_path, run, image)


def assert_no_bad_sample(folder: Path, run: Run, image: bytes) -> None:
    data = write_tar(folder / "0.tar", pairs(1) | {"b.png": image, "b.txt": b"a cat"})
    assert "all samples are good" in run("data", "check", data)[1]


def test_a_library_holds_these_photos(tmp_path: Path, model: Path, run: Run) -> None:
    (tmp_path / "album").mkdir()
    for name, image in DAMAGED.items():
        (tmp_path / "album" / f"{name}.png").write_bytes(image)
    run("index", tmp_path / "album", "--model", model, "--out", tmp_path / "library")
    assert f"{len(DAMAGED)} photos" in run("search", tmp_path / "library", "a cat", "--top", "20")[1]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "BMP"])
def test_a_pillow_image_that_is_cut_is_named_with_the_reason(matcher: Any, kind: str) -> None:
    whole = encode(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), kind)
    cut = Image.open(io.BytesIO(whole[: len(whole) * 3 // 4]))
    with pytest.raises(ValueError, match=r"image 1 .*(trunc|cut|damaged)"):
        matcher.encode_image([PIXELS, cut])


def test_a_pillow_image_of_a_closed_file_is_named(tmp_path: Path, matcher: Any) -> None:
    (tmp_path / "a.png").write_bytes(encode(PIXELS))
    with Image.open(tmp_path / "a.png") as closed:
        pass
    with pytest.raises(ValueError, match="image 0 "):
        matcher.encode_image([closed])


def test_a_sample_of_a_data_set_of_pillow_images_that_is_cut_is_a_bad_row() -> None:
    whole = encode(PIXELS)
    images = [Image.open(io.BytesIO(data)) for data in (whole, whole[: len(whole) // 2])]
    source = MapStyleSource([(image, ["a cat"]) for image in images], "photos", "photos-v1")
    assert source.record(0).captions == ["a cat"]
    with pytest.raises(kiloword.types.BadSample, match=r"cut|truncated"):
        source.record(1)
