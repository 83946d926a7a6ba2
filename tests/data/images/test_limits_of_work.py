"""What decoding an image takes is counted exactly: one less is allowed, and the limit itself, and no more."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kiloword.data.images import work
from kiloword.data.images.decode import _is_whole, _reduction, decode, image_size
from kiloword.types import BadSample
from tars import encode, noise


def segment(kind: int, body: bytes = b"ab") -> bytes:
    return bytes([0xFF, kind]) + struct.pack(">H", 2 + len(body)) + body


def jpeg(*parts: bytes) -> bytes:
    return b"\xff\xd8" + b"".join(parts) + segment(0xDA) + b"\x01\x02"


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + kind + body + b"crc4"


def png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def webp(*bodies: bytes) -> bytes:
    return b"RIFF\0\0\0\0WEBP" + b"".join(
        b"VP8 " + struct.pack("<I", len(b)) + b + b"\0" * (len(b) % 2) for b in bodies
    )


def gif(*blocks: bytes, flags: int = 0x80) -> bytes:
    colours = 3 << (flags & 7) + 1 if flags & 0x80 else 0
    return b"GIF89a\1\0\1\0" + bytes([flags]) + b"\0\0" + b"," * colours + b"".join(blocks) + b","


def tiff(order: str, big: bool, *tags: tuple[int, int]) -> bytes:
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    start, count, entry = ("Q", "Q", "HHQ8x") if big else ("I", "H", "HHI4x")
    head += struct.pack(order + "HH", 8, 0) if big else b""
    at = len(head) + struct.calcsize(order + start)
    entries = b"".join(struct.pack(order + entry, tag, 4, values) for tag, values in tags)
    return head + struct.pack(order + start, at) + struct.pack(order + count, len(tags)) + entries


EXIF = segment(0xE1, b"Exif\0\0abc")
TEXT = b"!\xfe\x02ab\x03abc\0"  # two blocks
COUNTED: list[tuple[str, bytes, int, str]] = [
    ("MAX_SEGMENTS", jpeg(*[segment(0xE2)] * 5), 6, "segments before its first scan"),
    ("MAX_SEGMENTS", jpeg(segment(0xE2), b"\xff\x01", segment(0xE3, b"\xff\xda" * 9), b"\xff\xff\xff"), 4, "segments"),
    ("SMALL", jpeg(b"j" * 9, segment(0xE2), b"j" * 3), 12, "bytes outside of segments"),
    ("MAX_PACKED", jpeg(EXIF, segment(0xE1, b"http://"), EXIF, segment(0xE2, b"Exif\0\0"), EXIF), 3, "of EXIF"),
    ("MAX_CHUNKS", png(chunk(b"IHDR", b"x" * 13), chunk(b"IDAT", b"y" * 99), chunk(b"IEND")), 3, "chunks"),
    ("MAX_PACKED", png(chunk(b"iCCP"), chunk(b"tEXt"), chunk(b"zTXt", b"ab"), chunk(b"iTXt")), 3, "compressed texts"),
    ("MAX_CHUNKS", webp(b"abc", b"", b"abcd", b"a"), 4, "chunks"),
    ("MAX_CHUNKS", gif(TEXT, TEXT), 6, "chunks"),
    ("MAX_CHUNKS", gif(TEXT, b"xyz", TEXT, flags=0x83), 9, "chunks"),
    ("MAX_CHUNKS", gif(TEXT, flags=0), 3, "chunks"),
    *(("MAX_TAGS", tiff(o, b, (256, 1), (257, 1), (258, 3)), 3, "tags") for o in "<>" for b in (False, True)),
    *(("MAX_STRIPS", tiff(o, b, (256, 10**6), (tag, 70)), 70, "strips") for o in "<>" for b in (False, True)
      for tag in (273, 279, 324, 325)),
]  # fmt: skip


@pytest.mark.parametrize(("limit", "image", "count", "what"), COUNTED, ids=[str(n) for n in range(len(COUNTED))])
def test_what_stands_in_the_bytes_is_counted(
    monkeypatch: pytest.MonkeyPatch, limit: str, image: bytes, count: int, what: str
) -> None:
    if limit != "SMALL":
        monkeypatch.setattr(work, "SMALL", 0)
        if what.startswith(("bytes", "segments")) or "EXIF" in what:
            monkeypatch.setattr(work, "SMALL", min(len(image) - 1, 30))
    monkeypatch.setattr(work, limit, count)
    work.check_bytes(image)
    monkeypatch.setattr(work, limit, count - 1)
    with pytest.raises(BadSample, match=what):
        work.check_bytes(image)
    monkeypatch.setattr(work, "SMALL", len(image))
    monkeypatch.setattr(work, limit, 0 if limit != "SMALL" else len(image))
    work.check_bytes(image)  # small files are not looked at


def scanned(count: int) -> bytes:
    scan = segment(0xDA) + b"\x01\xff\x00\x02\xff\xd0\x03"
    return b"\xff\xd8" + segment(0xE0) + scan * count + b"\xff\xd9" + segment(0xDA) * 50


def test_scans_are_counted_up_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, count, said in (
        ("MAX_SCANS", 4, "image has more than 3 scans"),
        ("MAX_SEGMENTS", 6, "image has 6 segments, more than 5"),
        ("MAX_SCANNED", 40, "image has 4 scans of 10 pixels, together more than 39"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(work, limit, count)
            work._check_scans(scanned(4), 10)
            patch.setattr(work, limit, count - 1)
            with pytest.raises(BadSample, match=said):
                work._check_scans(scanned(4), 10)


NO_MARKERS = (0, *range(0xD0, 0xD8), 0xFF)


@pytest.mark.parametrize("raw", [b"", b"\xff", b"a\xff\x00b\xff\xd9\xff\xff\xda", bytes(range(256)) * 2 + b"\xff\xe0"])
def test_the_next_marker_is_found(raw: bytes) -> None:
    find = work.finder(raw)
    for at in range(len(raw)):
        markers = (n for n in range(at, len(raw) - 1) if raw[n] == 0xFF and raw[n + 1] not in NO_MARKERS)
        assert find(at) == next(markers, -1)


def opened(**about: Any) -> Any:
    return SimpleNamespace(**({"format": "PNG", "size": (10, 20), "tile": []} | about))


def test_what_an_opened_image_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rle = opened(format="BMP", tile=[("bmp_rle", None, 0, None)])
    for limit, image, photo, pixels, count, said in (
        ("MAX_RUNS", b"x" * 10, rle, 7, 7, "image has 7 run-length-encoded pixels, more than 6"),
        ("MAX_RUNS", b"x" * 19, rle, 7, 9, "image has 9 run lengths, more than 8"),
        ("MAX_SIDE", b"", opened(), 200, 20, "image has 20 pixels in a line or column, more than 19"),
        ("MAX_SIDE", b"", opened(size=(21, 1)), 200, 21, "image has 21 pixels in a line or column"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(work, limit, count)
            work.check_opened(image, photo, pixels)
            patch.setattr(work, limit, count - 1)
            with pytest.raises(BadSample, match=said):
                work.check_opened(image, photo, pixels)
    tiles = [("raw", (0, 0, 10, 10), 0, None), ("raw", (2, 5, 4, 20), 0, None), ("raw", None, 0, None)]
    strips = opened(format="TIFF", tile=tiles)  # 100 + 30 + 200 pixels
    monkeypatch.setattr(work, "MAX_COVERED", 2)
    work.check_opened(b"", strips, 165)
    with pytest.raises(BadSample, match="image has 3 strips that cover it 3 times"):
        work.check_opened(b"", strips, 164)


def test_an_image_of_one_scan_needs_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ones: sequential, progressive, grey."""
    counted: list[int] = []
    monkeypatch.setattr(work, "_check_scans", lambda image, pixels: counted.append(pixels))
    for mode, options, counts in (("RGB", {}, 0), ("L", {}, 0), ("RGB", {"progressive": True}, 1), ("CMYK", {}, 0)):
        raw = encode(np.asarray(Image.fromarray(noise(12, 16)).convert("RGB")), "JPEG", **options)
        if mode != "RGB":
            out = io.BytesIO()
            Image.fromarray(noise(12, 16)).convert(mode).save(out, "JPEG")
            raw = out.getvalue()
        counted.clear()
        assert decode(raw).shape == (12, 16, 3)
        assert counted == [12 * 16] * counts


def parts_of(raw: bytes) -> Iterator[Callable[[], bool]]:
    for end in range(2, len(raw)):
        yield lambda end=end: _is_whole(raw[:end])  # type: ignore[misc]


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_is_whole_with_its_last_marker(progressive: bool) -> None:
    raw = encode(noise(12, 16), "JPEG", progressive=progressive)
    assert _is_whole(raw)
    assert _is_whole(raw + b"behind the end")
    assert _is_whole(raw[:2] + b"\xff\xff" + raw[2:]), "fill bytes may stand before a marker"
    assert not any(whole() for whole in list(parts_of(raw))[:-1])
    assert not _is_whole(raw[:2] + segment(0xC3) + raw[2:])  # lossless
    assert not _is_whole(raw[:2] + b"\xff\xe0\x00\x01" + raw[2:])
    twice = raw[:-2] + raw[raw.index(b"\xff\xda") :]
    assert _is_whole(twice) == progressive


@pytest.mark.parametrize(
    ("size", "at_least", "factor"),
    [((80, 90), None, 1), ((80, 90), 10, 8), ((80, 90), 11, 4), ((80, 90), 20, 4), ((80, 90), 21, 2), ((90, 80), 40, 2),
     ((80, 90), 41, 1), ((8, 9), 0, 8), ((7, 9), 0, 4)],
)  # fmt: skip
def test_a_jpeg_keeps_as_many_pixels_as_were_asked_for(
    size: tuple[int, int], at_least: int | None, factor: int
) -> None:
    assert _reduction(opened(format="JPEG", size=size), at_least) == factor
    assert _reduction(opened(format="MPO", size=size), at_least) == factor
    assert _reduction(opened(format="PNG", size=size), at_least) == 1
    assert image_size(np.zeros((size[1], size[0], 3), np.uint8)) == size
