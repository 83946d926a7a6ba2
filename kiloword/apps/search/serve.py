"""`kiloword serve`: one local site over a library, by the standard library's HTTP server.

It listens on the loopback unless asked otherwise, answers only requests that name this machine (a page elsewhere could
otherwise reach it under a name of its own), takes uploads of its own pages alone, and fetches nothing.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kiloword.apps.search.index import opened
from kiloword.apps.search.library import Library
from kiloword.apps.search.site import SITE_POLICY, Site, WebAnswer
from kiloword.errors import count
from kiloword.models.trust import NONE, Trust
from kiloword.terminal import say, show_traceback, warn

UPLOAD = 32 << 20  # bytes of an uploaded photo
LONGEST_NUMBER = 10  # digits of the length of an upload
QUIET_S = 30.0  # seconds after which a silent browser is let go
HEADERS = {
    "Content-Security-Policy": f"{SITE_POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def main(
    folder: Path,
    host: str = "127.0.0.1",
    port: int = 8321,
    open_: bool = False,
    model: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    trust: Trust = NONE,
) -> None:
    """Run `kiloword serve` until Ctrl-C. Raises: ValueError for a port in use, or a library of another model."""
    library = Library(folder)
    name = model or library.file.model
    with bound(host, port) as server:
        server.site = Site(library, opened(name, device, precision, trust, library.file.prefix), name)
        at = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
        say(f"{folder}: {count(len(server.site.ranker.library), 'photo')} at {at} (Ctrl-C ends it)")
        if not is_loopback(host):
            warn("everybody who reaches this address can search and see the photos.")
        if open_:
            import webbrowser

            webbrowser.open(at)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped.")


class SearchServer(ThreadingHTTPServer):
    """Listens; each request has a thread."""

    daemon_threads = True
    site: Site
    names: frozenset[str]  # of this machine

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error; anything else is shown."""
        kind, error, trace = sys.exc_info()
        if kind is not None and error is not None and trace is not None and not isinstance(error, OSError):
            show_traceback(kind, error, trace)


def bound(host: str, port: int) -> SearchServer:
    """A server that listens. Raises: ValueError for an address that cannot be had, with what to do."""
    if not 0 <= port < 65536:
        raise ValueError(f"--port is {port}: expected 1 to 65535, or 0 for any free one.")
    kind = type("Server", (SearchServer,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
    try:
        server: SearchServer = kind((host, port), Handler)
        server.names = frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})  # once: it may ask a server
        return server
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} is in use, perhaps by another kiloword serve: choose another --port (0: any free one)."
            ) from None
        raise ValueError(f"--host {host} --port {port} cannot be used ({error.strerror or error}).") from None


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(host: str, names: Collection[str]) -> bool:
    """Whether a Host header is one that a visitor of this server types: an address, localhost, one of `names`.

    A name that somebody else owns, and points here, is none (DNS rebinding).
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name in names
    return True


class Handler(BaseHTTPRequestHandler):
    """Requests as calls of the site."""

    server: SearchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "kiloword", ""
    timeout = QUIET_S

    def do_GET(self) -> None:
        """Pages and photos."""
        self._answer(self._page)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """A search by an uploaded photo."""
        self._answer(self._like_upload)

    def _answer(self, made: Callable[[], WebAnswer]) -> None:
        """Send what a function makes of the request, or 400 for one that is malformed."""
        try:
            answer = self._refusal() or made()
        except ValueError:
            answer = self._failure(400, "The request cannot be read.")
        if answer.status != 200:
            self.close_connection = True  # a body may be left to read
        self._send(answer)

    def _page(self) -> WebAnswer:
        address = urlsplit(self.path)
        return self.server.site.get(address.path, address.query)

    def _like_upload(self) -> WebAnswer:
        refusal = self._upload_refusal()
        if refusal is not None:
            return refusal
        body = self.rfile.read(int(self.headers["Content-Length"]))
        image = uploaded(self.headers.get("Content-Type", ""), body)
        return self.server.site.post(image) if image else self._failure(400, "No photo came: choose a file.")

    def _refusal(self) -> WebAnswer | None:
        if not names_this_machine(self.headers.get("Host", ""), self.server.names):
            return self._failure(421, "This server answers under its own address alone.")
        return None

    def _upload_refusal(self) -> WebAnswer | None:
        origin, length = self.headers.get("Origin"), self.headers.get("Content-Length", "")
        if origin is not None and urlsplit(origin).netloc != self.headers.get("Host"):
            return self._failure(403, "Photos are taken from this site's own pages alone.")
        if not (length.isascii() and length.isdigit()):
            return self._failure(411, "The upload does not say how long it is.")
        if len(length) > LONGEST_NUMBER or int(length) > UPLOAD:
            return self._failure(413, f"The photo has more than {UPLOAD >> 20} MiB: choose a smaller one.")
        return None

    def _failure(self, status: int, message: str) -> WebAnswer:
        return self.server.site.failure(status, message)

    def _send(self, answer: WebAnswer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "private, max-age=86400, immutable" if answer.lasting else "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def end_headers(self) -> None:
        """Every answer has these, those of the standard library too."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: queries are private."""


def uploaded(kind: str, body: bytes) -> bytes:
    """The file of a form (multipart/form-data); b"" for none. Raises: ValueError for a malformed one."""
    if not kind.lower().startswith("multipart/form-data"):
        return b""
    head = b"Content-Type: " + kind.encode("latin-1", "replace") + b"\r\n\r\n"
    try:
        return next(_files(BytesParser(policy=HTTP).parsebytes(head + body)), b"")
    except Exception as error:  # RecursionError for nested forms, IndexError for some headers
        raise ValueError("the form cannot be read.") from error


def _files(message: Message) -> Iterator[bytes]:
    parts = message.get_payload()
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, Message) and part.get_param("name", header="content-disposition") == "image":
            payload = part.get_payload(decode=True)
            if isinstance(payload, bytes):
                yield payload
