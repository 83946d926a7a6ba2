"""What is drawn in a PNG that holds other images."""

from __future__ import annotations

import numpy as np
from PIL import Image


def holds(sheet: Image.Image, part: Image.Image) -> bool:
    """Whether an image stands somewhere in a sheet, pixel by pixel."""
    whole, small = np.asarray(sheet.convert("RGB")), np.asarray(part.convert("RGB"))
    high, wide = (whole.shape[k] - small.shape[k] + 1 for k in (0, 1))
    if high < 1 or wide < 1:
        return False
    first = (whole[:high, :wide] == small[0, 0]).all(-1)
    first &= (whole[small.shape[0] - 1 :, small.shape[1] - 1 :] == small[-1, -1]).all(-1)
    return any(
        (whole[y : y + small.shape[0], x : x + small.shape[1]] == small).all() for y, x in np.argwhere(first).tolist()
    )
