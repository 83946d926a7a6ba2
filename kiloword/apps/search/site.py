"""The site of `kiloword serve`, an application of starlette over a library.

It answers only under names of this machine (a page elsewhere could otherwise reach it under a name of its own), takes
uploads of its own pages alone, and fetches nothing. Pages hold no script, their template escapes everything, and photos
are encoded anew, so that no byte of a file, such as where it was taken, reaches the browser.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import threading
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kiloword.apps.search.library import Library, version_of
from kiloword.apps.search.rank import Part, find, listed, shrunk
from kiloword.report import Page, plain
from kiloword.report.render import POLICY, environment

if TYPE_CHECKING:
    from kiloword.api import Matcher

SHOWN = 120  # photos of a page, at most
SIDES = {"thumb": 320, "large": 1280}  # pixels of the longer side
UPLOAD, UPLOAD_S = 32 << 20, 30.0  # bytes of an uploaded form, and seconds that it takes
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
        self.one = threading.Lock()  # the model answers one query at a time

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
        """The page or the JSON of a text, of a photo of the library (like), or of the first photos."""
        library, asked = self.now(), request.query_params
        query, title, about = list[Part](), "Search", ""
        if "like" in asked:
            query, title = [(library.features["vec"][_row(library, asked["like"])], 1)], "More like this"
        elif "q" in asked:
            query, title = [(asked["q"], 1)], f"“{asked['q'].strip()[:200]}”"
            for tokens, read in self.matcher.tokenizer.cut([asked["q"]], self.matcher.model.config.text).values():
                about += f"\n\nThe query has {tokens} tokens; the model reads {read}."
        with self.one:
            photos = listed(library, find(library, self.matcher, query, SHOWN, asked.get("in", "")))
        if request.url.path != "/":
            return Response(json.dumps(photos), media_type="application/json")  # any file names, as ASCII
        return _page(title, f"{len(photos):,} of {len(library):,} photos{about}", asked, photos)

    async def upload(self, request: Request) -> Response:
        """Photos most like an uploaded one."""
        origin, length = request.headers.get("origin"), request.headers.get("content-length", "")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            raise HTTPException(403, "Only this site's own pages can upload photos.")
        if not length:
            raise HTTPException(411, "The upload does not say how long it is.")
        if int(length) > UPLOAD:
            raise HTTPException(413, f"The photo has more than {UPLOAD >> 20} MiB: choose a smaller one.")
        async with asyncio.timeout(UPLOAD_S), request.form(max_files=1, max_fields=1) as form:
            file = form.get("image")
            image = await file.read() if isinstance(file, UploadFile) else b""
        if not image:
            raise HTTPException(400, "The upload holds no photo: choose a file.")
        return await run_in_threadpool(self._like, image)

    def _like(self, image: bytes) -> Response:
        library = self.now()
        try:
            with self.one:
                found = find(library, self.matcher, [(image, 1)], SHOWN)
        except ValueError as error:
            raise HTTPException(400, f"The photo cannot be used: {error.__cause__ or error}") from None
        return _page("Photos like yours", "", {}, listed(library, found))

    def image(self, request: Request) -> Response:
        """A photo as a JPEG without anything else of its file."""
        library, number, side = self.now(), request.path_params["id"], SIDES.get(request.path_params["size"])
        try:
            photo = library.photo(_row(library, number if side else ""))
            return Response(_jpeg(number, photo, side or 0), 200, LASTING, "image/jpeg")
        except ValueError as error:
            raise HTTPException(404, f"{error} Index the photos again to forget it.") from None


def _row(library: Library, number: str) -> int:
    if (row := library.row_of(number)) < 0:
        raise HTTPException(404, "There is no such photo (any more).")
    return row


def _page(
    title: str, about: str, asked: Mapping[str, str], photos: list[Any] | None = None, status: int = 200
) -> Response:
    template = environment(Path(__file__).parent).get_template("site.html")
    page = Page(title, about, {})
    html = template.render(page=page, policy=SITE_POLICY, asked=asked, photos=photos)
    return Response(plain(html), status, {"Cache-Control": "no-store"}, "text/html")


def _failure(request: Request, error: Exception) -> Response:
    """What is wrong: a page, or {"error": TEXT} where JSON was asked for."""
    status, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (400, str(error))
    text = text[:1].upper() + text[1:500]
    if request.url.path == "/photos.json":
        return JSONResponse({"error": text}, status)
    return _page("Search", text, {}, status=status)


@lru_cache(1024)  # photos of 15 to 300 kB each
def _jpeg(number: str, photo: Path, side: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(shrunk(photo, side)).save(file, "JPEG", quality=85)
    return file.getvalue()


def application(library: Library, matcher: Matcher, host: str) -> ASGIApp:
    """The site of a library. Args: host: a name that it answers under, as it does under any address."""
    site = Site(library, matcher)
    names = {name.lower() for name in ("localhost", host, socket.gethostname(), socket.getfqdn())}
    routes = [
        *(Route(path, site.search) for path in ("/", "/photos.json")),
        Route("/", site.upload, methods=["POST"]),
        Route("/{size}/{id}", site.image),
    ]
    failures = dict.fromkeys((HTTPException, ValueError, ClientDisconnect, TimeoutError), _failure)
    inner = Starlette(routes=routes, exception_handlers=failures)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope).get("host", "")
        wrong = f"This site does not answer under the name “{asked[:100]}”: open it by an address of this machine, or "
        here = _is_here(asked, names)
        answer = inner if here else _page("Search", wrong + "as localhost.", {}, status=400)
        await answer(scope, receive, send)

    return application


def _is_here(host: str, names: set[str]) -> bool:
    """Whether a header Host has one of the names, or an address: no name of the internet is one."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:\d*)?", host)
    name = found[1].lower() if found else ""
    try:
        return name in names or bool(ip_address(name.strip("[]")))
    except ValueError:
        return False
