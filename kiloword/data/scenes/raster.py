"""Drawing of scenes at any resolution, anti-aliased by signed distances."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
from PIL import ImageColor

from kiloword.data.scenes.world import SHAPES, Scene

Floats = npt.NDArray[np.floating]
Pixels = npt.NDArray[np.uint8]


COLOUR_RGB, BACKGROUND_RGB = (  # as `COLOURS`: red, orange, ...; as `BACKGROUNDS`
    [ImageColor.getrgb(colour) for colour in colours.split()]
    for colours in (
        "#e11923 #ff8700 #fae100 #149632 #00cde1 #1955f5 #8c23d2 #ff5fb9",
        "#ffffff #000000 #969696 #5f3c23 #e1d0af #0f194b",
    )
)
RADIUS = (0.34, 0.49)  # of small and large things, in cells
STROKE = 0.026  # width of a hollow thing's line, in images
STRIPES = 16  # an image
PALE = 0.35  # cover between stripes: keeps the silhouette of small things readable


def draw(scene: Scene, size: int, inner: bool = False) -> Pixels:
    """The image of a scene, uint8 [size, size, 3], RGB.

    Args: size: pixels a side, at least 24: below, small things blur; inner: nothing but background outside 1/4 to 3/4
    of both sides, from 48 pixels.
    """
    margin = math.ceil(size / 4) if inner else 0
    image = np.full((size, size, 3), BACKGROUND_RGB[scene.background], np.uint8)
    for thing in scene.things:
        y, x, cover = _mask(thing.shape, thing.size, thing.fill, thing.row, thing.column, size - 2 * margin)
        part = image[y + margin : y + margin + cover.shape[0], x + margin : x + margin + cover.shape[1]]
        part[:] = _shades(thing.colour, scene.background)[cover]
    return image


@cache
def _shades(colour: int, background: int) -> Pixels:
    """From the background's colour to the thing's, [256, 3]."""
    behind, before = np.array(BACKGROUND_RGB[background]), np.array(COLOUR_RGB[colour])
    return np.asarray(behind + np.arange(256)[:, None] / 255 * (before - behind) + 0.5).astype(np.uint8)


@lru_cache(maxsize=432)  # all that there are at one resolution
def _mask(shape: int, size: int, fill: int, row: int, column: int, side: int) -> tuple[int, int, Pixels]:
    """Cover of every pixel of the thing's cell, uint8 [h, w], 255 is all, and the cell's upper left corner."""
    cell = side / 3
    y0, y1 = round(row * cell), round((row + 1) * cell)
    x0, x1 = round(column * cell), round((column + 1) * cell)
    y, x = np.arange(y0, y1) + 0.5, np.arange(x0, x1) + 0.5
    radius = RADIUS[size] * cell
    xs, ys = np.meshgrid((x - (column + 0.5) * cell) / radius, (y - (row + 0.5) * cell) / radius)
    inside = -_distance(_OUTLINES[SHAPES[shape]], xs, ys) * radius  # pixels from the edge
    alpha = np.clip(inside + 0.5, 0, 1)
    if fill == 1:
        alpha *= PALE + (1 - PALE) * _stripes(y, side)[:, None]
    if fill == 2:
        alpha -= np.clip(inside - max(STROKE * side, 1.3) + 0.5, 0, 1)
    return y0, x0, (alpha * 255 + 0.5).astype(np.uint8)


def _stripes(y: Floats, side: int) -> Floats:
    """Share of each pixel row that a stripe covers, [h]; a stripe is half a period high."""
    period = side / STRIPES

    def covered(t: Floats) -> Floats:
        whole, part = np.divmod(t / period, 1.0)
        return np.asarray(period * (whole / 2 + np.minimum(part, 0.5)))

    return covered(y + 0.5) - covered(y - 0.5)


def _distance(corners: Floats, x: Floats, y: Floats) -> Floats:
    """Signed distance to a polygon [N, 2], negative inside; x, y and the result [h, w]."""
    a, b = corners, np.roll(corners, -1, 0)
    px, py = x[..., None] - a[:, 0], y[..., None] - a[:, 1]
    ex, ey = (b - a).T
    along = np.clip((px * ex + py * ey) / (ex**2 + ey**2), 0, 1)
    nearest = np.hypot(px - along * ex, py - along * ey).min(-1)
    straddles = (a[:, 1] > y[..., None]) != (b[:, 1] > y[..., None])
    with np.errstate(divide="ignore", invalid="ignore"):
        crossed = straddles & (px < py * ex / ey)
    return np.asarray(np.where(crossed.sum(-1) % 2 == 1, -nearest, nearest))


def _polar(radius: Floats | float, angle: Floats) -> Floats:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)


def _heart(t: Floats) -> Floats:
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    corners = np.stack([x, -y - 2.5], 1) / 16
    return corners[(np.abs(corners - np.roll(corners, 1, 0)) > 1e-6).any(1)]


def _moon() -> Floats:
    """A disc without a smaller disc on its right; the two arcs meet at the horns."""
    tip = np.deg2rad(50)
    big = _polar(1.0, np.linspace(tip, 2 * np.pi - tip, 36))
    radius = np.sin(tip) / np.sin(1.67)
    small = _polar(radius, np.linspace(2 * np.pi - 1.67, 1.67, 28)[1:-1])
    small += np.array([np.cos(tip) - radius * np.cos(1.67), 0])
    return np.asarray(np.concatenate([big, small]) + np.array([0.12, 0]))


_TURN = np.arange(48) * (2 * np.pi / 48)
_TENTHS = np.arange(10) * (np.pi / 5) - np.pi / 2
_ARM = np.array([(-0.34, -0.95), (0.34, -0.95), (0.34, -0.34)])
_OUTLINES = {  # corners of the shapes in the square from -1 to 1, y downward, [N, 2]
    "circle": _polar(0.96, _TURN),
    "star": _polar(np.where(np.arange(10) % 2 == 0, 1.06, 0.44), _TENTHS) + np.array([0, 0.08]),
    "heart": _heart(_TURN),
    "moon": _moon(),
    "square": np.array([(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)]),
    "triangle": np.array([(0, -0.92), (1, 0.82), (-1, 0.82)]),
    "diamond": np.array([(0, -1), (0.7, 0), (0, 1), (-0.7, 0)]),
    "cross": np.concatenate([_ARM, _ARM[:, ::-1] * (-1, 1), -_ARM, _ARM[:, ::-1] * (1, -1)]),
}
