"""The site of `kiloword serve`, an application of starlette over a library.

It answers only under names of this machine (a page elsewhere could otherwise reach it under a name of its own), takes
uploads of its own pages alone, and fetches nothing. Pages hold no script, their template escapes everything, and photos
are encoded anew, so that no byte of a file, such as where it was taken, reaches the browser.
"""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kiloword.apps.search.library import Library, version_of
from kiloword.apps.search.rank import Match, by_image, by_text, shrunk
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.report import Block, Gallery, Page, Table, Text, Tile, plain
from kiloword.report.pictures import overlay
from kiloword.report.render import POLICY, environment
from kiloword.types import BadSample

if TYPE_CHECKING:
    from kiloword.api import Matcher

SHOWN = 120  # photos of a page, at most
SIDES = {"thumb": 320, "large": 1280}  # pixels of the longer side
WHY, TOKENS = 480, 5  # pixels of the photo that shows why it matched; tokens shown of a model that mixes them
UPLOAD, UPLOADS, UPLOAD_S = 32 << 20, 4, 30.0  # bytes of an uploaded form; such forms at once; seconds that one takes
SITE_POLICY = POLICY.replace("img-src", "img-src 'self'").replace("form-action 'none'", "form-action 'self'")
HEADERS = [  # of every answer
    ("Content-Security-Policy", f"{SITE_POLICY}; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "same-origin"),  # without one, browsers send a form as if it came from elsewhere
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
]
LASTING = {"Cache-Control": "private, max-age=86400, immutable"}  # of photos, whose ids change with their files


class Site:
    """A library and the model that made it, for several threads."""

    def __init__(self, library: Library, matcher: Matcher) -> None:
        self.library, self.matcher = library, matcher
        self.one, self.uploads = threading.Lock(), asyncio.Semaphore(UPLOADS)  # the model answers one query at a time

    def now(self) -> Library:
        """The library as it is now. Raises: HTTPException for damage, and a library of another model."""
        library = self.library
        if version_of(library.folder) != library.version:
            try:
                library = Library(library.folder)
            except ValueError as error:
                raise HTTPException(503, str(error)) from None
            if library.file.fingerprint != self.library.file.fingerprint:
                raise HTTPException(503, "The library was made anew by another model: start kiloword serve again.")
            self.library = library
        return library

    def search(self, request: Request) -> Response:
        """The page of a text, of a photo of the library (like), or the first page."""
        library, asked = self.now(), request.query_params
        within, title, about = asked.get("in", ""), "Search", [f"{len(library):,} photos"]
        if "like" in asked:
            row = _row(library, asked["like"])
            found = by_image(library, library.features["vec"][row], SHOWN + 1, within)
            found = [match for match in found if match.row != row][:SHOWN]
            return _page("More like this", about, asked, {"Like this one": [Match(row)], "Photos": found}, library)
        if "q" not in asked:
            return _page(title, about, asked, {"Photos": [Match(row) for row in range(len(library))[:SHOWN]]}, library)
        title = f"“{asked['q'].strip()[:200]}”"
        with self.one:
            found = by_text(library, self.matcher, asked["q"], SHOWN, within)
            for tokens, read in self.matcher.tokenizer.cut([asked["q"]], self.matcher.model.config.text).values():
                about.append(f"The query has {tokens} tokens, of which the model reads {read}.")
            if "uncertainty" in library.features:
                of_text = float(self.matcher.uncertainty(self.matcher.encode_text([asked["q"]]))[0])
                about.append(f"The text's uncertainty is {of_text:.3g}; u is a photo's: high where it fits many texts.")
        return _page(title, about, asked, {"Photos": found}, library)

    async def upload(self, request: Request) -> Response:
        """Photos most like an uploaded one."""
        origin, length = request.headers.get("origin"), request.headers.get("content-length", "")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            raise HTTPException(403, "Photos are taken from this site's own pages alone.")
        if not length:
            raise HTTPException(411, "The upload does not say how long it is.")
        if int(length) > UPLOAD:
            raise HTTPException(413, f"The photo has more than {UPLOAD >> 20} MiB: choose a smaller one.")
        if self.uploads.locked():
            raise HTTPException(503, "Other photos are being uploaded: try again.")
        async with self.uploads, asyncio.timeout(UPLOAD_S):
            if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
                raise HTTPException(400, "No photo came: choose a file.")
            async with request.form(max_files=1, max_fields=1) as form:
                file = form.get("image")
                image = await file.read() if isinstance(file, UploadFile) else b""
        if not image:
            raise HTTPException(400, "No photo came: choose a file.")
        return await run_in_threadpool(self._like, image)

    def _like(self, image: bytes) -> Response:
        library = self.now()
        with self.one:
            vec = self.matcher.encode_image(image)["vec"].float().cpu().numpy()
            found = by_image(library, vec, SHOWN)
        return _page("Photos like yours", [], {}, {"Photos": found}, library)

    def photo(self, request: Request) -> Response:
        """The page of one photo, with why it matched a text."""
        library, asked = self.now(), request.query_params
        row = _row(library, request.path_params["id"])
        cells = library.cells(row)
        about, sections = [cells["caption"]] if cells["caption"] else [], dict[str, list[Block]]()
        if "uncertainty" in library.features:
            about.append(f"uncertainty {float(library.features['uncertainty'][row]):.3g}")
        if asked.get("q", "").strip():
            sections["Why it matched"] = self._why(library, row, asked["q"])
        return _page(cells["path"], about, asked, photo=cells, sections=sections)

    def _why(self, library: Library, row: int, text: str) -> list[Block]:
        """Where a text looks on a photo, if the model can say so."""
        resize = self.matcher.model.config.preprocess.resize
        try:
            raw = read_whole(library.photo(row), "it", MAX_IMAGE)
            pixels = EvalTransform(WHY, WHY if isinstance(resize, int) else resize)(raw).permute(1, 2, 0).numpy()
            with self.one:
                explained = self.matcher.explain(raw, [text])
        except (ValueError, OSError, BadSample) as error:
            return [Text(f"This model cannot show it: {error}")]
        looks = explained.maps[0, 0].view(explained.grid).float().cpu().numpy()
        lit = Gallery([Tile(overlay(pixels, looks, WHY), ["the photo, lit where the text looks"])], columns=2)
        shares = explained.shares
        best = [] if shares is None else [x.tolist() for x in shares[0, 0].topk(min(TOKENS, shares.shape[-1]))]
        rows = [[f"token {n}", f"{share:.1%}"] for share, n in zip(*best, strict=True)]
        tokens = Table(rows, ["mixture token", "share in the photo's vector for this text"])
        return [Text(f"Score {float(explained.scores[0, 0]):.3f}. {explained.about}"), lit, tokens]

    def image(self, request: Request) -> Response:
        """A photo as a JPEG without anything else of its file."""
        library, number, side = self.now(), request.path_params["id"], SIDES.get(request.path_params["size"])
        try:
            photo = library.photo(_row(library, number if side else ""))
            return Response(_jpeg(number, photo, side or 0), 200, LASTING, "image/jpeg")
        except ValueError as error:
            raise HTTPException(404, f"{error} Index the photos again to forget it.") from None


def _row(library: Library, number: str) -> int:
    if (row := library.row_of(number)) is None:
        raise HTTPException(404, "There is no such photo (any more).")
    return row


def _page(
    title: str,
    about: Sequence[str],
    asked: Mapping[str, str],
    lists: Mapping[str, Sequence[Match]] | None = None,
    library: Library | None = None,
    photo: Mapping[str, Any] | None = None,
    sections: Mapping[str, Sequence[Block]] | None = None,
    status: int = 200,
) -> Response:
    shown = {
        heading: [(match, library.cells(match.row)) for match in matches if library]
        for heading, matches in (lists or {}).items()
    }
    query = urlencode({name: asked[name] for name in ("q", "in") if asked.get(name)})
    page = Page(title, "\n\n".join(about), sections or {})
    template = environment(Path(__file__).parent).get_template("site.html")
    html = template.render(page=page, policy=SITE_POLICY, asked=asked, lists=shown, photo=photo, query=query)
    return Response(plain(html), status, {"Cache-Control": "no-store"}, "text/html")


def _failure(request: Request, error: Exception) -> Response:
    """A page that says what is wrong."""
    status, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (400, str(error))
    return _page("Search", [text[:1].upper() + text[1:500]], {}, status=status)


@lru_cache(1024)  # photos of 15 to 300 kB each
def _jpeg(number: str, photo: Path, side: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(shrunk(photo, side)).save(file, "JPEG", quality=85)
    return file.getvalue()


def application(library: Library, matcher: Matcher, host: str) -> Starlette:
    """The site of a library. Args: host: a name that it answers under, as it does under any address."""
    site, names = (
        Site(library, matcher),
        ["localhost", "[::1]", host, f"[{host}]", socket.gethostname(), socket.getfqdn()],
    )
    names += [f"*.{n}" for n in range(256)]  # no name of the internet ends in a number
    routes = [
        Route("/", site.search),
        Route("/", site.upload, methods=["POST"]),
        Route("/photo/{id}", site.photo),
        Route("/{size}/{id}", site.image),
    ]
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)
    failures = dict.fromkeys((HTTPException, ValueError, ClientDisconnect, TimeoutError), _failure)
    return Starlette(routes=routes, middleware=[trusted], exception_handlers=failures)
