"""A contact sheet: one image of samples of a data set."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from kiloword.data.images.decode import decode
from kiloword.files import write_atomic
from kiloword.randomness import key
from kiloword.types import BadSample, Record, Source, indices_of

_COLUMNS, TILES = 6, 24
_TILE, _IMAGE, _GAP = (240, 280), (240, 180), 16  # pixels: width and height, gap between tiles
_LINES, _LETTERS, _FONT = 5, 36, 13  # caption lines, letters a line, font size
_INK, _FAINT, _EDGE = (20, 20, 20), (130, 130, 130), (215, 215, 215)


def contact_sheet(source: Source, path: Path) -> None:
    """Write a PNG of up to 24 samples with a caption each, the same ones every time; bad samples are skipped.

    Errors: ValueError when none of 240 samples is readable, or the file cannot be written.
    """
    rng = np.random.Generator(np.random.Philox(key(source.fingerprint, "contact sheet")))
    rows, shown = iter(rng.permutation(len(source))[: 10 * TILES].tolist()), list[tuple[Image.Image, str, int]]()
    while len(shown) < TILES and (row := next(rows, None)) is not None:
        with suppress(BadSample):
            record = source.record(row)
            image = Image.fromarray(decode(record.image, at_least=max(_IMAGE)))
            shown.append((image, _caption(source, record), len(record.captions)))
    if not shown:
        raise ValueError(f"{source.name}: none of the samples that were tried is readable.")
    draw_tiles(shown, path)


def draw_tiles(shown: Sequence[tuple[Image.Image, str, int]], path: Path) -> None:
    """Write a PNG of images, each with a text below it. Args: shown: (image, text, number of its captions).

    Errors: ValueError when the file cannot be written.
    """
    across, down = _TILE[0] + _GAP, _TILE[1] + _GAP
    sheet = Image.new("RGB", (_GAP + _COLUMNS * across, _GAP - -len(shown) // _COLUMNS * down), "white")
    for place, one in enumerate(shown):
        row, column = divmod(place, _COLUMNS)
        sheet.paste(_tile(*one), (_GAP - 1 + column * across, _GAP - 1 + row * down))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    write_atomic(path, file.getvalue())


def _caption(source: Source, record: Record) -> str:
    if record.captions:
        return record.captions[0]
    names = getattr(source, "classnames", None) or []
    classes = indices_of(record.label)
    return ", ".join(names[label] if label < len(names) else f"class {label}" for label in classes) or "no class"


def _tile(image: Image.Image, caption: str, captions: int) -> Image.Image:
    """The image in a frame, its caption, and how many more there are."""
    tile = Image.new("RGB", (_TILE[0] + 2, _TILE[1] + 2), "white")
    tile.paste(ImageOps.expand(ImageOps.contain(image, _IMAGE), 1, _EDGE))
    draw, font = ImageDraw.Draw(tile), ImageFont.load_default(_FONT)
    lines = wrap(caption[:400], _LETTERS, max_lines=_LINES - (captions > 1), placeholder="...")
    for n, line in enumerate([*lines, f"+ {captions - 1} more"] if captions > 1 else lines):
        draw.text((1, _IMAGE[1] + 7 + 17 * n), line, _INK if n < len(lines) else _FAINT, font)
    return tile
