"""Images with patches covered, as a model sees them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kiloword.report.overlay import Pixels

STRIPES = (96, 150)  # greys of the cover: stripes cannot be taken for a part of the image


def covered(image: Pixels, hidden: npt.NDArray[np.bool_]) -> Pixels:
    """The image [H, W, 3] with striped grey where patches [rows, columns] are hidden; it may be of any size."""
    high, wide = image.shape[:2]
    rows = np.arange(high) * hidden.shape[0] // high
    columns = np.arange(wide) * hidden.shape[1] // wide
    step = max(high // 32, 2)  # pixels: width of a stripe
    stripe = (np.add.outer(np.arange(high), np.arange(wide)) // step) % 2
    cover = np.where(stripe, STRIPES[0], STRIPES[1]).astype(np.uint8)[..., None]
    shown: Pixels = np.where(hidden[rows][:, columns, None], cover, image)
    return shown
