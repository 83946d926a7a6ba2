"""Queries with the pictures that were found for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from PIL import Image

Hit = tuple[npt.NDArray[np.uint8], float, bool | None]
"""A picture [H, W, 3], its score, and whether it truly matches the query; None: nobody knows."""

SMALL = 96  # pixels: pictures below are enlarged with hard edges, as the model saw them


def gallery(queries: Sequence[tuple[str, Sequence[Hit]]]) -> str:
    """Each query's text above its best pictures, best first; true matches are outlined, ticked and named.

    Errors: ValueError when a picture is not uint8 [H, W, 3].
    """
    return "".join(_query(text, hits) for text, hits in queries)


def tiles(pictures: Sequence[tuple[npt.NDArray[np.uint8], str]], columns: int = 6) -> str:
    """Pictures in rows of so many, each with a few words below it.

    Errors: ValueError when a picture is not uint8 [H, W, 3].
    """
    items = "".join(
        f'<li><img{_size(picture)} src="{picture_data(picture)}" alt="{escape(words)}" width="{picture.shape[1]}" '
        f'height="{picture.shape[0]}"><div><span>{escape(words)}</span></div></li>'
        for picture, words in pictures
    )
    return f'<div class="query"><ol style="--n:{columns}">{items}</ol></div>'


def card(pictures: Sequence[tuple[npt.NDArray[np.uint8], str]], lines: Sequence[str], *, strong: str = "") -> str:
    """Pictures side by side, each with words below it, above lines of plain text; `strong` is the first, large.

    Errors: ValueError when a picture is not uint8 [H, W, 3].
    """
    shown = "".join(
        f'<div><img{_size(picture)} src="{picture_data(picture)}" alt="{escape(words)}" width="{picture.shape[1]}" '
        f'height="{picture.shape[0]}"><span>{escape(words)}</span></div>'
        for picture, words in pictures
    )
    first = f"<blockquote>{escape(strong)}</blockquote>" if strong else ""
    below = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return f'<figure class="card"><div>{shown}</div><figcaption>{first}{below}</figcaption></figure>'


def _size(picture: npt.NDArray[np.uint8]) -> str:
    return ' class="small"' if max(picture.shape[:2]) < SMALL else ""


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
    known = "" if match is None else ", a match" if match else ", no match"
    alt = escape(f"Picture {rank} for “{text}”, score {score:.2f}{known}")
    badge = "" if match is None else "<b>✓ match</b>" if match else "<span>no match</span>"
    return (
        f'<li{" class=match" if match else ""}><img{_size(picture)} src="{picture_data(picture)}" alt="{alt}" '
        f'width="{width}" height="{height}"><div>{badge}<span>{score:.2f}</span></div></li>'
    )
