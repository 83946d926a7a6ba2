"""http and https by the standard library: time-outs a read, redirects, proxies, and no loop that a fork breaks."""

from __future__ import annotations

import base64
import binascii
import email.utils
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from typing import Any

from kiloword import __version__
from kiloword.data.remote_config import RemoteConfig
from kiloword.data.remote_errors import Fault, Unreachable, shown
from kiloword.data.remote_stat import Checksum, Stat

_CHUNK = 1 << 16
_SLOW = 1000  # bytes a second
_LATER = (408, 425, 429)  # client errors that may be over soon
_BY_CONTENT = re.compile(r'"?[0-9a-f]{32,64}(-\d+)?"?')  # ETags that are the same on every server of a cluster


class Http:
    """One URL. Raises Fault for what may be over soon, else Unreachable."""

    def __init__(self, url: str, config: RemoteConfig) -> None:
        self.url, self.config = url, config

    def stat(self) -> Stat:
        """By a GET of one byte: signed URLs refuse HEAD, and the answer says whether ranges work."""
        try:
            response = self._get("bytes=0-0")
        except urllib.error.HTTPError as error:
            if error.code != 416:
                raise self._refused(error) from None
            return Stat(0, "", True)  # no byte 0: the file is empty
        with response:
            headers: Message = response.headers
            ranged = response.status == 206
            size = headers.get("Content-Range", "").rpartition("/")[2] if ranged else headers.get("Content-Length", "")
        if not size.isdigit():
            raise Unreachable(f"{shown(self.url)}: the server does not say how long it is. Expected a Content-Length.")
        return Stat(int(size), _tag(headers), ranged, _checksum(headers))

    def read(self, stat: Stat, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start`, of servers without ranges by reading past what comes before."""
        try:
            response = self._get(f"bytes={start}-{stop - 1}")
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        with response:
            skip = self._check(response, stat, start)
            for chunk in self._chunks(response, stop - start + skip):
                if skip < len(chunk):
                    yield chunk[skip:]
                skip = max(0, skip - len(chunk))

    def small(self, most: int) -> bytes | None:
        """A small file; None where there is none (S3 says 403 to those who may not list)."""
        try:
            response = self._get(None)
        except urllib.error.HTTPError as error:
            if error.code in (403, 404, 410):
                return None
            raise self._refused(error) from None
        with response:
            raw = b"".join(self._chunks(response, most))
            length = response.headers.get("Content-Length", "")
        if length.isdigit() and len(raw) < min(int(length), most):
            raise Fault(f"the body ended after {len(raw):,} of {int(length):,} bytes")
        return raw

    def _get(self, span: str | None) -> Any:
        """The response. Raises: HTTPError (not of servers that are down), Fault, Unreachable."""
        headers = {"Accept-Encoding": "identity", "User-Agent": f"kiloword/{__version__}"}
        if span:
            headers["Range"] = span
        try:
            return urllib.request.urlopen(
                urllib.request.Request(self.url, headers=headers), timeout=self.config.timeout
            )
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise Unreachable(f"{shown(self.url)}: its certificate is not trusted ({error.reason}).") from None
            raise Fault(_words(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise Fault(_words(error)) from None
        except ValueError as error:
            raise Unreachable(f"{shown(self.url)}: no URL that can be opened ({error}).") from None

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        error.close()
        if error.code >= 500 or error.code in _LATER:
            return Fault(f"the server answers {error.code} {error.reason}", _retry_after(error.headers))
        hint = {401: ": it asks for a login", 403: ": access denied", 404: ": no such file", 410: ": no such file"}
        return Unreachable(
            f"{shown(self.url)}: the server answers {error.code}{hint.get(error.code, f' {error.reason}')}. Check the "
            "address and your rights to it."
        )

    def _check(self, response: Any, stat: Stat, start: int) -> int:
        """How many bytes of the body come before `start`. Raises: Fault when this is another file, or an error page."""
        headers = response.headers
        ranged = response.status == 206
        total = headers.get("Content-Range", "").rpartition("/")[2] if ranged else headers.get("Content-Length", "")
        if _tag(headers) != stat.tag and stat.tag:
            raise Fault(f"the file has changed since it was opened: {_tag(headers) or 'undated'}, not {stat.tag}")
        if total.isdigit() and int(total) != stat.size:
            raise Fault(f"the server says that the file has {int(total):,} bytes, not {stat.size:,} as before")
        if ranged and not headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise Fault(f"asked for bytes from {start:,}, the server sends {headers.get('Content-Range')}")
        return 0 if ranged else start

    def _chunks(self, response: Any, wanted: int) -> Iterator[bytes]:
        """At most `wanted` bytes as they come. Raises: Fault when they stop or become too slow."""
        since, arrived = time.monotonic(), 0
        while wanted > 0:
            try:
                chunk = response.read1(min(wanted, _CHUNK))
            except (OSError, http.client.HTTPException) as error:
                raise Fault(_words(error)) from None
            if not chunk:
                return
            wanted -= len(chunk)
            arrived += len(chunk)
            yield chunk
            elapsed = time.monotonic() - since
            if elapsed > self.config.timeout:
                if arrived < _SLOW * elapsed:
                    raise Fault(f"slower than {_SLOW:,} bytes a second")
                since, arrived = time.monotonic(), 0


def _words(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no byte came in time"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error) or type(error).__name__


def _tag(headers: Message) -> str:
    """What changes when the file does. Servers of one cluster often give one file different ETags, but one date."""
    etag, date = headers.get("ETag", "").removeprefix("W/"), headers.get("Last-Modified", "")
    return etag if _BY_CONTENT.fullmatch(etag) or not date else date


def _checksum(headers: Message) -> Checksum | None:
    """Of the whole file, in the headers that say so whatever part is asked for (RFC 9530; Google; S3)."""
    for name, pattern, algorithm in (
        ("Repr-Digest", r"sha-256=:([^:]+):", "sha256"),
        ("Digest", r"(?i:sha-256)=([^,]+)", "sha256"),
        ("x-goog-hash", r"md5=([^,\s]+)", "md5"),
    ):
        found = re.search(pattern, headers.get(name, ""))
        if found:
            try:
                return Checksum(algorithm, base64.b64decode(found[1], validate=True).hex())
            except binascii.Error:
                continue
    etag = headers.get("ETag", "").strip('"')
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"  # such ETags are no MD5
    if headers.get("Server") == "AmazonS3" and not encrypted and re.fullmatch(r"[0-9a-f]{32}", etag):
        return Checksum("md5", etag)
    return None


def _retry_after(headers: Message) -> float:
    """Seconds, from a number or a date."""
    value = headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
