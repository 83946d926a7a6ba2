"""A contact sheet: one image of samples of a data set."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kiloword.data.images.decode import decode
from kiloword.files import write_atomic
from kiloword.randomness import key
from kiloword.types import BadSample, Record, Source, indices_of

_COLUMNS, TILES = 6, 24
_TILE, _IMAGE, _GAP = (240, 280), (240, 180), 16  # pixels: width and height, gap between tiles
_LINES, _LINE, _FONT = 5, 17, 13  # caption lines, pixels a line, font size
_INK, _FAINT, _EDGE = (20, 20, 20), (130, 130, 130), (215, 215, 215)


def contact_sheet(source: Source, path: Path) -> None:
    """Write a PNG of up to 24 samples with a caption each, the same ones every time; bad samples are skipped.

    Errors: ValueError when no sample is readable, or the file cannot be written.
    """
    readable = islice(_readable(source), TILES)
    shown = [(image, _caption(source, record), len(record.captions)) for image, record in readable]
    if not shown:
        raise ValueError(f"{source.name}: none of the samples that were tried is readable.")
    draw_tiles(shown, path)


def draw_tiles(shown: Sequence[tuple[Image.Image, str, int]], path: Path) -> None:
    """Write a PNG of images, each with a text below it. Args: shown: (image, text, number of its captions).

    Errors: ValueError when the file cannot be written.
    """
    rows = -(-len(shown) // _COLUMNS)
    size = (_GAP + _COLUMNS * (_TILE[0] + _GAP), _GAP + rows * (_TILE[1] + _GAP))
    sheet = Image.new("RGB", size, "white")
    for place, (image, text, captions) in enumerate(shown):
        row, column = divmod(place, _COLUMNS)
        corner = (_GAP + column * (_TILE[0] + _GAP), _GAP + row * (_TILE[1] + _GAP))
        _tile(sheet, corner, image, text, captions)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    write_atomic(path, file.getvalue())


def _readable(source: Source) -> Iterator[tuple[Image.Image, Record]]:
    """Samples in an order given by the fingerprint; of ten times as many as are shown."""
    rng = np.random.Generator(np.random.Philox(key(source.fingerprint, "contact sheet")))
    for row in rng.permutation(len(source))[: 10 * TILES].tolist():
        with suppress(BadSample):
            record = source.record(row)
            yield Image.fromarray(decode(record.image, at_least=max(_IMAGE))), record


def _caption(source: Source, record: Record) -> str:
    if record.captions:
        return record.captions[0]
    names = getattr(source, "classnames", None) or []
    classes = indices_of(record.label)
    return ", ".join(names[label] if label < len(names) else f"class {label}" for label in classes) or "no class"


def _tile(sheet: Image.Image, corner: tuple[int, int], image: Image.Image, caption: str, captions: int) -> None:
    scale = min(_IMAGE[0] / image.width, _IMAGE[1] / image.height)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    sheet.paste(image.resize(size, Image.Resampling.BICUBIC), corner)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT)
    draw.rectangle((corner[0] - 1, corner[1] - 1, corner[0] + size[0], corner[1] + size[1]), outline=_EDGE)
    more = f"+ {captions - 1} more" if captions > 1 else ""
    lines = _wrap(caption, font, _LINES - bool(more))
    x, y = corner[0], corner[1] + _IMAGE[1] + 6
    for line in lines:
        draw.text((x, y), line, _INK, font)
        y += _LINE
    draw.text((x, y), more, _FAINT, font)


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, lines: int) -> list[str]:
    """At most `lines` lines that fit the tile; "..." where text is cut."""
    wrapped, line, width = [], "", _TILE[0]
    for word in text[:400].split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            wrapped.append(line)
            longer = word
        while font.getlength(longer) > width:
            longer = longer[:-1]
        line = longer
    wrapped.append(line)
    return wrapped if len(wrapped) <= lines else [*wrapped[: lines - 1], wrapped[lines - 1][:-3] + "..."]
