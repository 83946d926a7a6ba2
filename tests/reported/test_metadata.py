"""Metadata that cannot be parsed costs its values, never the image; a Pillow image that is cut is named."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

import kiloword
from folders import model_folder
from kiloword.cli.main import main
from kiloword.data.map_style import MapStyleSource
from tars import encode, noise, pairs, write_tar

PIXELS = noise(48, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("metadata") / "model")


@pytest.fixture(scope="module")
def matcher(folder: Path) -> Any:
    return kiloword.load(str(folder))


def png_text(name: str, text: str) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text(name, text)
    return encode(PIXELS, "PNG", pnginfo=info)


def late_chunk(content: bytes) -> bytes:
    """A PNG with EXIF behind its pixels."""
    whole = encode(PIXELS)
    chunk = struct.pack(">I", len(content)) + b"eXIf" + content + struct.pack(">I", zlib.crc32(b"eXIf" + content))
    return whole[:-12] + chunk + whole[-12:]


def early_chunk(kind: bytes, content: bytes, wrong: int = 0) -> bytes:
    """A PNG with a chunk before its pixels. Args: wrong: added to the checksum."""
    whole = encode(PIXELS)
    checksum = struct.pack(">I", zlib.crc32(kind + content) ^ wrong)
    return whole[:33] + struct.pack(">I", len(content)) + kind + content + checksum + whole[33:]


CHUNKS = {  # for which Pillow refuses the whole file
    "png-short": early_chunk(b"pHYs", b"ab"),
    "png-gamma": early_chunk(b"gAMA", b""),
    "png-profile": early_chunk(b"iCCP", b"name\0\7no profile"),
    "png-checksum": early_chunk(b"tEXt", b"Comment\0a cat", wrong=1),
    "png-long-text": early_chunk(b"zTXt", b"parameters\0\0" + zlib.compress(b"a cat " * 400_000)),
}
DAMAGED = {
    "png": encode(PIXELS, "PNG", exif=b"abc"),
    "png-late": late_chunk(b"abc"),
    "png-text": png_text("Raw profile type exif", "\nexif\n  12\nno hexadecimal digits"),
    "png-cut": encode(PIXELS, "PNG", exif=b"II*\0"),
    "webp": encode(PIXELS, "WEBP", lossless=True, exif=b"abc"),
    "webp-cut": encode(PIXELS, "WEBP", lossless=True, exif=b"MM\0*\0"),
    "webp-exif": encode(PIXELS, "WEBP", lossless=True, exif=b"Exif\0\0no header"),
}
every_kind = pytest.mark.parametrize("image", DAMAGED.values(), ids=DAMAGED)
GIVEN: dict[str, Callable[[bytes, Path], Any]] = {
    "bytes": lambda image, _: image,
    "path": lambda image, path: [path.write_bytes(image), path][1],
    "pillow": lambda image, _: Image.open(io.BytesIO(image)),
}


@every_kind
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_an_image_with_damaged_exif_is_read(
    tmp_path: Path, matcher: Any, image: bytes, given: Callable[[bytes, Path], Any]
) -> None:
    pixels = matcher.preprocess(given(image, tmp_path / "image"))
    assert pixels.equal(matcher.preprocess(PIXELS))


@every_kind
def test_data_check_counts_no_bad_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str], image: bytes) -> None:
    main(["data", "check", str(write_tar(tmp_path / "a.tar", pairs(2) | {"x.png": image, "x.txt": b"a cat"}))])
    assert "all samples are good" in capsys.readouterr().out


def test_a_library_holds_these_photos(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "album").mkdir()
    for name, image in DAMAGED.items():
        (tmp_path / "album" / f"{name}.png").write_bytes(image)
    main(["index", str(tmp_path / "album"), "--model", str(folder), "--out", str(tmp_path / "library")])
    main(["search", str(tmp_path / "library"), "a cat", "--top", "20"])
    assert f"{len(DAMAGED)} photos" in capsys.readouterr().out


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


@pytest.mark.parametrize("image", CHUNKS.values(), ids=CHUNKS)
def test_a_png_with_damaged_chunks_beside_its_pixels_is_read(
    tmp_path: Path, matcher: Any, capsys: pytest.CaptureFixture[str], image: bytes
) -> None:
    (tmp_path / "a.png").write_bytes(image)
    right = matcher.encode_image(encode(PIXELS))["vec"]
    for given in (image, tmp_path / "a.png"):
        assert (matcher.encode_image(given)["vec"] - right).abs().max() == 0
    main(["data", "check", str(write_tar(tmp_path / "0.tar", pairs(1) | {"b.png": image, "b.txt": b"a cat"}))])
    assert "all samples are good" in capsys.readouterr().out
