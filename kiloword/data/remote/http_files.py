"""http and https by the standard library: sizes, ranges, checksums, time limits, redirects that leak no credentials.

No event loop, which a fork would break.
"""

from __future__ import annotations

import base64
import binascii
import email.utils
import http.client
import os
import re
import socket
import ssl
import string
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from email.message import Message
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from kiloword.__version__ import __version__
from kiloword.addresses import Address, split
from kiloword.data.remote.config import RemoteConfig
from kiloword.data.remote.errors import Fault, TooLarge, Unreachable, foreign
from kiloword.data.remote.transport import Checksum, Stat, bounded, check_host, checked_size, decimal

_CHUNK = 1 << 16
_TAG = 200  # characters of an ETag or a date
_SLOW = 1000  # bytes a second
_LATER = (408, 425, 429)  # client errors that may pass
_MISSING = (403, 404, 410)  # S3 answers 403 to clients that may not list
_BY_CONTENT = re.compile(r'"?[0-9a-f]{32,64}(-\d+)?"?')  # ETags that are the same on every server of a cluster
_HOPS = 10  # redirects one after another
_TO = {"https": ("https",), "http": ("http", "https")}  # schemes that one may redirect to
_SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie")


class Http:
    """One file. Raises: Fault for errors that may pass, else Unreachable."""

    def __init__(self, address: Address, config: RemoteConfig) -> None:
        self.address, self.config = address, config

    def stat(self) -> Stat:
        """By a GET of one byte: signed URLs refuse HEAD, and the answer shows whether ranges work."""
        response = self._get("bytes=0-0", but=(416,))
        if response is None:  # no byte 0
            return Stat(0, "", True)
        with response:
            size = checked_size(_length(response), self.address)
            return Stat(size, _tag(response.headers), response.status == 206, _checksum(response.headers))

    def read(self, stat: Stat, start: int, stop: int) -> Iterator[bytes]:
        """The bytes [start, stop); of servers without ranges, the bytes before `start` are read and dropped."""
        with self._get(f"bytes={start}-{stop - 1}") as response:
            skip = self._check(response, stat, start)
            for chunk in self._chunks(response, stop - start + skip):
                if skip < len(chunk):
                    yield chunk[skip:]
                skip = max(0, skip - len(chunk))

    def small(self, most: int) -> bytes | None:
        """The content of a small file; None if there is none. Raises: TooLarge."""
        response = self._get(None, but=_MISSING)
        if response is None:
            return None
        with response:
            length = decimal(response.headers.get("Content-Length", "")) or 0
            raw = b"" if length > most else b"".join(self._chunks(response, most + 1))
        if max(length, len(raw)) > most:
            raise TooLarge(f"{self.address} has more than {most:,} bytes, the most that such a file may have.")
        if len(raw) < length:
            raise Fault(f"the body ended after {len(raw):,} of {length:,} bytes")
        return raw

    def _get(self, span: str | None, but: tuple[int, ...] = ()) -> Any:
        """The response; None for a status of `but`. Raises: Fault, Unreachable."""
        headers = {"Accept-Encoding": "identity", "User-Agent": f"kiloword/{__version__}"}
        if span:
            headers["Range"] = span
        try:
            return self._plain(request(self.address, headers, self.config))
        except Unreachable:
            raise
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in but:
                return None
            raise self._refused(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise Unreachable(f"{self.address}: its certificate is not trusted ({foreign(str(reason))}).") from None
            raise Fault(_words(reason)) from None
        except ValueError as error:
            raise Unreachable(f"{self.address}: no URL that can be opened ({foreign(str(error))}).") from None

    def _plain(self, response: Any) -> Any:
        """The response. Raises: Unreachable for a compressed body, which was not requested."""
        coding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            response.close()
            raise Unreachable(
                f"{self.address}: the server compresses it ({foreign(coding)[:40]}) although it was asked not to. Let "
                "it send the file as it is."
            )
        return response

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        reason = foreign(str(error.reason))[:80]
        if error.code >= 500 or error.code in _LATER:
            return Fault(f"the server answers {error.code} {reason}", _retry_after(error.headers))
        login = ": it refuses this login" if self.address.login else ": it asks for a login"
        hint = {401: login, 403: ": access denied", 404: ": no such file", 410: ": no such file"}
        return Unreachable(
            f"{self.address}: the server answers {error.code}{hint.get(error.code, f' {reason}')}. Check the address "
            "and your rights to it."
        )

    def _check(self, response: Any, stat: Stat, start: int) -> int:
        """Number of bytes of the body before `start`. Raises: Fault for another file, or an error page."""
        tag, total, span = _tag(response.headers), decimal(_length(response)), response.headers.get("Content-Range", "")
        if tag != stat.tag and stat.tag:
            raise Fault(f"the file has changed since it was opened: {tag or 'undated'}, not {stat.tag}")
        if total is not None and total != stat.size:
            raise Fault(f"the server says that the file has {total:,} bytes, not {stat.size:,} as before")
        if response.status != 206:
            return start
        if not span.startswith(f"bytes {start}-"):
            raise Fault(f"asked for bytes from {start:,}, the server sends {span or None}")
        return 0

    def _chunks(self, response: Any, count: int) -> Iterator[bytes]:
        """At most `count` bytes as they come. Raises: Fault when they stop or become too slow."""
        since, arrived = time.monotonic(), 0
        while count > 0:
            try:
                chunk = self._next(response, min(count, _CHUNK))
            except (OSError, http.client.HTTPException) as error:
                raise Fault(_words(error)) from None
            if not chunk:
                return
            count -= len(chunk)
            arrived += len(chunk)
            yield chunk
            elapsed = time.monotonic() - since
            if elapsed > self.config.timeout:
                if arrived < _SLOW * elapsed:
                    raise Fault(f"slower than {_SLOW:,} bytes a second")
                since, arrived = time.monotonic(), 0

    def _next(self, response: Any, size: int) -> bytes:
        """The next bytes. A chunked body has lines between chunks that could come one byte at a time."""
        if not response.chunked:
            return bytes(response.read1(size))
        try:
            return bytes(bounded(lambda: response.read1(size), self.config.timeout))
        except Fault:
            end(response)
            raise


# Headers


def _length(response: Any) -> str:
    """The length of the whole file, as the headers give it."""
    if response.status == 206:
        return str(response.headers.get("Content-Range", "").rpartition("/")[2].strip())
    return str(response.headers.get("Content-Length", "").strip())


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
    """Of the whole file, from headers that mean it even when a range is requested (RFC 9530; Google; S3)."""
    for name, pattern, algorithm in (
        ("Repr-Digest", r"sha-256=:([^:]+):", "sha256"),
        ("Digest", r"(?i:sha-256)=([^,]+)", "sha256"),
        ("x-goog-hash", r"md5=([^,\s]+)", "md5"),
    ):
        match = re.search(pattern, headers.get(name, ""))
        with suppress(binascii.Error):
            if match:
                return Checksum(algorithm, base64.b64decode(match[1], validate=True).hex())
    etag = headers.get("ETag", "").strip('"')
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"  # such ETags are no MD5
    if headers.get("Server") == "AmazonS3" and not encrypted and re.fullmatch(r"[0-9a-f]{32}", etag):
        return Checksum("md5", etag)
    return None


def _retry_after(headers: Message) -> float:
    """Seconds, from a number or a date."""
    value = headers.get("Retry-After", "")
    seconds, moment = decimal(value), date(value)
    if seconds is not None:
        return float(seconds)
    return 0.0 if moment is None else max(0.0, moment - time.time())


def date(text: str) -> float | None:
    """Seconds since 1970 of a date as headers have it; None for anything else."""
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError, OSError):  # impossible months, zones and years
        return None


# Requests


def request(address: Address, headers: dict[str, str], config: RemoteConfig) -> Any:
    """The response, after redirects. Raises: errors of urllib; Unreachable for what is refused; Fault."""
    check_host(address, config)
    asked = urllib.request.Request(_quoted(address.asked), headers=headers)
    if address.authorization:
        asked.add_unredirected_header("Authorization", address.authorization)
    opener = _opener(config)
    return bounded(lambda: opener.open(asked, timeout=config.timeout), config.timeout, lambda late: late.close())


def end(response: Any) -> None:
    """Shut the connection down, so that a thread that reads from it stops."""
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(response.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; credentials go to the same origin only."""

    def __init__(self, config: RemoteConfig) -> None:
        self.config = config

    def http_error_302(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """Raises: Unreachable for too many redirects, one to another protocol, or to a host that is not allowed."""
        fp.close()  # unread: the body may have no end
        first, hops = getattr(req, "first", str(split(req.full_url))), getattr(req, "hops", 0) + 1
        if hops > _HOPS:
            raise Unreachable(f"{first}: the server redirects more than {_HOPS} times. Check the address.")
        target = self._target(req, first, headers.get("Location", ""))
        public = {name: value for name, value in req.headers.items() if name.lower() not in _SECRET_HEADERS}
        again = urllib.request.Request(_quoted(target.asked), headers=public)
        if _origin(again.full_url) == _origin(req.full_url) and req.has_header("Authorization"):
            again.add_unredirected_header("Authorization", req.get_header("Authorization") or "")
        again.first, again.hops = first, hops  # type: ignore[attr-defined]
        return self.parent.open(again, timeout=req.timeout)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def _target(self, req: urllib.request.Request, first: str, location: str) -> Address:
        """The address without a login: no server gives credentials to this process."""
        try:
            url = split(urljoin(req.full_url, location))
        except ValueError:
            raise Unreachable(f"{first}: the server redirects to an address that cannot be opened.") from None
        old, new = (address.partition("://")[0].lower() for address in (req.full_url, url.url))
        if not location or new not in _TO[old]:
            raise Unreachable(
                f"{first}: the server redirects from {old} to {foreign(new) if location else 'nowhere'}, which is "
                "refused. Name the file's own address if you trust it."
            )
        check_host(url, self.config, first)
        return Address(url.url, "", url.query)


@lru_cache(8)
def _opener(config: RemoteConfig) -> urllib.request.OpenerDirector:
    """http and https, with the proxies of the environment; no other protocol has a handler."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(config),
    ):
        opener.add_handler(handler)
    return opener


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _quoted(url: str) -> str:
    """As urllib requires: no white space, no control characters, only ASCII."""
    return quote(url, safe=string.punctuation)
