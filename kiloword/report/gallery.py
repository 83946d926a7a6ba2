"""Queries with the pictures that were found for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from PIL import Image

Hit = tuple[npt.NDArray[np.uint8], float, bool]
"""A picture [H, W, 3], its score, and whether it truly matches the query."""

SMALL = 96  # pixels: pictures below are enlarged with hard edges, as the model saw them


def gallery(queries: Sequence[tuple[str, Sequence[Hit]]]) -> str:
    """Each query's text above its best pictures, best first; true matches are outlined, ticked and named.

    Errors: ValueError when a picture is not uint8 [H, W, 3].
    """
    return "".join(_query(text, hits) for text, hits in queries)


def picture_data(picture: npt.NDArray[np.uint8]) -> str:
    """A picture [H, W, 3] as a data address that holds a PNG."""
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise ValueError(f"a picture of the gallery is {picture.dtype} {picture.shape}, expected uint8 (H, W, 3)")
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _query(text: str, hits: Sequence[Hit]) -> str:
    items = "".join(_hit(rank, text, hit) for rank, hit in enumerate(hits, start=1))
    return (
        f'<div class="query"><blockquote>“{escape(text)}”</blockquote>'
        f'<ol style="--n:{max(len(hits), 1)}">{items}</ol></div>'
    )


def _hit(rank: int, text: str, hit: Hit) -> str:
    picture, score, match = hit
    height, width = picture.shape[:2]
    alt = escape(f"Picture {rank} for “{text}”, score {score:.2f}, {'a match' if match else 'no match'}")
    size = ' class="small"' if max(height, width) < SMALL else ""
    badge = "<b>✓ match</b>" if match else "<span>no match</span>"
    return (
        f'<li{" class=match" if match else ""}><img{size} src="{picture_data(picture)}" alt="{alt}" '
        f'width="{width}" height="{height}"><div>{badge}<span>{score:.2f}</span></div></li>'
    )
