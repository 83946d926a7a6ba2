"""http and https by the standard library: sizes, ranges, checksums, and no loop that a fork breaks."""

from __future__ import annotations

import base64
import binascii
import email.utils
import http.client
import re
import ssl
import time
import urllib.error
from collections.abc import Iterator
from email.message import Message
from typing import Any

from kiloword.__version__ import __version__
from kiloword.addresses import Address
from kiloword.data.remote.call import bounded, end, request
from kiloword.data.remote.config import RemoteConfig
from kiloword.data.remote.errors import Fault, TooLarge, Unreachable, foreign
from kiloword.data.remote.stat import Checksum, Stat, decimal, size_problem

_CHUNK = 1 << 16
_TAG = 200  # characters of an ETag or a date
_SLOW = 1000  # bytes a second
_LATER = (408, 425, 429)  # client errors that may be over soon
_BY_CONTENT = re.compile(r'"?[0-9a-f]{32,64}(-\d+)?"?')  # ETags that are the same on every server of a cluster


class Http:
    """One file. Raises Fault for what may be over soon, else Unreachable."""

    def __init__(self, address: Address, config: RemoteConfig) -> None:
        self.address, self.config = address, config

    def stat(self) -> Stat:
        """By a GET of one byte: signed URLs refuse HEAD, and the answer says whether ranges work."""
        try:
            response = self._get("bytes=0-0")
        except urllib.error.HTTPError as error:
            if error.code != 416:
                raise self._refused(error) from None
            error.close()
            return Stat(0, "", True)  # no byte 0: the file is empty
        with response:
            headers: Message = response.headers
            ranged, claim = response.status == 206, _length(response)
        problem = size_problem(claim)
        if problem is not None:
            raise Unreachable(f"{self.address}: {foreign(problem)}")
        return Stat(int(claim), _tag(headers), ranged, _checksum(headers))

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
        """A small file; None where there is none (S3 says 403 to those who may not list). Raises: TooLarge."""
        try:
            response = self._get(None)
        except urllib.error.HTTPError as error:
            if error.code in (403, 404, 410):
                error.close()
                return None
            raise self._refused(error) from None
        with response:
            length = decimal(response.headers.get("Content-Length", "")) or 0
            raw = b"" if length > most else b"".join(self._chunks(response, most + 1))
        if max(length, len(raw)) > most:
            raise TooLarge(f"{self.address} has more than {most:,} bytes, the most that such a file may have.")
        if len(raw) < length:
            raise Fault(f"the body ended after {len(raw):,} of {length:,} bytes")
        return raw

    def _get(self, span: str | None) -> Any:
        """The response. Raises: HTTPError (not of servers that are down), Fault, Unreachable."""
        headers = {"Accept-Encoding": "identity", "User-Agent": f"kiloword/{__version__}"}
        if span:
            headers["Range"] = span
        try:
            return self._plain(request(self.address, headers, self.config))
        except (urllib.error.HTTPError, Unreachable):
            raise
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                reason = foreign(str(error.reason))
                raise Unreachable(f"{self.address}: its certificate is not trusted ({reason}).") from None
            raise Fault(_words(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise Fault(_words(error)) from None
        except ValueError as error:
            raise Unreachable(f"{self.address}: no URL that can be opened ({foreign(str(error))}).") from None

    def _plain(self, response: Any) -> Any:
        """The response. Raises: Unreachable for a body that is compressed, which was not asked for."""
        coding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            response.close()
            raise Unreachable(
                f"{self.address}: the server compresses it ({foreign(coding)[:40]}) although it was asked not to. Let "
                "it send the file as it is."
            )
        return response

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        error.close()
        if error.code >= 500 or error.code in _LATER:
            return Fault(f"the server answers {error.code} {_reason(error)}", _retry_after(error.headers))
        login = ": it refuses this login" if self.address.login else ": it asks for a login"
        hint = {401: login, 403: ": access denied", 404: ": no such file", 410: ": no such file"}
        return Unreachable(
            f"{self.address}: the server answers {error.code}{hint.get(error.code, f' {_reason(error)}')}. Check the "
            "address and your rights to it."
        )

    def _check(self, response: Any, stat: Stat, start: int) -> int:
        """How many bytes of the body come before `start`. Raises: Fault when this is another file, or an error page."""
        headers = response.headers
        ranged = response.status == 206
        total = decimal(_length(response))
        if _tag(headers) != stat.tag and stat.tag:
            raise Fault(f"the file has changed since it was opened: {_tag(headers) or 'undated'}, not {stat.tag}")
        if total is not None and total != stat.size:
            raise Fault(f"the server says that the file has {total:,} bytes, not {stat.size:,} as before")
        if ranged and not headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise Fault(f"asked for bytes from {start:,}, the server sends {headers.get('Content-Range')}")
        return 0 if ranged else start

    def _chunks(self, response: Any, wanted: int) -> Iterator[bytes]:
        """At most `wanted` bytes as they come. Raises: Fault when they stop or become too slow."""
        since, arrived = time.monotonic(), 0
        while wanted > 0:
            try:
                chunk = self._next(response, min(wanted, _CHUNK))
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

    def _next(self, response: Any, size: int) -> bytes:
        """Some bytes. A chunked body has lines between them that could come one byte at a time."""
        if not response.chunked:
            return bytes(response.read1(size))
        try:
            return bytes(bounded(lambda: response.read1(size), self.config.timeout))
        except Fault:
            end(response)
            raise


def _length(response: Any) -> str:
    """The length of the whole file, as the headers give it."""
    headers: Message = response.headers
    if response.status == 206:
        return headers.get("Content-Range", "").rpartition("/")[2].strip()
    return headers.get("Content-Length", "").strip()


def _reason(error: urllib.error.HTTPError) -> str:
    return foreign(str(error.reason))[:80]


def _words(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no byte came in time"
    if isinstance(error, OSError):
        return (error.strerror or str(error) or type(error).__name__).lower()
    return str(error) or type(error).__name__


def _tag(headers: Message) -> str:
    """What changes when the file does. Servers of one cluster often give one file different ETags, but one date."""
    etag, date = headers.get("ETag", "").removeprefix("W/"), headers.get("Last-Modified", "")
    return (etag if _BY_CONTENT.fullmatch(etag) or not date else date)[:_TAG]


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
    seconds = decimal(value)
    if seconds is not None:
        return float(seconds)
    moment = date(value)
    return 0.0 if moment is None else max(0.0, moment - time.time())


def date(text: str) -> float | None:
    """Seconds since 1970 of a date as headers have it; None for anything else."""
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError, OSError):  # of months, zones and years that cannot be
        return None
