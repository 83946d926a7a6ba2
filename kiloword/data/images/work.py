"""Limits on the work that an encoded image gives a decoder beyond its pixels: scans, segments, chunks, tags, strips.

They are checked on the bytes before a decoder reads them, and depend on nothing else, so that the same images are bad
on every machine and in every run. Files of at most `SMALL` bytes are too small for most of them to matter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from PIL import ImageFile

from kiloword.types import BadSample

SMALL = 1 << 16  # bytes, which are read in about 10 ms
MAX_SCANS = 100  # of a JPEG; progressive ones have about 10
MAX_SCANNED = 1_600_000_000  # pixels times scans of a JPEG: 20 scans of the largest image
MAX_SEGMENTS = 10_000  # of a JPEG; a colour profile has at most 255
MAX_CHUNKS = 1 << 16  # of a PNG or WebP, blocks of a GIF before its first frame
MAX_PACKED = 100  # compressed texts and profiles of a PNG, each of which becomes a megabyte; EXIF segments of a JPEG
MAX_TAGS = 4096  # of a TIFF: libtiff's own limit
MAX_STRIPS = 500_000  # of a TIFF: the largest image in tiles of 16 x 16 has 313,000
MAX_COVERED = 8  # times that the strips of a TIFF may cover its pixels; one per channel if these are separate
MAX_RUNS = 8_000_000  # pixels, run lengths and numbers of BMP and PPM that Pillow decodes in Python
MAX_SIDE = 1_000_000  # pixels; each line of an image costs about 20 bytes besides its pixels, in each copy
_SCAN, _END = 0xDA, 0xD9
_STUFFING = (0x00, *range(0xD0, 0xD8), 0xFF)  # second bytes that are no marker, or a restart marker
_IS_MARKER = np.array([kind not in _STUFFING for kind in range(256)])
_WITHOUT_LENGTH = frozenset({*_STUFFING, 0x01, 0xC8, 0xD8, _END, *range(0xF0, 0xFE)})
_OF_PPM = ("pixels as text or in 16 bits", "numbers")
_IN_PYTHON = {"bmp_rle": ("run-length-encoded pixels", "run lengths"), "ppm": _OF_PPM, "ppm_plain": _OF_PPM}
_ONE_SCAN = {layers: b"\xff\xda\0" + bytes([6 + 2 * layers, layers]) for layers in range(1, 5)}


def check_bytes(image: bytes) -> None:
    """Check the bytes before Pillow opens the image. Errors: BadSample for too many segments, chunks or tags."""
    if len(image) <= SMALL:
        return
    for magic, check in _CHECKS.items():
        if image.startswith(magic):
            check(image)


def check_opened(image: bytes, opened: ImageFile.ImageFile, pixels: int) -> None:
    """Check scans, strips, run lengths and sides, once Pillow has read the header. Raises: BadSample."""
    if opened.format in ("JPEG", "MPO"):
        if not _has_one_scan(image, opened):
            _check_scans(image, pixels)
    elif opened.format == "TIFF":
        _check_strips(opened, pixels)
    elif opened.tile and (kinds := _IN_PYTHON.get(opened.tile[0][0])):
        for what, count in zip(kinds, (pixels, len(image) // 2), strict=True):
            if count > MAX_RUNS:
                raise _too_many(what, count, MAX_RUNS)
    if max(opened.size) > MAX_SIDE:
        raise _too_many("pixels in a line or column", max(opened.size), MAX_SIDE)


def finder(jpeg: bytes) -> Callable[[int], int]:
    """A function from an offset to that of the next marker, restarts excluded; -1 after the last one."""
    raw = np.frombuffer(jpeg, np.uint8)
    places = np.flatnonzero(raw[:-1] == 0xFF)
    places = np.append(places[_IS_MARKER[raw[places + 1]]], -1)
    return lambda at: int(places[places[:-1].searchsorted(at)])


def _too_many(what: str, count: int, most: int) -> BadSample:
    return BadSample(f"image has {count:,} {what}, more than {most:,}")


# JPEG (ITU-T T.81, B.1; what libjpeg reads and skips)


def _check_jpeg_header(jpeg: bytes) -> None:
    """Check segments and other bytes before the first scan, which Pillow reads in Python."""
    at, segments, exifs, junk = 2, 0, 0, 0
    while at < len(jpeg):
        start = jpeg.find(b"\xff", at)
        end = _after_fill(jpeg, len(jpeg) if start < 0 else start)
        kind = jpeg[end] if end < len(jpeg) else _SCAN
        segments, junk = segments + 1, junk + max(0, end - at - 1)
        if segments > MAX_SEGMENTS:
            raise _too_many("segments before its first scan", segments, MAX_SEGMENTS)
        if junk > SMALL:
            raise _too_many("bytes outside of segments", junk, SMALL)
        exifs += kind == 0xE1 and jpeg.startswith(b"Exif\0\0", end + 3)
        if exifs > MAX_PACKED:  # Pillow joins them one by one
            raise _too_many("segments of EXIF", exifs, MAX_PACKED)
        if kind == _SCAN:
            return
        at = end + 1 + _length(jpeg, end + 1, kind)


def _length(jpeg: bytes, at: int, kind: int) -> int:
    """Bytes of a segment after the two of its marker."""
    return 0 if kind in _WITHOUT_LENGTH else max(2, int.from_bytes(jpeg[at : at + 2], "big"))


def _after_fill(jpeg: bytes, at: int) -> int:
    """The offset of the first byte after a run of 0xff."""
    while jpeg[at : at + 4096] == b"\xff" * 4096:
        at += 4096
    while jpeg[at : at + 1] == b"\xff":
        at += 1
    return at


def _has_one_scan(jpeg: bytes, image: Any) -> bool:
    """Whether the first scan of a sequential JPEG holds all components: then a decoder reads no other scan.

    Pillow has read up to the end of that scan's header.
    """
    if "progressive" in image.info or image.layers not in _ONE_SCAN or image.format != "JPEG":
        return False
    header = _ONE_SCAN[image.layers]
    return jpeg.startswith(header, image.fp.tell() - len(header) - 2 * image.layers - 3)


def _check_scans(jpeg: bytes, pixels: int) -> None:
    """Count scans up to the end of the image, as libjpeg finds them."""
    next_marker = finder(jpeg)
    scans = segments = at = 0
    while (at := next_marker(at)) >= 0 and at + 1 < len(jpeg) and (kind := jpeg[at + 1]) != _END:
        segments, scans = segments + 1, scans + (kind == _SCAN)
        if segments > MAX_SEGMENTS:
            raise _too_many("segments", segments, MAX_SEGMENTS)
        if scans > MAX_SCANS:
            raise BadSample(f"image has more than {MAX_SCANS} scans")
        at += 2 + _length(jpeg, at + 2, kind)
    if scans * pixels > MAX_SCANNED:
        raise BadSample(f"image has {scans} scans of {pixels:,} pixels, together more than {MAX_SCANNED:,}")


# PNG, WebP and GIF


def _check_png(png: bytes) -> None:
    chunks = _limited(kind for _, kind in _png_chunks(png))
    if sum(kind in (b"iCCP", b"zTXt", b"iTXt") for kind in chunks) > MAX_PACKED:
        raise BadSample(f"image has more than {MAX_PACKED} compressed texts and profiles")


def _limited(chunks: Iterator[bytes]) -> list[bytes]:
    first = list(islice(chunks, MAX_CHUNKS + 1))
    if len(first) > MAX_CHUNKS:
        raise BadSample(f"image has more than {MAX_CHUNKS:,} chunks")
    return first


def _png_chunks(png: bytes) -> Iterator[tuple[int, bytes]]:
    """Length and kind of each chunk."""
    at = 8
    while at + 8 <= len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        yield length, png[at + 4 : at + 8]
        at += 12 + length


def is_whole_png(png: bytes) -> bool:
    """Whether its chunks lead to an end within its bytes: OpenCV allocates as many as a chunk claims to have."""
    return next((length == 0 for length, kind in _png_chunks(png) if kind == b"IEND"), False)


def _webp_chunks(webp: bytes) -> Iterator[bytes]:
    """Chunks of any kind, frames included."""
    at = 12
    while at + 8 <= len(webp):
        yield webp[at : at + 4]
        size = int.from_bytes(webp[at + 4 : at + 8], "little")
        at += 8 + size + size % 2


def _gif_blocks(gif: bytes) -> Iterator[bytes]:
    """Extension blocks before the first frame, which Pillow reads in Python, and the bytes between them."""
    at = 13 + (3 << (gif[10] & 7) + 1 if gif[10] & 128 else 0)
    while at < len(gif) and (kind := gif[at : at + 1]) not in (b",", b";"):
        yield kind
        at += 1
        if kind == b"!":
            at += 1
            while at < len(gif) and gif[at]:
                yield b""
                at += 1 + gif[at]
            at += 1


# TIFF


def _check_tags(tiff: bytes) -> None:
    """Check the number of tags of the first directory, and of the strips or tiles that they name."""
    order = "<" if tiff[:2] == b"II" else ">"
    big = 43 in tiff[2:4]
    start, count, entry = ("Q", "Q", "HHQ8x") if big else ("I", "H", "HHI4x")
    try:
        (at,) = struct.unpack_from(order + start, tiff, 8 if big else 4)
        (tags,) = struct.unpack_from(order + count, tiff, at)
        if tags > MAX_TAGS:
            raise _too_many("tags", tags, MAX_TAGS)
        rest = tiff[at + struct.calcsize(order + count) :][: tags * struct.calcsize(order + entry)]
        for tag, _, values in struct.iter_unpack(order + entry, rest):
            if tag in (273, 279, 324, 325) and values > MAX_STRIPS:
                raise _too_many("strips", values, MAX_STRIPS)
    except (struct.error, OverflowError):
        return  # cut off: Pillow reports it


def _check_strips(image: ImageFile.ImageFile, pixels: int) -> None:
    """Check how often the strips cover the image: they may overlap, in the image and in the file."""
    boxes = [tile[1] or (0, 0, *image.size) for tile in image.tile]
    covered = sum((right - left) * (below - top) for left, top, right, below in boxes)
    if covered > MAX_COVERED * pixels:
        raise BadSample(f"image has {len(boxes):,} strips that cover it {math.ceil(covered / pixels):,} times")


_CHECKS: Mapping[bytes, Callable[[bytes], object]] = {
    b"\xff\xd8": _check_jpeg_header,
    b"\x89PNG": _check_png,
    b"RIFF": lambda image: _limited(_webp_chunks(image)),
    b"GIF8": lambda image: _limited(_gif_blocks(image)),
    b"II": _check_tags,
    b"MM": _check_tags,
}
