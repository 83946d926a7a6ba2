"""Small images that ask for much work: refused by numbers, by every decoder, before the work is done.

`docs/data.md` has the table; a test compares.
"""

from __future__ import annotations

import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from test_hostile_images import DECODERS, chunk, noise, outcome, saved

from counting import calls
from kiloword.data.images import work
from kiloword.data.images.decode import Decoder, image_size
from kiloword.types import BadSample

JPEG = saved(Image.fromarray(noise(40, 60)), "JPEG")
GREY = Image.fromarray(noise(40, 60)).convert("L")


def scans(count: int, image: Image.Image = GREY) -> bytes:
    """A progressive JPEG of so many scans: its last one over and over."""
    jpeg = saved(image, "JPEG", progressive=True)
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * (count - jpeg.count(b"\xff\xda")) + b"\xff\xd9"


def segments(body: bytes) -> bytes:
    """A JPEG with this behind its first segment."""
    return JPEG[:20] + body + JPEG[20:]


def segment(kind: int, body: bytes) -> bytes:
    return bytes([0xFF, kind]) + struct.pack(">H", len(body) + 2) + body


def png(before: bytes = b"", pixels: bytes | None = None, after: bytes = b"") -> bytes:
    """16 x 16 grey."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(17 * 16))) if pixels is None else pixels
    return b"\x89PNG\r\n\x1a\n" + header + before + data + after + chunk(b"IEND", b"")


def long_png(width: int, height: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes((width + 1) * height)))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


def gif(blocks: bytes) -> bytes:
    plain = saved(Image.new("P", (16, 16)), "GIF")
    first = plain.index(b",")
    return plain[:first] + blocks + plain[first:]


def webp(frames: int) -> bytes:
    more = [Image.new("RGB", (16, 16), (n, 0, 0)) for n in (5, 9)]
    plain = saved(Image.new("RGB", (16, 16)), "WEBP", lossless=True, save_all=True, duration=1, append_images=more)
    whole = plain + plain[plain.rindex(b"ANMF") :] * frames
    return whole[:4] + struct.pack("<I", len(whole) - 8) + whole[8:]


def strips(side: int, count: int) -> bytes:
    """A TIFF whose strips all but cover it, each, and lie over each other in the file."""
    pixels = bytes(side * side)
    at, body = 8 + len(pixels), pixels + struct.pack("<I", 8) * count + struct.pack("<I", len(pixels)) * count
    tags = {256: side, 257: side, 258: 8, 259: 1, 262: 1, 273: (count, at), 277: 1, 278: side - 1}
    tags |= {279: (count, at + 4 * count)}
    entries = [(tag, *(value if isinstance(value, tuple) else (1, value))) for tag, value in tags.items()]
    directory = b"".join(struct.pack("<HHII", tag, 4, number, value) for tag, number, value in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(body)) + body + struct.pack("<H", len(entries)) + directory + bytes(4)


def big_tiff(tags: int) -> bytes:
    return b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, tags) + struct.pack("<HHQQ", 40000, 1, 1, 1) * tags + bytes(8)


def run_lengths(side: int, more: bytes = b"") -> bytes:
    body = b"\1\0\0\0" * side + more + b"\0\1"
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(body), 0, 0, 1078) + header + bytes(1024) + body


PROFILE = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 20)))
EXIF = segment(0xE1, b"Exif\0\0" + bytes(1000))
ATTACKS: dict[str, tuple[Callable[[], bytes], str]] = {
    "JPEG, scans": (lambda: scans(101), "image has more than 100 scans"),
    "JPEG, scans times pixels": (
        lambda: scans(90, Image.new("L", (4400, 4400))),
        "image has 90 scans of 19,360,000 pixels, together more than 1,600,000,000",
    ),
    "JPEG, segments": (
        lambda: segments(segment(0xFE, b"1234") * 10_001),
        "image has 10,001 segments before its first scan, more than 10,000",
    ),
    "JPEG, segments of EXIF": (lambda: segments(EXIF * 101), "image has 101 segments of EXIF, more than 100"),
    "JPEG, bytes between segments": (
        lambda: segments(b"\xff" * 70_000),
        "image has 70,000 bytes outside of segments, more than 65,536",
    ),
    "PNG, chunks": (lambda: png(chunk(b"aaAa", b"") * 70_000), "image has more than 65,536 chunks"),
    "PNG, chunks behind the pixels": (
        lambda: png(after=chunk(b"aaAa", b"") * 70_000),
        "image has more than 65,536 chunks",
    ),
    "PNG, compressed texts and profiles": (
        lambda: png(PROFILE * 101),
        "image has more than 100 compressed texts and profiles",
    ),
    "WebP, chunks and frames": (lambda: webp(65_536), "image has more than 65,536 chunks"),
    "GIF, blocks before the first frame": (
        lambda: gif(b"!\xfe" + b"\1x" * 70_000 + b"\0"),
        "image has more than 65,536 chunks",
    ),
    "TIFF, tags": (lambda: big_tiff(4097), "image has 4,097 tags, more than 4,096"),
    "TIFF, strips": (lambda: strips(16, 500_001), "image has 500,001 strips, more than 500,000"),
    "TIFF, strips over each other": (lambda: strips(16, 100), "image has 100 strips that cover it 50 times"),
    "BMP, run lengths": (
        lambda: run_lengths(3000),
        "image has 9,000,000 run-length-encoded pixels, more than 8,000,000",
    ),
    "BMP, empty run lengths": (
        lambda: run_lengths(16, bytes(16_000_000)),
        "image has 8,000,572 run lengths, more than 8,000,000",
    ),
    "PNG, a column": (
        lambda: long_png(1, 1_000_001),
        "image has 1,000,001 pixels in a line or column, more than 1,000,000",
    ),
    "PNG, a line": (
        lambda: long_png(1_000_001, 1),
        "image has 1,000,001 pixels in a line or column, more than 1,000,000",
    ),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", ATTACKS)
def test_work_is_refused_before_it_is_done(name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reason = ATTACKS[name]
    image = make()
    nobody = Mock(side_effect=AssertionError("decoded"))
    for pixels in ("PIL.ImageFile.ImageFile.load_prepare", "PIL.WebPImagePlugin.WebPImageFile.load"):
        monkeypatch.setattr(pixels, nobody)
    if decoder != "pillow":
        module = pytest.importorskip({"opencv": "cv2"}.get(decoder, decoder))
        monkeypatch.setattr(module, {"opencv": "imdecode"}.get(decoder, "decode_jpeg"), nobody)
    found: list[object] = []
    assert calls(lambda: found.append(outcome(image, decoder))) < 400_000
    assert found == [reason]
    with pytest.raises(BadSample, match="image has"):
        image_size(image)
    nobody.assert_not_called()


def test_what_is_in_use_stays() -> None:
    """Colour progressive, 100 scans, a film behind a photo, a photo inside a segment, a profile of many segments."""
    film = b"\xff\xda\0\x08" * 5000
    thumbnail = segments(segment(0xE1, film) * 4)
    profile = b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes([n, 255]) + bytes(1000)) for n in range(1, 256))
    plain = outcome(JPEG)
    assert isinstance(plain, np.ndarray)
    for decoder in DECODERS:
        for image in (JPEG + film * 20, thumbnail, segments(profile)):
            assert np.array_equal(outcome(image, decoder), outcome(JPEG, decoder))
        colour = scans(10, Image.fromarray(noise(40, 60)))
        assert isinstance(outcome(colour, decoder), np.ndarray)
        assert isinstance(outcome(scans(100), decoder), np.ndarray)
        assert isinstance(outcome(png(PROFILE * 10), decoder), np.ndarray)
        assert isinstance(outcome(webp(3000), decoder), np.ndarray)
        assert isinstance(outcome(gif(b"!\xfe" + b"\xff" + b"x" * 255 + b"\0"), decoder), np.ndarray)
        assert isinstance(outcome(strips(16, 2), decoder), np.ndarray)


@pytest.mark.parametrize("hidden", [b"\xff\1", b"\xff\xd8", b"\xff\xfe\0\0", b"\xff\xff\xff", b"junk", b"\xff\0"])
def test_scans_do_not_hide(hidden: bytes) -> None:
    """What stands before a scan, and is skipped or not, changes nothing: libjpeg would read the scan behind it."""
    jpeg = saved(GREY, "JPEG", progressive=True)
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    image = jpeg[:-2] + (hidden + last) * 150 + b"\xff\xd9"
    for decoder in DECODERS:
        assert outcome(image, decoder) == "image has more than 100 scans"


@pytest.mark.parametrize("last", [b"", chunk(b"IEND", b"")])
def test_a_chunk_that_claims_gigabytes_costs_nothing(last: bytes) -> None:
    """OpenCV made room for it: 3.4 GB and 2.6 s of processor time for 605 bytes. An input that fuzzing found."""
    claim = struct.pack(">I", 0x7FFFFFF0) + b"IDAT" + zlib.compress(bytes(17 * 8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    image = png(pixels=claim + last)
    assert len({isinstance(outcome(image, decoder), str) for decoder in DECODERS}) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_the_documentation_has_the_numbers() -> None:
    text = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    limits = {name: value for name, value in vars(work).items() if name.startswith("MAX_") or name == "SMALL"}
    assert len(limits) == 11
    assert [name for name, value in limits.items() if f"{value:,}" not in text] == []
