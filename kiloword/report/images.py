"""Images on a page, each with words: galleries of queries, tiles, cards, and ladders of texts.

All functions raise a ValueError for an image that is not uint8 [H, W, 3].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from kiloword.report.blocks import Pixels
from kiloword.report.page import Html
from kiloword.report.pictures import SMALL, image_data

__all__ = ["Pixels", "card", "gallery", "image_data", "ladder", "tiles"]

Named = tuple[Pixels, str]
"""An image [H, W, 3] and a few words."""

Hit = tuple[Pixels, float, bool | None]
"""An image [H, W, 3], its score, and whether it truly matches the query; None: unknown."""

Steps = tuple[str, Sequence[tuple[str, bool | None]]]
"""A heading, and texts, each with whether it is right; None: unknown, or not marked."""


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
