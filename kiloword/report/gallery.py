"""Queries with the images that were retrieved for them; an image with lists of texts from general to specific."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from PIL import Image

Hit = tuple[npt.NDArray[np.uint8], float, bool | None]
"""An image [H, W, 3], its score, and whether it truly matches the query; None: nobody knows."""

SMALL = 96  # pixels: images below are enlarged with hard edges, as the model saw them


def gallery(queries: Sequence[tuple[str, Sequence[Hit]]]) -> str:
    """Each query's text above its best images, best first; true matches are outlined, ticked and named.

    Errors: ValueError when an image is not uint8 [H, W, 3].
    """
    return "".join(_query(text, hits) for text, hits in queries)


def tiles(images: Sequence[tuple[npt.NDArray[np.uint8], str]], columns: int = 6) -> str:
    """Images in rows of `columns`, each with a few words below it.

    Errors: ValueError when an image is not uint8 [H, W, 3].
    """
    items = "".join(
        f'<li><img{_size(image)} src="{image_data(image)}" alt="{escape(words)}" width="{image.shape[1]}" '
        f'height="{image.shape[0]}"><div><span>{escape(words)}</span></div></li>'
        for image, words in images
    )
    return f'<div class="query"><ol style="--n:{columns}">{items}</ol></div>'


def card(images: Sequence[tuple[npt.NDArray[np.uint8], str]], lines: Sequence[str], *, strong: str = "") -> str:
    """Images side by side, each with words below it, above lines of plain text; `strong` is the first, large.

    Errors: ValueError when an image is not uint8 [H, W, 3].
    """
    shown = "".join(
        f'<div><img{_size(image)} src="{image_data(image)}" alt="{escape(words)}" width="{image.shape[1]}" '
        f'height="{image.shape[0]}"><span>{escape(words)}</span></div>'
        for image, words in images
    )
    first = f"<blockquote>{escape(strong)}</blockquote>" if strong else ""
    below = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return f'<figure class="card"><div>{shown}</div><figcaption>{first}{below}</figcaption></figure>'


def _size(image: npt.NDArray[np.uint8]) -> str:
    return ' class="small"' if max(image.shape[:2]) < SMALL else ""


def image_data(image: npt.NDArray[np.uint8]) -> str:
    """An image [H, W, 3] as a data address that holds a PNG."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"an image of the gallery is {image.dtype} {image.shape}, expected uint8 (H, W, 3)")
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def _query(text: str, hits: Sequence[Hit]) -> str:
    items = "".join(_hit(rank, text, hit) for rank, hit in enumerate(hits, start=1))
    return (
        f'<div class="query"><blockquote>“{escape(text)}”</blockquote>'
        f'<ol style="--n:{max(len(hits), 1)}">{items}</ol></div>'
    )


def _hit(rank: int, text: str, hit: Hit) -> str:
    image, score, match = hit
    height, width = image.shape[:2]
    known = "" if match is None else ", a match" if match else ", no match"
    alt = escape(f"Image {rank} for “{text}”, score {score:.2f}{known}")
    badge = "" if match is None else "<b>✓ match</b>" if match else "<span>no match</span>"
    return (
        f'<li{" class=match" if match else ""}><img{_size(image)} src="{image_data(image)}" alt="{alt}" '
        f'width="{width}" height="{height}"><div>{badge}<span>{score:.2f}</span></div></li>'
    )


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
