"""An image beside lists of what was said of it, from general to specific."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from kiloword.report.gallery import SMALL, image_data

Steps = tuple[str, Sequence[tuple[str, bool | None]]]
"""A heading, and texts, each with whether it is right; None: nobody knows, or it needs no saying."""


def ladder(image: npt.NDArray[np.uint8], name: str, columns: Sequence[Steps]) -> str:
    """An image [H, W, 3] above the first of some lists of texts, the others beside it; right ones are ticked.

    Errors: ValueError when the image is not uint8 [H, W, 3].
    """
    height, width = image.shape[:2]
    small = ' class="small"' if max(height, width) < SMALL else ""
    tag = f'<img{small} src="{image_data(image)}" alt="{escape(name)}" width="{width}" height="{height}">'
    first = f"{tag}<span>{escape(name)}</span>"
    lists = [f"<h3>{escape(heading)}</h3><ol>{_items(steps)}</ol>" for heading, steps in columns]
    rest = "".join(f"<div>{steps}</div>" for steps in lists[1:])
    return f'<figure class="ladder"><div>{first}{"".join(lists[:1])}</div>{rest}</figure>'


def _items(steps: Sequence[tuple[str, bool | None]]) -> str:
    return "".join(f"<li>{'<b>✓</b> ' if right else ''}{escape(text)}</li>" for text, right in steps)
