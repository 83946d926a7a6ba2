"""A figure of one image and its captions: under each caption strips of small images with words below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from kiloword.report.images import Pixels
from kiloword.report.overlay import GAP, INK, MARGIN, MUTED, PAPER, PLAIN, RULE, header, write_lines

WIDTH = 1180  # pixels


@dataclass(frozen=True)
class Panel:
    """A small image with its name and a few words."""

    image: Image.Image
    name: str
    note: str = ""


@dataclass(frozen=True)
class Strip:
    """Panels of one side, in lines as wide as the sheet."""

    title: str
    about: str  # a sentence: what is seen
    panels: Sequence[Panel]


@dataclass(frozen=True)
class CaptionStrips:
    """One caption and what is shown of it."""

    text: str
    note: str
    strips: Sequence[Strip]


def sheet(image: Pixels, title: str, about: str, blocks: Sequence[CaptionStrips]) -> Image.Image:
    """Draw the whole. Args: image [H, W, 3], square; about: a sentence under the title."""
    nothing = Image.new("RGB", (WIDTH, 1), PAPER)  # drawing outside of it has no effect: this measures the height
    made = Image.new("RGB", (WIDTH, _draw(nothing, image, title, about, blocks) + MARGIN), PAPER)
    _draw(made, image, title, about, blocks)
    return made


def _draw(on: Image.Image, image: Pixels, title: str, about: str, blocks: Sequence[CaptionStrips]) -> int:
    """Returns where the sheet ends, in pixels from its top; so do the others."""
    header(on, image, title, about, 640)
    y = MARGIN + PLAIN + GAP
    for block in blocks:
        y = _block(on, y, block) + GAP
    return y


def _block(on: Image.Image, y: int, block: CaptionStrips) -> int:
    room = WIDTH - 2 * MARGIN
    ImageDraw.Draw(on).line((MARGIN, y, WIDTH - MARGIN, y), RULE)
    y = write_lines(on, (MARGIN, y + 12), block.text, room, 19, INK, 6)
    y = write_lines(on, (MARGIN, y + 2), block.note, room, 13, MUTED, 2) + 12
    x, below = MARGIN, y
    for strip in block.strips:  # beside the one before, where it fits
        if x > MARGIN and x + _wide(strip) > WIDTH - MARGIN:
            x, y = MARGIN, below + GAP
        below = max(below, _strip(on, x, y, strip))
        x += _wide(strip) + 2 * GAP
    return below


def _wide(strip: Strip) -> int:
    """Pixels that all panels beside each other take; the words above want some, too."""
    return max(sum(panel.image.width + GAP for panel in strip.panels) - GAP, 2 * PLAIN)


def _strip(on: Image.Image, x: int, y: int, strip: Strip) -> int:
    right = min(x + _wide(strip), WIDTH - MARGIN)
    y = write_lines(on, (x, y), strip.title, right - x, 15, INK, 1)
    y = (write_lines(on, (x, y), strip.about, min(right - x, 800), 13, MUTED, 3) if strip.about else y) + 6
    across, below = x, y
    for panel in strip.panels:
        if across > x and across + panel.image.width > right:
            across, y = x, below + 12
        below = max(below, _panel(on, across, y, panel))
        across += panel.image.width + GAP
    return below


def _panel(on: Image.Image, x: int, y: int, panel: Panel) -> int:
    on.paste(panel.image, (x, y))
    y = write_lines(on, (x, y + panel.image.height + 6), panel.name, panel.image.width, 14, INK, 2)
    return write_lines(on, (x, y), panel.note, panel.image.width, 13, MUTED, 1) if panel.note else y
