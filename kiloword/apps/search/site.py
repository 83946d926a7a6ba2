"""The pages of `kiloword serve`: from an address to an answer, without any network.

Pages hold no script. Everything from data and from the visitor is escaped; photos are decoded and encoded anew, so that
no byte of a stranger's file, nor where it was taken, reaches the browser; only numbers of the library name them.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

import numpy as np
from PIL import Image

from kiloword.addresses import is_url
from kiloword.apps.search.index import check_model, check_same_model, describe
from kiloword.apps.search.library import Library
from kiloword.apps.search.page import ABOUT_UNCERTAINTY, STYLE, THUMB, figures, shrunk
from kiloword.apps.search.rank import Match, Ranker, query_image
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.report import Html, page, section, stack, table
from kiloword.report.images import image_data
from kiloword.report.overlay import overlay
from kiloword.report.page import POLICY
from kiloword.types import BadSample

if TYPE_CHECKING:
    from kiloword.api import Matcher

SITE_POLICY = POLICY.replace("img-src data:", "img-src 'self' data:").replace(
    "form-action 'none'", "form-action 'self'"
)
SHOWN, MOST = 24, 240  # photos of a page, at first and at most
LARGE = 1280  # pixels of the longer side
WHY = 480  # pixels of the photo that shows why it matched
TOKENS = 5  # tokens shown of a model that mixes them
CACHED = 1024  # small photos in memory, of about 15 kB each


@dataclass(frozen=True)
class WebAnswer:
    """What a browser gets."""

    body: bytes
    kind: str = "text/html; charset=utf-8"
    status: int = 200

    @property
    def lasting(self) -> bool:
        """Whether browsers may keep it: photos, whose addresses never change their meaning."""
        return self.kind == "image/jpeg"


class Site:
    """A library and the model that made it, for several threads. Raises: ValueError for another model."""

    def __init__(self, library: Library, matcher: Matcher, model: str) -> None:
        check_model(library, matcher, model)
        self.matcher, self.ranker = matcher, library.now(lambda now: _loaded(now, library, matcher))
        self._one = threading.Lock()  # the model answers one query at a time
        self._swap = threading.Lock()  # of the ranker
        self._jpeg = lru_cache(CACHED)(_encoded)

    def get(self, path: str, query: str) -> WebAnswer:
        """The answer to an address: path and what follows its question mark."""

        def found(ranker: Ranker) -> WebAnswer:
            return self._get(ranker, path, dict(parse_qsl(query, keep_blank_values=True, max_num_fields=20)))

        return self._current(found)

    def post(self, image: bytes) -> WebAnswer:
        """Photos most like an uploaded one."""

        def found(ranker: Ranker) -> WebAnswer:
            with self._one:
                matches = ranker.by_image(query_image(self.matcher, image), SHOWN)
            return _results(ranker.library, "Photos like yours", {}, matches, "By the cosine of the photos' vectors.")

        return self._current(found)

    def failure(self, status: int, message: str) -> WebAnswer:
        """A page that says what is wrong."""
        return _page("Search", message[:1].upper() + message[1:], [], {}, status)

    def _current(self, answer: Callable[[Ranker], WebAnswer]) -> WebAnswer:
        """An answer from one state of the library, which an index may change at any moment."""
        for last in (False, True):
            try:
                ranker = self._fresh()
            except ValueError as error:
                if last:
                    return self.failure(503, str(error)[:500])
                continue
            try:
                return answer(ranker)
            except ValueError as error:
                if last or not ranker.library.changed:
                    return self.failure(400, str(error)[:500])
        raise AssertionError

    def _fresh(self) -> Ranker:
        """The ranker of the library as it is now. Raises: ValueError for damage, and a library of another model."""
        with self._swap:
            ranker, before = self.ranker, self.ranker.library
            self.ranker = before.now(lambda now: ranker if now is before else _loaded(now, before, self.matcher))
            return self.ranker

    def _get(self, ranker: Ranker, path: str, fields: Mapping[str, str]) -> WebAnswer:
        library = ranker.library
        named = re.fullmatch(rf"/(photo|(thumb|large)/{library.file.id})/([0-9]{{1,18}})", path)
        if path == "/":
            return self._search(ranker, fields)
        row = library.row_of.get(int(named[3])) if named else None
        if named is None or row is None:
            return self.failure(404, "There is no such page or photo.")
        if named[2] is None:
            return self._photo(library, row, fields)
        side = THUMB if named[2] == "thumb" else LARGE
        try:
            return WebAnswer(self._jpeg(library.file.id, int(named[3]), library.photo(row), side), "image/jpeg")
        except ValueError as error:
            return self.failure(404, f"{str(error).capitalize()} Index the photos again to forget it.")

    def _search(self, ranker: Ranker, fields: Mapping[str, str]) -> WebAnswer:
        """The page of a text, of a photo of the library (like), or the first page."""
        library, within = ranker.library, fields.get("in", "")
        count = fields.get("n", "")
        top = min(int(count), MOST) if re.fullmatch("[1-9][0-9]{0,3}", count) else SHOWN
        if "like" in fields:
            row = library.row_of.get(int(fields["like"])) if re.fullmatch("[0-9]{1,18}", fields["like"]) else None
            if row is None:
                return self.failure(404, "The library has no such photo (any more).")
            part, inner = library.place(row)
            matches = ranker.by_image(part.vectors([inner])[0], top, within, but=row)
            return _results(library, "More like this", fields, matches, f"More like {library.path(row)}.", source=row)
        if "q" not in fields:
            first = [Match(row, float("nan")) for row in range(min(SHOWN, len(library)))]
            return _page("Search", _size(library), [section("In the library", figures(library, first, "?"))], fields)
        with self._one:
            matches = ranker.by_text(fields["q"], top, within)
        about = self._about(library, fields["q"])
        return _results(library, f"“{fields['q'].strip()[:200]}”", fields, matches, about)

    def _about(self, library: Library, text: str) -> str:
        """What the reader of a text's results should know."""
        notes = describe(library)
        if is_url(text.strip()):
            notes = ["The query is an address, searched as words: nothing is fetched. Choose a photo's file below."]
        for tokens, read in self.matcher.tokenizer.cut([text], self.matcher.model.config.text).values():
            notes.append(f"The query has {tokens} tokens, of which the model reads {read}.")
        if library.file.gaussian:
            of_text = float(self.matcher.uncertainty(self.matcher.encode_text([text]))[0])
            notes.append(f"The text's uncertainty is {of_text:.3g}. {ABOUT_UNCERTAINTY}")
        return " ".join(note[:1].upper() + note[1:].rstrip(".") + "." for note in notes)

    def _photo(self, library: Library, row: int, fields: Mapping[str, str]) -> WebAnswer:
        """The page of one photo, with why it matched a text."""
        part, inner = library.place(row)
        number, path, caption = int(part.ids[inner]), part.paths[inner], part.captions[inner]
        large = f"/large/{library.file.id}/{number}"
        shown = Html(f'<p class="big"><img src="{large}" alt="{escape(caption or path)}"></p>')
        like = Html(f'<p><a href="/?like={number}">More like this</a></p>')
        about = [path, *([caption] if caption else [])]
        if "uncertainty" in part.uncertain:
            about.append(f"uncertainty {float(part.uncertain['uncertainty'][inner]):.3g}")
        sections = [section("Photo", shown, *about, like)]
        if fields.get("q", "").strip():
            sections.append(section("Why it matched", self._why(library, row, fields["q"])))
        return _page(path, _size(library), sections, fields)

    def _why(self, library: Library, row: int, text: str) -> Html:
        """Where a text looks on a photo, if the model can say so."""
        resize = self.matcher.model.config.preprocess.resize
        try:
            raw = read_whole(library.photo(row), "it", MAX_IMAGE)
            pixels = EvalTransform(WHY, WHY if isinstance(resize, int) else resize)(raw).permute(1, 2, 0).numpy()
            with self._one:
                explained = self.matcher.explain(raw, [text])
        except (ValueError, OSError, BadSample) as error:
            return stack(f"This model cannot show it: {error}")
        looks = explained.maps[0, 0].view(explained.grid).float().cpu().numpy()
        lit = image_data(np.asarray(overlay(pixels, looks, WHY)))
        shown = Html(f'<p class="big"><img src="{lit}" alt="the photo, lit where the text looks"></p>')
        weights = Html()
        if explained.shares is not None:
            best = explained.shares[0, 0].topk(min(TOKENS, explained.shares.shape[-1]))
            rows = [[f"token {n}", f"{share:.1%}"] for share, n in zip(*(x.tolist() for x in best), strict=True)]
            weights = table(rows, ["mixture token", "share in the photo's vector for this text"])
        return stack(f"Score {float(explained.scores[0, 0]):.3f}. {explained.about}", shown, weights)


def _loaded(library: Library, before: Library, matcher: Matcher) -> Ranker:
    """A ranker that needs the files of the library no more, but those of Gaussians' variances.

    Raises: ValueError for damage, and where another model made the library before.
    """
    check_same_model(library, before)
    for part in library.parts:
        part.load()
    return Ranker(library, matcher)


def _encoded(library: str, number: int, photo: Path, side: int) -> bytes:
    """A photo as a JPEG without anything else of its file. Args: library, number: its id, and that of the photo."""
    file = io.BytesIO()
    Image.fromarray(shrunk(photo, side)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _size(library: Library) -> str:
    return f"{len(library):,} photos"


def _results(
    library: Library,
    title: str,
    fields: Mapping[str, str],
    matches: Sequence[Match],
    about: str,
    source: int | None = None,
) -> WebAnswer:
    """The page of a search. Args: about: "": the library's size; source: row of the photo that others are like."""
    asked = {name: fields[name] for name in ("q", "in") if fields.get(name)}
    photos = figures(library, matches, f"?{urlencode(asked)}")
    origin = Html() if source is None else figures(library, [Match(source, float("nan"))], "?")
    more = Html()
    if len(matches) >= SHOWN and len(matches) < MOST and fields:
        address = urlencode({**fields, "n": str(len(matches) + SHOWN)})
        more = Html(f'<p><a href="/?{escape(address)}">Show more photos</a></p>')
    sections = [section("Like this one", origin), section("Photos", photos, more)]
    return _page(title, about or _size(library), sections, fields)


def _page(
    title: str, about: str, sections: Sequence[tuple[str, Html]], fields: Mapping[str, str], status: int = 200
) -> WebAnswer:
    html = page(title, about, sections, below=_forms(fields), style=STYLE, policy=SITE_POLICY)
    return WebAnswer(html.encode("utf-8", "backslashreplace"), status=status)


def _forms(fields: Mapping[str, str]) -> Html:
    """The fields of a search by words, and by a photo."""
    q, within = (escape(fields.get(name, "")[:1000]) for name in ("q", "in"))
    return Html(
        '<form class="ask" role="search" action="/" method="get">'
        f'<input class="q" type="search" name="q" value="{q}" aria-label="What the photo shows" '
        'placeholder="a dog on the beach" required autofocus>'
        f'<input class="in" name="in" value="{within}" aria-label="Part of the path" placeholder="path contains">'
        "<button>Search</button></form>"
        '<form class="ask" action="/" method="post" enctype="multipart/form-data">'
        '<label>or by a photo <input type="file" name="image" accept="image/*" required></label>'
        "<button>Search</button></form>"
    )
