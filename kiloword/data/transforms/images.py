"""Two images as one. All are uint8 [3, H, W] of equal size; none is changed in place."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def halves(first: Tensor, second: Tensor, side_by_side: bool, squash: bool = False) -> Tensor:
    """Half of each image, put together to a whole one: left and right (halves [H, W / 2]), or above and below.

    The half is the image's centre (arXiv:2407.01408, section 3), or with `squash` the whole image squeezed. Of an
    odd side the second image gets the larger part; a centre that cannot be met exactly lies half a pixel to the left
    or up.
    """
    axis = 2 if side_by_side else 1
    length = first.shape[axis]
    parts = [(first, length // 2), (second, length - length // 2)]
    if squash:
        return torch.cat([_squeezed(image, size, axis) for image, size in parts], axis)
    return torch.cat([image.narrow(axis, (length - size) // 2, size) for image, size in parts], axis)


def _squeezed(image: Tensor, size: int, axis: int) -> Tensor:
    shape = [size if a == axis else image.shape[a] for a in (1, 2)]
    if 0 in shape:
        return image.narrow(axis, 0, 0)
    return F.interpolate(image[None], shape, mode="bicubic", antialias=True)[0]


def blend(first: Tensor, second: Tensor, share: float) -> Tensor:
    """MixUp: share x first + (1 - share) x second, pixel by pixel, rounded (arXiv:1710.09412, eq. 1)."""
    return torch.lerp(second.float(), first.float(), share).round().to(torch.uint8)


def box(height: int, width: int, share: float, down: float, right: float) -> tuple[int, int, int, int]:
    """CutMix's crop: top, left, height, width, the sides scaled by sqrt(1 - share) (arXiv:1905.04899, eq. 2).

    Args: down, right in [0, 1): where the crop lies among the places where it fits whole, so that its area is as drawn.
    """
    scale = math.sqrt(1 - share)
    high, wide = round(height * scale), round(width * scale)
    return int(down * (height - high + 1)), int(right * (width - wide + 1)), high, wide


def paste(onto: Tensor, source: Tensor, place: tuple[int, int, int, int]) -> Tensor:
    """`onto` with a box (top, left, height, width) of `source` at the same place."""
    top, left, high, wide = place
    out = onto.clone()
    out[:, top : top + high, left : left + wide] = source[:, top : top + high, left : left + wide]
    return out
