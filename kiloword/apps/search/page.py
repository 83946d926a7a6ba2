"""What pages of a search show: the page that `kiloword search` writes, and elements of those that are served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from kiloword.apps.search.library import Library
from kiloword.apps.search.rank import Match
from kiloword.data.images.decode import decode
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.report import Html, made_by, page, section, signed
from kiloword.report.images import Pixels, image_data
from kiloword.types import BadSample

THUMB = 320  # pixels of the longer side
ABOUT_UNCERTAINTY = "u is the photo's uncertainty, the sum of its variances: high where a photo fits many texts."


def shrunk(photo: Path, side: int) -> Pixels:
    """A photo with at most `side` pixels a side. Raises: ValueError for one that cannot be read."""
    try:
        pixels = decode(read_whole(photo, "it", MAX_IMAGE), at_least=side)
    except (OSError, BadSample) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"the photo cannot be read ({reason}).") from None
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.BICUBIC)
    return np.asarray(image)


def figures(library: Library, matches: Sequence[Match], query: str = "") -> Html:
    """Photos with scores and paths, best first.

    Args: query: as served, with links that carry it ("?q=..."); "": with the photos inside.
    """
    items = []
    for n, match in enumerate(matches, 1):
        part, inner = library.place(match.row)
        path, number = escape(_plain(part.paths[inner])), int(part.ids[inner])
        source = f"/thumb/{library.file.id}/{number}" if query else _inside(library, match.row)
        image = f'<img src="{source}" alt="{escape(part.captions[inner]) or path}" loading="lazy">'
        image = image if source else "<span>cannot be read</span>"
        image = f'<a href="/photo/{number}{escape(query)}">{image}</a>' if query else image
        items.append(f"<li>{image}{_scored(n, match, number if query else None)}<div>{path}</div></li>")
    return Html(f'<ol class="photos">{"".join(items)}</ol>') if items else Html("<p>No photo fits.</p>")


def _scored(n: int, match: Match, number: int | None) -> str:
    """The line below the nth photo; a score of NaN is none. Args: number: of the photo, for a link to similar ones."""
    like = (
        "" if number is None else f'<a href="/?like={number}" aria-label="more like this, photo {n}">more like this</a>'
    )
    if math.isnan(match.score):
        return f"<div>{like}</div>"
    words, between = f"{match.score:.3f}", " · "
    if match.uncertainty is not None:
        words, between = f"{words} · u {match.uncertainty:.3g}", " "  # the link stands in the next line
    return f"<div><b>{n}</b> {words}{between * bool(like)}{like}</div>"


def _inside(library: Library, row: int) -> str:
    try:
        return image_data(shrunk(library.photo(row), THUMB))
    except ValueError:
        return ""


def _plain(path: str) -> str:
    """A path as text that can be written as UTF-8."""
    return path.encode("utf-8", "backslashreplace").decode()


STYLE = """
main { max-width: 76rem; }
.photos { list-style: none; margin: 0 0 1.5rem; padding: 0; display: grid; gap: 1.25rem 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(46%, 11rem), 1fr)); }
.photos li { min-width: 0; font-size: .8rem; line-height: 1.45; color: var(--muted); overflow-wrap: anywhere; }
.photos img { display: block; width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: 3px;
  background: var(--rule); margin-bottom: .35rem; }
.photos b { color: var(--ink); font-weight: 600; }
.photos div a, p > a { display: inline-block; min-height: 24px; line-height: 24px; }
.ask { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; margin: 1.25rem 0 0; font-size: .95rem; }
.ask input, .ask button { font: inherit; padding: .5rem .7rem; color: var(--ink); background: var(--paper);
  border: 1px solid var(--muted); border-radius: 4px; max-width: 100%; }
.ask label { min-width: 0; max-width: 100%; }
.ask .q { flex: 1 1 16rem; min-width: 0; }
.ask .in { flex: 0 1 11rem; min-width: 0; }
.ask button { cursor: pointer; }
@media (max-width: 36rem) { .ask label, .ask label input { width: 100%; } }
.big img { display: block; max-width: 100%; height: auto; border-radius: 3px; }
"""


def results_page(
    library: Library, query: str, hits: Sequence[Match], notes: Sequence[str], model: str | None = None
) -> str:
    """The page that `kiloword search --page` writes, with the photos inside. Args: model: None: that of the library."""
    intro = f"The best {len(hits)} of {len(library):,} photos."
    uncertain = ABOUT_UNCERTAINTY if any(hit.uncertainty is not None for hit in hits) else None
    html = page(f"“{query}”", intro, [section("Photos", figures(library, hits), *notes, uncertain)], style=STYLE)
    return signed(html, made_by([model or library.file.model], library.file.folder))
