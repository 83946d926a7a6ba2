"""`kiloword search`: the best photos for a text or a photo, as a table, JSON or a page."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kiloword.addresses import is_url
from kiloword.apps.search.index import check_same_model, describe, opened_for
from kiloword.apps.search.library import Library
from kiloword.apps.search.page import results_page
from kiloword.apps.search.rank import Match, Ranker, check_query, query_image
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.files import write_json
from kiloword.models.trust import NONE, Trust
from kiloword.report import write
from kiloword.terminal import say, shown, warn
from kiloword.types import BadSample


def main(
    folder: Path,
    query: str | None,
    like: Path | None = None,
    top: int = 10,
    within: str = "",
    json: Path | None = None,
    page: Path | None = None,
    open_: bool = False,
    model: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    trust: Trust = NONE,
    dim: int | None = None,
    rescore: int | None = None,
) -> None:
    """Run and print `kiloword search`.

    Raises: ValueError for a query that is empty or too long, an image that cannot be read, a library of another model.
    """
    if (query is None) == (like is None):
        came = "neither" if query is None else "both"
        raise ValueError(
            f"search needs a text or --like PHOTO, one of them, and got {came}: kiloword search LIBRARY 'a dog'."
        )
    if top < 1:
        raise ValueError(f"--top is {top}: expected at least 1.")
    words = like.name if like is not None else check_query(query or "")
    image = None if like is None else read_photo(like)
    library = Library(folder)
    matcher = opened_for(library, model, device, precision, trust, dim)
    began = time.perf_counter()
    vec = None if image is None else query_image(matcher, image, str(like))

    def searched(now: Library) -> tuple[Library, list[Match]]:
        check_same_model(now, library)
        ranker = Ranker(now, matcher, rescore)
        return now, ranker.by_text(words, top, within) if vec is None else ranker.by_image(vec, top, within)

    library, hits = library.now(searched)
    seconds = time.perf_counter() - began
    if not hits and within:
        warn(f"no photo of the library has {within!r} in its path, which is below {library.file.folder}.")
    _print(library, hits)
    notes = describe(library) if image is None else []
    say(*notes, f"{len(hits)} of {len(library):,} photos, {1000 * seconds:.0f} ms")
    if json is not None:
        write_json(json, as_json(library, words, hits))
    if page is not None or open_:
        _show(page or folder / "search.html", results_page(library, words, hits, notes, model), open_)


def read_photo(path: Path) -> bytes:
    """The bytes of a photo on disk. Raises: ValueError for a URL, and a file that cannot be read."""
    if is_url(str(path)) or str(path).startswith(("http:/", "https:/")):
        url = re.sub("^([a-z]+):/+", r"\1://", str(path))  # a path has lost a slash
        raise ValueError(f"--like got the URL {url}, and kiloword fetches nothing: download the photo, name its file.")
    try:
        return read_whole(path, "it", MAX_IMAGE)
    except (OSError, BadSample) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--like {path} cannot be read ({reason}): expected an image file.") from None


def as_json(library: Library, query: str, hits: Sequence[Match]) -> dict[str, Any]:
    """What --json writes."""
    results = []
    for hit in hits:
        part, inner = library.place(hit.row)
        one = {
            "path": part.paths[inner],
            "score": hit.score,
            "id": int(part.ids[inner]),
            "caption": part.captions[inner],
        }
        results.append(one | ({} if hit.uncertainty is None else {"uncertainty": hit.uncertainty}))
    return {"query": query, "folder": library.file.folder, "photos": len(library), "results": results} | (
        {"shortlist": library.file.recall} if library.file.recall else {}
    )


def _print(library: Library, hits: Sequence[Match]) -> None:
    """Print a line for each photo with its whole path, which a terminal wraps."""
    from rich.text import Text

    from kiloword.terminal.screen import Screen

    rows = [["", "score", *(["uncertainty"] if any(hit.uncertainty is not None for hit in hits) else []), "photo"]]
    for n, hit in enumerate(hits, 1):
        more = [f"{hit.uncertainty:.4g}"] if hit.uncertainty is not None else []
        rows.append([str(n), f"{hit.score:.3f}", *more, library.path(hit.row)])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    screen = Screen()
    for n, row in enumerate(rows):
        cells = (cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
        screen.print(Text("  ".join((*cells, shown(row[-1]))), "" if n else "bold"), soft_wrap=True)


def _show(path: Path, html: str, open_: bool) -> None:
    """Write the page, and open it in the browser."""
    write(path, html)
    say(f"page: {path}")
    if open_:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            warn("no browser was found: open the page yourself.")
