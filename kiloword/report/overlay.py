"""A figure of one picture and what texts see in it: overlays of maps, mixing weights as bars. Drawn with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from kiloword.report.style import LIGHT, rgb

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.floating]

SIDE, SMALL = 240, 128  # pixels a side: a text's picture, a token's picture
CAPTION, WEIGHTS = 230, 260  # pixels: widths of the caption and of the weights' plot
GAP, MARGIN = 20, 28
HEAD = 150  # pixels: height of the title with the plain picture
GLOW = np.array([255, 138, 0])  # colour of what is looked at
PAPER, INK, MUTED, RULE, BAR = (rgb(LIGHT[name]) for name in ("paper", "ink", "muted", "rule", "s0"))


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
    weights: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # [M, N]; empty: no plot of them


def figure(picture: Pixels, title: str, about: str, rows: Sequence[Row]) -> Image.Image:
    """One picture, a row a text: caption, where the text looks, its heaviest tokens and where they look, all weights.

    Args: picture [H, W, 3], square; about: a sentence under the title, which says what the maps are.
    """
    shown = max((len(row.tokens) for row in rows), default=0)
    weighty = any(row.weights.size for row in rows)
    width = 2 * MARGIN + CAPTION + GAP + SIDE + shown * (GAP + SMALL) + (GAP + WEIGHTS if weighty else 0)
    height = MARGIN + HEAD + len(rows) * (SIDE + 2 * GAP) + MARGIN
    sheet = Image.new("RGB", (max(width, 640), height), PAPER)
    _header(sheet, picture, title, about)
    for n, row in enumerate(rows):
        _row(sheet, MARGIN + HEAD + n * (SIDE + 2 * GAP) + GAP, picture, row, shown)
    return sheet


def overlay(picture: Pixels, looks: Floats, side: int) -> Image.Image:
    """The picture [H, W, 3] at `side` pixels, pale and grey where a map [rows, columns] is low, glowing where high.

    Full glow is at the map's largest value, but at least at 4 times an even share, so that a map without any
    preference stays pale; what is below zero counts as zero.
    """
    positive = np.clip(np.asarray(looks, np.float32), 0, None)
    full = max(float(positive.max()), 4 * float(positive.mean()), 1e-12)
    strength = Image.fromarray(positive / full).resize((side, side), Image.Resampling.BICUBIC)
    glow = np.clip(np.asarray(strength), 0, 1)[..., None]  # [side, side, 1]
    colours = np.asarray(_square(picture, side), np.float32)
    pale = 0.5 * colours.mean(-1, keepdims=True) + 0.5 * 235
    lit = 0.72 * colours + 0.28 * GLOW
    return Image.fromarray((pale + glow * (lit - pale)).round().clip(0, 255).astype(np.uint8))


def _square(picture: Pixels, side: int) -> Image.Image:
    return Image.fromarray(picture).resize((side, side), Image.Resampling.BICUBIC)


def _header(sheet: Image.Image, picture: Pixels, title: str, about: str) -> None:
    sheet.paste(_square(picture, HEAD - GAP), (MARGIN, MARGIN))
    x, room = MARGIN + HEAD, sheet.width - 2 * MARGIN - HEAD
    y = _text(sheet, (x, MARGIN), title, room, 22, INK, 1)
    _text(sheet, (x, y + 8), about, min(room, 560), 14, MUTED, 4)


def _row(sheet: Image.Image, y: int, picture: Pixels, row: Row, shown: int) -> None:
    draw = ImageDraw.Draw(sheet)
    draw.line((MARGIN, y - GAP, sheet.width - MARGIN, y - GAP), RULE)
    below = _text(sheet, (MARGIN, y), row.text, CAPTION, 18, INK, 7)
    _text(sheet, (MARGIN, below + 8), row.note, CAPTION, 13, MUTED, 3)
    x = MARGIN + CAPTION + GAP
    sheet.paste(overlay(picture, row.map, SIDE), (x, y))
    x += SIDE + GAP
    for n, token in enumerate(row.tokens):
        at = x + n * (SMALL + GAP)
        sheet.paste(overlay(picture, token.map, SMALL), (at, y))
        below = _text(sheet, (at, y + SMALL + 8), token.name, SMALL, 14, INK, 1)
        _text(sheet, (at, below + 2), f"{token.share:.0%} of the mix", SMALL, 13, MUTED, 1)
    if row.weights.size:
        _weights(sheet, (x + shown * (SMALL + GAP), y), row.weights)


def _weights(sheet: Image.Image, corner: tuple[int, int], weights: Floats) -> None:
    """Bars of the tokens' shares, and under them the weights of every head [M, N], a line of cells a head."""
    draw = ImageDraw.Draw(sheet)
    heads, n = weights.shape
    shares = weights.mean(0)
    (x, y), step = corner, WEIGHTS / n
    high, line = 96, min(12.0, 72 / heads)
    top = max(float(shares.max()), 1e-12)
    for k, share in enumerate(shares.tolist()):
        left, right = x + round(k * step), x + max(round((k + 1) * step) - (2 if step >= 6 else 0), round(k * step) + 1)
        draw.rectangle((left, y + 20 + round(high * (1 - share / top)), right - 1, y + 20 + high), BAR)
        for m in range(heads):
            cell = tuple(round(p + (b - p) * float(weights[m, k])) for p, b in zip(PAPER, BAR, strict=True))
            above = y + 30 + high + round(m * line)
            draw.rectangle((left, above, right - 1, above + max(round(line) - 2, 1)), cell)
    draw.line((x, y + 21 + high, x + WEIGHTS - 1, y + 21 + high), RULE)
    _text(sheet, (x, y), f"share of each of {n} tokens, up to {top:.0%}", WEIGHTS, 13, MUTED, 1)
    _text(sheet, (x, y + 36 + high + round(heads * line)), f"the same by head, {heads} of them", WEIGHTS, 13, MUTED, 1)


def _text(
    sheet: Image.Image, at: tuple[int, int], text: str, room: int, size: int, colour: tuple[int, int, int], lines: int
) -> int:
    """Write text in at most so many lines of `room` pixels; returns where the next line would start."""
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size)
    x, y = at
    for line in wrap(text, font, room, lines):
        draw.text((x, y), line, colour, font)
        y += round(1.35 * size)
    return y


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, room: int, lines: int) -> list[str]:
    """At most `lines` lines of at most `room` pixels; "..." where text is left out."""
    wrapped, line = [], ""
    for word in text[:600].split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > room:
            wrapped.append(line)
            longer = word
        line = _fit(longer, font, room)
    wrapped.append(line)
    if len(wrapped) <= lines:
        return wrapped
    return [*wrapped[: lines - 1], _fit(wrapped[lines - 1], font, room - int(font.getlength("..."))) + "..."]


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, room: int) -> str:
    while text and font.getlength(text) > room:
        text = text[:-1]
    return text
