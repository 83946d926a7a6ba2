"""Instance masks of COCO's json: polygons, and run lengths, plain or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kiloword.types import BadSample

RegionMask = npt.NDArray[np.bool_]


def decode_mask(segmentation: Any, height: int, width: int) -> RegionMask:
    """The mask [H, W] of one annotation's `segmentation`.

    It is a list of polygons [x0, y0, x1, y1, ...], or `size` [H, W] and `counts`: run lengths, column by column, the
    first of zeros, as a list or as COCO's compressed string. The mask is the union of the polygons, whose pixels are
    those with their centre inside, by the even-odd rule (pycocotools can differ in pixels on an edge).

    Raises: BadSample with the reason.
    """
    if isinstance(segmentation, dict):
        return _runs(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        raise BadSample("a segmentation is neither polygons nor run lengths")
    mask = np.zeros((height, width), np.bool_)
    for polygon in segmentation:
        mask |= _polygon(_corners(polygon), height, width)
    return mask


def _runs(segmentation: dict[str, Any], height: int, width: int) -> RegionMask:
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if size != [height, width]:
        raise BadSample(f"a mask of size {size} in an image of [{height}, {width}]")
    if isinstance(counts, str | bytes):
        counts = decompress(counts.encode() if isinstance(counts, str) else counts)
    if not isinstance(counts, list) or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise BadSample("the run lengths of a mask are not whole numbers from 0 up")
    if sum(counts) != height * width:
        raise BadSample(f"the run lengths of a mask cover {sum(counts)} pixels of {height * width}")
    values = np.arange(len(counts)) % 2 == 1
    return np.repeat(values, counts).reshape(width, height).T


def decompress(counts: bytes) -> list[int]:
    """COCO's compressed run lengths.

    A number is written in groups of 5 bits, lowest first, each as a character from "0" (48). Bit 32 marks that more
    follow; the highest bit of the last group is the sign. From the fourth on, each number is the difference to the one
    two before. Raises BadSample for a string that ends within a number, or another character.
    """
    numbers: list[int] = []
    value = shift = 0
    for character in counts:
        group = character - 48
        if not 0 <= group < 64:
            raise BadSample("the compressed run lengths of a mask contain an invalid character")
        value |= (group & 31) << shift
        shift += 5
        if not group & 32:
            value -= (group >> 4 & 1) << shift  # the sign
            numbers.append(value + (numbers[-2] if len(numbers) > 2 else 0))
            value = shift = 0
    if shift:
        raise BadSample("the compressed run lengths of a mask end within a number")
    return numbers


def _corners(polygon: Any) -> npt.NDArray[np.float64]:
    """[N, 2] x and y of a flat list."""
    if not isinstance(polygon, Sequence) or len(polygon) < 6 or len(polygon) % 2:
        raise BadSample("a polygon is not a list of three corners or more, x and y each")
    try:
        corners = np.array(polygon, np.float64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise BadSample("a corner of a polygon is not a number") from None
    if not np.isfinite(corners).all():
        raise BadSample("a corner of a polygon is not finite")
    return corners


def _polygon(corners: npt.NDArray[np.float64], height: int, width: int) -> RegionMask:
    """Pixels with their centre inside a polygon: those of each row with an odd number of edges to their left."""
    mask = np.zeros((height, width), np.bool_)
    x, y = corners.T
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    first, last = max(0, int(np.floor(y.min()))), min(height, int(np.ceil(y.max())))
    for row in range(first, last):
        at = row + 0.5
        edges = (y <= at) != (next_y <= at)
        crossing = x[edges] + (at - y[edges]) / (next_y[edges] - y[edges]) * (next_x[edges] - x[edges])
        starts = np.ceil(np.sort(crossing) - 0.5).clip(0, width).astype(np.int64)  # first centre at or right of each
        for start, end in zip(starts[::2], starts[1::2], strict=True):
            mask[row, start:end] ^= True
    return mask
