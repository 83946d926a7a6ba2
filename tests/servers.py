"""A local HTTP server that misbehaves on purpose."""

from __future__ import annotations

import base64
import http.client
import http.server
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

PLANTED = "planted"  # in every secret, and nowhere else
LOGIN, BASIC = "planteduser:planted%2Fpass", base64.b64encode(b"planteduser:planted/pass").decode()
QUERY = "?X-Amz-Signature=plantedsignature&X-Amz-Expires=60"


class Server:
    """Serves `files` (path without / -> bytes) on the loopback; `faults` of a path are used up one a request.

    Faults: stall (no byte after the headers), hang (no headers), cut (half of the body, then a reset), short (half of
    it, then an orderly end), shorter (the same under a Content-Length that fits), drip (slow), drop (no answer), page
    (200 and other content), redirect, and any status, such as "500" or "429:0.2" (Retry-After).
    """

    def __init__(self, files: dict[str, bytes], etag: Callable[[bytes], str] | None = None) -> None:
        self.files, self.etag = dict(files), etag
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.always: dict[str, str] = {}
        self.asked: Counter[str] = Counter()  # requests for a path, but for those that ask how long it is
        self.lock, self.over = threading.Lock(), threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 64

            def handle_error(self, *args: Any) -> None:  # clients go away: that is what is tested
                pass

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        name, span = request.path.lstrip("/").split("?")[0], request.headers.get("Range")
        probe = span == "bytes=0-0"
        with self.lock:
            self.asked[name] += not probe
            waiting = self.faults[name if not probe else f"{name} probe"]
            fault = waiting.pop(0) if waiting else self.always.get(name, "")
        request.close_connection = True
        content = self.files.get(name)
        if fault == "drop":
            return
        if fault == "hang":
            self.over.wait(30)
        elif fault == "redirect":
            self._head(request, 302, {"Location": f"{self.url}/{name}?again", "Content-Length": "0"})
        elif content is None or fault[:3].isdigit():
            code, _, wait = fault.partition(":")
            self._head(request, int(code or 404), {"Content-Length": "0"} | ({"Retry-After": wait} if wait else {}))
        else:
            self._send(request, content if fault != "page" else b"<html>try later</html>", span, fault)

    def _send(self, request: Any, content: bytes, span: str | None, fault: str) -> None:
        headers = {"Last-Modified": "Mon, 05 Oct 2026 07:28:00 GMT"}
        if self.etag:
            headers["ETag"] = self.etag(content)
        status, body = 200, content
        if span and fault != "page":
            first, last = (int(n) for n in span.removeprefix("bytes=").split("-"))
            status, body = 206, content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{len(content)}"
        half = body[: len(body) // 2]
        length = len(half) if fault == "shorter" else len(body)
        self._head(request, status, headers | {"Content-Length": str(length)})
        self._body(request, body, half, fault)

    def _body(self, request: Any, body: bytes, half: bytes, fault: str) -> None:
        if fault == "stall":
            self.over.wait(30)
        elif fault in ("cut", "short", "shorter"):
            self._write(request, half)
            if fault == "cut":
                time.sleep(0.05)  # what was sent arrives first
                request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                request.connection.close()
        elif fault == "drip":
            for n in range(0, len(body), 16):
                self._write(request, body[n : n + 16])
                if self.over.wait(0.02):
                    return
        else:
            self._write(request, body)

    def _write(self, request: Any, raw: bytes) -> None:
        request.wfile.write(raw)
        request.wfile.flush()

    def _head(self, request: Any, status: int, headers: dict[str, str]) -> None:
        request.send_response_only(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()


class Guarded(Server):
    """Gives nothing to a request without the login; of files that are in `signed` nothing without a signature."""

    def __init__(self, files: dict[str, bytes], signed: tuple[str, ...] = (), login: bool = True) -> None:
        super().__init__(files)
        self.signed, self.login, self.signature = signed, login, "plantedsignature"
        self.seen: list[tuple[str, str | None]] = []  # path with query, and the header Authorization
        self.targets: dict[str, str] = {}  # redirects

    def answer(self, request: Any) -> None:
        authorization = request.headers.get("Authorization")
        path, _, query = request.path.lstrip("/").partition("?")
        self.seen.append((request.path, authorization))
        if path in self.targets:
            self._head(request, 302, {"Location": self.targets[path], "Content-Length": "0"})
        elif self.login and authorization != f"Basic {BASIC}":
            self._head(request, 401, {"Content-Length": "0"})
        elif path in self.signed and f"X-Amz-Signature={self.signature}" not in query:
            self._head(request, 403, {"Content-Length": "0"})
        else:
            super().answer(request)

    def secret(self, path: str, query: str = QUERY) -> str:
        return f"{self.url.replace('//', f'//{LOGIN}@')}/{path}{query}"


class Site:
    """`kiloword serve` in a process of its own."""

    def __init__(self, library: Path) -> None:
        words = [sys.executable, "-m", "kiloword", "serve", str(library), "--port", "0", "--device", "cpu"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGINT)
        self.said, self.warned = self.process.communicate(timeout=30)

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Status, body and headers of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

    def connect(self, request: bytes) -> socket.socket:
        """A connection that has sent bytes that no client of HTTP sends."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(request)
        return connection

    def used(self) -> tuple[float, int]:
        """Seconds of processor time, and bytes of memory, at their peak."""
        proc = Path(f"/proc/{self.process.pid}")
        ticks = proc.joinpath("stat").read_text().rpartition(")")[2].split()[11:13]
        peak = proc.joinpath("status").read_text().partition("VmHWM:")[2].split()[0]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), 1024 * int(peak)
