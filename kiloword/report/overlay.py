"""A figure of one image and what texts see in it: overlays of maps, mixing weights as bars, covered patches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from PIL import Image, ImageColor, ImageDraw, ImageFont

from kiloword.report import pictures
from kiloword.report.blocks import Pixels
from kiloword.report.figure import LIGHT
from kiloword.report.pictures import GLOW, STRIPES, Floats, covered

__all__ = ["GLOW", "STRIPES", "Floats", "Pixels", "covered", "figure", "overlay", "square"]

SIDE, SMALL = 240, 128  # pixels a side: a text's image, a token's image
CAPTION, WEIGHTS = 230, 260  # pixels: widths of the caption and of the weights' plot
GAP, MARGIN = 20, 28
HIGH = 96  # pixels: of the largest bar
HEAD, PLAIN = 180, 130  # pixels: height of the title with the plain image, and a side of that image
PAPER, INK, MUTED, RULE, BAR = (ImageColor.getrgb(LIGHT[name]) for name in ("paper", "ink", "muted", "rule", "s0"))


@dataclass(frozen=True)
class TokenMap:
    """One token: its name, the share of the text's weights that it has, where it looks [rows, columns]."""

    name: str
    share: float
    map: Floats


@dataclass(frozen=True)
class Row:
    """One text of the figure."""

    text: str
    note: str  # score and the like, a few words
    map: Floats  # [rows, columns]: where the text looks
    tokens: Sequence[TokenMap] = ()  # the heaviest first
    weights: Floats | None = None  # [M, N]; None: no plot of them


def figure(image: Pixels, title: str, about: str, rows: Sequence[Row]) -> Image.Image:
    """One image, a row a text: caption, where the text looks, its heaviest tokens and where they look, all weights.

    Args: image [H, W, 3], square; about: a sentence under the title, which says what the maps are.
    """
    shown = max((len(row.tokens) for row in rows), default=0)
    weighty = any(row.weights is not None for row in rows)
    width = 2 * MARGIN + CAPTION + GAP + SIDE + shown * (GAP + SMALL) + (GAP + WEIGHTS if weighty else 0)
    height = MARGIN + HEAD + len(rows) * (SIDE + 2 * GAP) + MARGIN
    sheet = Image.new("RGB", (max(width, 640), height), PAPER)
    header(sheet, image, title, about, 560)
    _headings(sheet, shown, weighty)
    for n, row in enumerate(rows):
        _row(sheet, MARGIN + HEAD + n * (SIDE + 2 * GAP) + GAP, image, row, shown)
    return sheet


def overlay(image: Pixels, looks: Floats, side: int) -> Image.Image:
    """As `pictures.overlay`, as an image."""
    return Image.fromarray(pictures.overlay(image, looks, side))


def square(image: Pixels, side: int) -> Image.Image:
    """A square image at `side` pixels a side."""
    return Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)


def header(sheet: Image.Image, image: Pixels, title: str, about: str, width: int) -> None:
    """The plain image, beside it the title and a sentence of at most `width` pixels."""
    sheet.paste(square(image, PLAIN), (MARGIN, MARGIN))
    x = MARGIN + PLAIN + GAP
    room = sheet.width - MARGIN - x
    y = write_lines(sheet, (x, MARGIN), title, room, 22, INK, 1)
    write_lines(sheet, (x, y + 8), about, min(room, width), 14, MUTED, 4)


def _headings(sheet: Image.Image, shown: int, weighty: bool) -> None:
    """What the columns are, over the first row's line."""
    x, y = MARGIN + CAPTION + GAP, MARGIN + HEAD - 24
    write_lines(sheet, (x, y), "where the text looks", SIDE, 13, MUTED, 1)
    if shown:
        write_lines(sheet, (x + SIDE + GAP, y), "its heaviest tokens, and where they look", 400, 13, MUTED, 1)
    if weighty:
        x += SIDE + GAP + shown * (SMALL + GAP)
        write_lines(sheet, (x, y), "all mixing weights", WEIGHTS, 13, MUTED, 1)


def _row(sheet: Image.Image, y: int, image: Pixels, row: Row, shown: int) -> None:
    draw = ImageDraw.Draw(sheet)
    draw.line((MARGIN, y - GAP, sheet.width - MARGIN, y - GAP), RULE)
    below = write_lines(sheet, (MARGIN, y), row.text, CAPTION, 18, INK, 7)
    write_lines(sheet, (MARGIN, below + 8), row.note, CAPTION, 13, MUTED, 3)
    x = MARGIN + CAPTION + GAP
    sheet.paste(overlay(image, row.map, SIDE), (x, y))
    x += SIDE + GAP
    for n, token in enumerate(row.tokens):
        at = x + n * (SMALL + GAP)
        sheet.paste(overlay(image, token.map, SMALL), (at, y))
        below = write_lines(sheet, (at, y + SMALL + 8), token.name, SMALL, 14, INK, 1)
        write_lines(sheet, (at, below + 2), f"{token.share:.0%} of the mix", SMALL, 13, MUTED, 1)
    if row.weights is not None:
        _weights(sheet, (x + shown * (SMALL + GAP), y), row.weights)


def _weights(sheet: Image.Image, corner: tuple[int, int], weights: Floats) -> None:
    """Bars of the tokens' shares over their numbers, and below the weights of every head [M, N], a line a head."""
    heads, n = weights.shape
    (x, y), shares = corner, weights.mean(0)
    top = max(float(shares.max()), 1e-12)
    bottom = y + 20 + HIGH
    edges = [x + round(k * WEIGHTS / n) for k in range(n + 1)]
    for left, right, share in zip(edges, edges[1:], shares.tolist(), strict=False):
        _cell(sheet, left, right, bottom - max(round(HIGH * share / top), 1), bottom, BAR)
    stride = -(-n // (WEIGHTS // 20))
    for k in range(0, n, stride):
        write_lines(sheet, ((edges[k] + edges[k + 1]) // 2 - 3 * len(str(k)) - 1, bottom + 2), str(k), 40, 11, MUTED, 1)
    line = min(12.0, 68 / heads)
    for m, head in enumerate(weights.tolist()):
        above = bottom + 22 + round(m * line)
        for left, right, weight in zip(edges, edges[1:], head, strict=False):
            shade = tuple(round(p + (b - p) * weight) for p, b in zip(PAPER, BAR, strict=True))
            _cell(sheet, left, right, above, above + max(round(line) - 2, 1), shade)
    write_lines(sheet, (x, y), f"share of each of {n} tokens, up to {top:.0%}", WEIGHTS, 13, MUTED, 1)
    below = bottom + 26 + round(heads * line)
    write_lines(sheet, (x, below), f"the same by head, {heads} of them", WEIGHTS, 13, MUTED, 1)


def _cell(sheet: Image.Image, left: int, right: int, above: int, below: int, colour: tuple[int, ...]) -> None:
    """A filled rectangle; wide ones leave a gap to the next."""
    last = max(right - (3 if right - left >= 6 else 1), left)
    ImageDraw.Draw(sheet).rectangle((left, above, last, below), colour)


def write_lines(
    sheet: Image.Image, at: tuple[int, int], text: str, room: int, size: int, colour: tuple[int, ...], lines: int
) -> int:
    """Write text in at most `lines` lines of `room` pixels; returns where the next line would start."""
    draw, font = ImageDraw.Draw(sheet), font_for(text, size)
    x, y = at
    for line in wrap(text, font, room, lines):
        draw.text((x, y), line, colour, font)
        y += round(1.35 * size)
    return y


def font_for(text: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font; for letters beyond ASCII, which it lacks, DejaVu's where the machine has it."""
    if not text.translate(dict.fromkeys(map(ord, "“”–…"))).isascii():
        with suppress(OSError):
            return ImageFont.truetype("DejaVuSans.ttf", size)
    return ImageFont.load_default(size)


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, room: int, lines: int) -> list[str]:
    """At most `lines` lines of at most `room` pixels; "..." where text is cut."""
    wrapped, line = [], ""
    for word in text[:600].split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > room:
            wrapped.append(line)
            longer = word
        line = longer if font.getlength(longer) <= room else _shortened(longer, font, room)
    wrapped.append(line)
    if len(wrapped) <= lines:
        return wrapped
    return [*wrapped[: lines - 1], _shortened(wrapped[lines - 1], font, room)]


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, room: int) -> str:
    text = text.removesuffix("...")
    while text and font.getlength(text + "...") > room:
        text = text[:-1]
    return text + "..."
