"""Images on a page, each with words: galleries of queries, tiles, cards, and ladders of texts.

All functions raise a ValueError for an image that is not uint8 [H, W, 3].
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Sequence
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from kiloword.report.page import Html

Pixels = npt.NDArray[np.uint8]
Named = tuple[Pixels, str]
"""An image [H, W, 3] and a few words."""

Hit = tuple[Pixels, float, bool | None]
"""An image [H, W, 3], its score, and whether it truly matches the query; None: unknown."""

Steps = tuple[str, Sequence[tuple[str, bool | None]]]
"""A heading, and texts, each with whether it is right; None: unknown, or not marked."""

SMALL = 96  # pixels: smaller images are enlarged with hard edges, as the model saw them


def gallery(queries: Sequence[tuple[str, Sequence[Hit]]]) -> Html:
    """Each query's text above its best images, best first; true matches are outlined, ticked and named."""
    return Html(
        "".join(
            f'<div class="query"><blockquote>“{escape(text)}”</blockquote><ol style="--n:{max(len(hits), 1)}">'
            + "".join(_hit(rank, text, hit) for rank, hit in enumerate(hits, start=1))
            + "</ol></div>"
            for text, hits in queries
        )
    )


def _hit(rank: int, text: str, hit: Hit) -> str:
    pixels, score, match = hit
    verdict = "" if match is None else ", a match" if match else ", no match"
    badge = "" if match is None else "<b>✓ match</b>" if match else "<span>no match</span>"
    image = _image(pixels, f"Image {rank} for “{text}”, score {score:.2f}{verdict}")
    return f"<li{' class=match' if match else ''}>{image}<div>{badge}<span>{score:.2f}</span></div></li>"


def tiles(images: Sequence[Named], columns: int = 6, matches: Collection[int] = ()) -> Html:
    """Images in rows of `columns`, each with a few words below it; those at the places `matches` are outlined."""
    items = (_tile(*one, match=place in matches) for place, one in enumerate(images))
    return Html(f'<div class="query"><ol style="--n:{columns}">{"".join(items)}</ol></div>')


def _tile(pixels: Pixels, words: str, match: bool) -> str:
    tick = "<b>✓</b>" if match else ""
    image = _image(pixels, f"{words}{', a match' if match else ''}")
    return f"<li{' class=match' if match else ''}>{image}<div>{tick}<span>{escape(words)}</span></div></li>"


def card(images: Sequence[Named], lines: Sequence[str], *, strong: str = "") -> Html:
    """Images side by side, each with words below it, above lines of plain text; `strong` is the first, large."""
    shown = "".join(f"<div>{_named(*one)}</div>" for one in images)
    first = f"<blockquote>{escape(strong)}</blockquote>" if strong else ""
    below = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return Html(f'<figure class="card"><div>{shown}</div><figcaption>{first}{below}</figcaption></figure>')


def ladder(pixels: Pixels, name: str, columns: Sequence[Steps]) -> Html:
    """An image [H, W, 3] above the first of some lists of texts, the others beside it; right ones are ticked."""
    lists = [
        f"<h3>{escape(heading)}</h3><ol>"
        + "".join(f"<li>{'<b>✓</b> ' if right else ''}{escape(text)}</li>" for text, right in steps)
        + "</ol>"
        for heading, steps in columns
    ]
    first, *rest = lists or [""]
    beside = "".join(f"<div>{one}</div>" for one in rest)
    return Html(f'<figure class="ladder"><div>{_named(pixels, name)}{first}</div>{beside}</figure>')


def _named(pixels: Pixels, words: str) -> str:
    return f"{_image(pixels, words)}<span>{escape(words)}</span>"


def _image(pixels: Pixels, words: str) -> str:
    """The tag of an image [H, W, 3], with words for readers who do not see it."""
    data, (height, width) = image_data(pixels), pixels.shape[:2]
    small = ' class="small"' if max(height, width) < SMALL else ""
    return f'<img{small} src="{data}" alt="{escape(words)}" width="{width}" height="{height}">'


def image_data(pixels: Pixels) -> str:
    """An image [H, W, 3] as a data address that holds a PNG, or a JPEG where that is far smaller, as of a photo."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"an image of the gallery is {pixels.dtype} {pixels.shape}, expected uint8 (H, W, 3)")
    return _address(pixels.tobytes(), pixels.shape)


@lru_cache(64)
def _address(raw: bytes, shape: tuple[int, ...]) -> str:
    """As `image_data`; pages show some images several times."""
    pixels = np.frombuffer(raw, np.uint8).reshape(shape)
    photo = _encoded(pixels, "JPEG", quality=85) if min(shape[:2]) >= SMALL else b""
    if photo and len(photo) < len(_encoded(pixels, "PNG")) / 3:
        return "data:image/jpeg;base64," + base64.b64encode(photo).decode("ascii")
    return "data:image/png;base64," + base64.b64encode(_encoded(pixels, "PNG", optimize=True)).decode("ascii")


def _encoded(pixels: Pixels, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()
