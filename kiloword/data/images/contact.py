"""A contact sheet: one image of samples of a data set."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont, ImageOps

from kiloword.data.images.decode import decode
from kiloword.files import write_atomic
from kiloword.randomness import generator
from kiloword.types import BadSample, Record, Source, indices_of

_COLUMNS, TILES = 6, 24
_TILE, _IMAGE, _GAP = (240, 280), (240, 180), 16  # pixels: width and height, gap between tiles
_LINES, _LETTERS, _FONT = 5, 36, 13  # caption lines, letters a line, font size


def contact_sheet(source: Source, path: Path) -> None:
    """Write a PNG of up to 24 samples with a caption each, the same ones every time; bad samples are skipped.

    Errors: ValueError when none of 240 samples is readable, or the file cannot be written.
    """
    rng = generator(source.fingerprint, "contact sheet")
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
    """Write a PNG of images, each with a caption below it. Args: shown: (image, caption, number of its captions).

    Errors: ValueError when the file cannot be written.
    """
    across, down = _TILE[0] + _GAP, _TILE[1] + _GAP
    sheet = Image.new("RGB", (_GAP + _COLUMNS * across, _GAP - -len(shown) // _COLUMNS * down), "whitesmoke")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_FONT)
    for place, (image, caption, captions) in enumerate(shown):
        row, column = divmod(place, _COLUMNS)
        x, y = _GAP + column * across, _GAP + row * down
        sheet.paste(ImageOps.contain(image, _IMAGE), (x, y))
        lines = wrap(caption[:400], _LETTERS, max_lines=_LINES - (captions > 1), placeholder="...")
        lines += [f"+ {captions - 1} more"] * (captions > 1)
        draw.text((x, y + _IMAGE[1] + 6), "\n".join(lines), "black", font)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    write_atomic(path, file.getvalue())


def _caption(source: Source, record: Record) -> str:
    if record.captions:
        return record.captions[0]
    names = getattr(source, "classnames", None) or []
    classes = indices_of(record.label)
    return ", ".join(names[label] if label < len(names) else f"class {label}" for label in classes) or "no class"
