"""Files at URLs: each is fetched whole into a folder of limited size, once for all processes, and read there.

The least recently used files are deleted first. `Rows` name a file as `URL#VERSION`, where the version begins with the
number of bytes: another version of a file is another file.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import netrc
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

from filelock import FileLock

from kiloword.addresses import Address, address_of, scrubbed, split
from kiloword.errors import needs
from kiloword.files import cache_folder
from kiloword.terminal import shown
from kiloword.types import Source

VARIABLE = "KILOWORD_REMOTE"
_SETTING = re.compile(r"(limit|retries|timeout|backoff|ahead)=(\d[\d.e]*)([kmgt]?)b?")
THREADS = 4  # files that a process fetches at once
_SLOW = 1000  # bytes a second, below which a download is given up
_AT_ONCE = 1 << 20  # bytes that are read at once
_LONGEST, _LONGEST_WAIT = 60.0, 120.0  # seconds: between attempts, as a server asks
_IDLE = 600.0  # seconds after which a part is that of a killed process
_SAFE = "!$%&'()*+,-./:;=?@[]_~"  # characters of a URL that a request keeps
_TAGS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")
_FINAL = (PermissionError, ImportError, ValueError, TypeError, NotImplementedError)  # errors that do not pass
T = TypeVar("T")


class Unreachable(ValueError):
    """Remote data that cannot be read: it makes no sample bad, but ends the run."""


class Missing(Unreachable):
    """There is no such file, or no right to read it."""


class Settings(NamedTuple):
    """From the environment: `KILOWORD_REMOTE="limit=200GB retries=8 timeout=60"`. They change no result."""

    limit: float = 50e9  # bytes of fetched files on the local disk, of all runs and data sets together
    retries: float = 5  # after the first attempt
    timeout: float = 30.0  # seconds without a byte that count as a failure
    backoff: float = 1.0  # seconds before the first retry, doubled for each further one
    ahead: float = 32_768  # rows of the order whose files are fetched ahead; 0: none


def settings() -> Settings:
    """The settings of the environment. Raises: ValueError for an unknown one."""
    return _parsed(os.environ.get(VARIABLE, ""))


@lru_cache(1)
def _parsed(text: str) -> Settings:
    found = map(_SETTING.fullmatch, text.lower().replace(",", " ").split())
    try:
        return Settings(**{m[1]: float(m[2]) * 1000 ** " kmgt".index(m[3] or " ") for m in found})  # type: ignore[index]
    except (TypeError, ValueError):
        raise ValueError(
            f"{VARIABLE}: {scrubbed(text)[:100]!r} has another setting than {', '.join(Settings._fields)}. Expected "
            "limit=200GB timeout=60."
        ) from None


def local(address: Address) -> Path:
    """The local copy of a file, which is up to date. Raises: Unreachable, Missing."""
    return _copy(address, version_of(address))


def opened(name: str) -> BinaryIO:
    """A file that `Rows` name. Raises: Unreachable."""
    url, _, version = name.rpartition("#")
    while True:
        with suppress(FileNotFoundError):  # another process may delete it meanwhile
            return _copy(address_of(url), version).open("rb")


def read(name: str, offset: int, size: int) -> bytes:
    """`size` bytes of a file that `Rows` name, fewer at its end. Raises: Unreachable."""
    with opened(name) as file:
        return os.pread(file.fileno(), size, offset)


def version_of(address: Address) -> str:
    """The bytes of a file, and what else changes with it, without fetching it. Raises: Unreachable, Missing."""
    return _tried(address, lambda: (_http_version if _is_http(address) else _fsspec_version)(address))


def files_in(folder: Address) -> list[str]:
    """The names of the files in a folder, not of http, which has no folders. Raises: Unreachable."""

    def listed() -> list[str]:
        fs, path = _fsspec(folder)
        return [os.path.basename(entry["name"]) for entry in fs.ls(path, detail=True) if entry["type"] != "directory"]

    return _tried(folder, listed)


# The folder of copies


def _copy(address: Address, version: str) -> Path:
    identity, size = f"{address.url}\n{address.selector}\n{version}", int(version.partition("-")[0])
    digest = hashlib.blake2b(os.fsencode(identity), digest_size=12).hexdigest()
    path = cache_folder() / "remote" / f"{digest}{os.path.splitext(address.url)[1][:10]}"
    part, locks = path.with_name(f"{path.name}.part"), path.parent / "locks"
    try:
        if not path.exists():
            locks.mkdir(parents=True, exist_ok=True)
            with FileLock(locks / digest[:3]):
                if not path.exists():
                    try:
                        _tried(address, lambda: _fetch(address, part, size))
                        with FileLock(locks / "all"):  # or a listing might have it under both names, or none
                            part.replace(path)
                    finally:
                        part.unlink(missing_ok=True)
        with suppress(FileNotFoundError, PermissionError):
            os.utime(path)
    except OSError as error:
        raise Unreachable(
            f"{path.parent} cannot keep what is fetched ({error.strerror or error}). Set KILOWORD_CACHE to a folder "
            f"with space on a local disk, or {VARIABLE} to a smaller limit."
        ) from error
    return path


def _reserve(address: Address, part: Path, size: int) -> None:
    """Let a file count its bytes before they come; the least recently used files are deleted for it."""
    limit = settings().limit
    if size > limit:
        raise Unreachable(
            f"{address} has {size:,} bytes, but the limit of what is fetched is {limit:,.0f}: set {VARIABLE} to "
            "another, such as limit=200GB."
        )
    while True:
        with FileLock(part.parent / "locks" / "all"):
            kept = sorted(_kept(part.parent))  # the least recently used first, then what is fetched
            total = size + sum(held for *_, held, _ in kept)
            for is_fetched, _, held, path in kept:
                if total > limit and not is_fetched:
                    Path(path).unlink(missing_ok=True)
                    total -= held
            if total <= limit:
                os.truncate(part, size)
                return
        time.sleep(0.05)  # others fetch files, which may be deleted soon


def _kept(folder: Path) -> Iterator[tuple[bool, float, int, str]]:
    """Whether each file is being fetched, when it was used last, its bytes and its path."""
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # a part that is complete, or given up
            if entry.is_file():
                used, held = entry.stat().st_mtime, entry.stat().st_size
                yield entry.name.endswith(".part") and used > time.time() - _IDLE, used, held, entry.path


def _fetch(address: Address, part: Path, size: int) -> None:
    with part.open("wb") as file:
        _reserve(address, part, size)
        if _is_http(address):
            body, length = _response(address, {})
        else:
            fs, path = _fsspec(address)
            body, length = fs.open(path, "rb"), str(size)
        with body:
            if length != str(size):
                said = f"the server says that it has {length or 'some'} bytes, not {size:,} as in the index"
                raise ConnectionError(said)
            start, read = time.monotonic(), getattr(body, "read1", body.read)
            while chunk := read(_AT_ONCE):
                file.write(chunk)
                elapsed = time.monotonic() - start
                if elapsed > settings().timeout and file.tell() < _SLOW * elapsed:
                    raise ConnectionError(f"slower than {_SLOW:,} bytes a second")
        if file.tell() != size:
            raise ConnectionError(f"{file.tell():,} bytes came, not {size:,}")


# Requests


def _tried(address: Address, ask: Callable[[], T]) -> T:
    """What `ask` returns, which is asked again after a fault. Raises: Unreachable, Missing; OSError of a full disk."""
    limits = settings()
    for tried in count(1):
        try:
            return ask()
        except Exception as error:  # of any of a dozen libraries
            reason, wait = _passing(address, error)
            if tried > limits.retries:
                raise Unreachable(
                    f"{address}: {reason} (tried {tried} times). Check the network and the server, then start the same "
                    f"command again. More patience: {VARIABLE}='retries=8 timeout=60'."
                ) from None
        share = 0.5 + os.getpid() % 64 / 64  # not at the same time as other processes
        time.sleep(max(min(limits.backoff * 2 ** (tried - 1), _LONGEST) * share, wait))
    raise AssertionError


def _passing(address: Address, error: Exception) -> tuple[str, float]:
    """What an error says that may pass, and the seconds that the server asks to wait. Raises all other errors."""
    if isinstance(error, Unreachable) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        raise error
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        reason, after = f"the server answers {error.code} {_foreign(error.reason)}", error.headers.get("Retry-After")
        if error.code < 500 and error.code not in (408, 425, 429):
            raise Missing(f"{address}: {reason}. Check the address and your rights to it.") from None
        return reason, min(float(after) if after and after.isdecimal() else 0.0, _LONGEST_WAIT)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    reason, kind = _foreign(getattr(cause, "strerror", None) or cause), type(error).__name__
    if isinstance(error, FileNotFoundError):
        raise Missing(f"{address}: no such file. Check the address.") from None
    if isinstance(error, _FINAL) or kind == "error_perm" or "credentials" in kind.lower():
        more = needs("s3, gs or hf", "the packages of its store", "remote", "; http and https need nothing more.")
        raise Unreachable(f"{address} cannot be opened ({reason}). Check the address and your rights; {more}") from None
    return reason or kind, 0.0


def _is_http(address: Address) -> bool:
    return address.url.startswith(("http://", "https://"))


def _http_version(address: Address) -> str:
    """By a GET of one byte: signed URLs refuse HEAD."""
    response, size = _response(address, {"Range": "bytes=0-0"})
    with response:
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified", "")
    if not size.isdecimal():
        raise Unreachable(f"{address}: the server does not say how long it is. Expected a Content-Length.")
    return f"{size}-{_digest(tag)}"


def _response(address: Address, headers: dict[str, str]) -> tuple[Any, str]:
    """The answer to a GET, after redirects, and the length of the whole file, as the headers give it.

    The login of the address, or of .netrc, goes to its own host alone.
    """
    request = urllib.request.Request(quote(address.url + address.query.partition("#")[0], safe=_SAFE), headers=headers)
    user, _, password = map(unquote, address.login.partition(":"))
    with suppress(OSError, netrc.NetrcParseError):
        if not address.login and (found := netrc.netrc().authenticators(urlsplit(address.url).hostname or "")):
            user, _, password = found
    if user or password:
        login = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {login}")
    response = urllib.request.build_opener(_Redirects).open(request, timeout=settings().timeout)
    span = response.headers.get("Content-Range", "") if response.status == 206 else None
    length = response.headers.get("Content-Length", "") if span is None else span.rpartition("/")[2]
    return response, length.strip()


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Raises: Unreachable for a redirect to another protocol, from https to http, too."""
        old, new = urlsplit(req.full_url), urlsplit(re.sub("//[^/?#]*@", "//", newurl))  # no server gives a login
        if new.scheme != old.scheme and (old.scheme, new.scheme) != ("http", "https"):
            fp.close()
            raise Unreachable(
                f"{split(req.full_url)}: the server redirects from {old.scheme} to {_foreign(new.scheme)}: refused."
            )
        request = super().redirect_request(req, fp, code, msg, headers, new.geturl())
        if request is not None:
            request.headers.pop("Proxy-authorization", None)
            if new[:2] == old[:2] and (login := req.unredirected_hdrs.get("Authorization")):
                request.add_unredirected_header("Authorization", login)
        return request


def _fsspec(address: Address) -> tuple[Any, str]:
    """A file system, which is new: one made before a fork does not work after it; and the path in it."""
    import fsspec

    fs, path = fsspec.url_to_fs(address.full, skip_instance_cache=True)
    return fs, path


def _fsspec_version(address: Address) -> str:
    fs, path = _fsspec(address)
    info = fs.info(path)
    if info.get("type") == "directory" or info.get("size") is None:
        raise Unreachable(f"{address} is no file. Write a / at the end of a folder, to read the tars in it.")
    return f"{info['size']}-{_digest(next((str(info[name]) for name in _TAGS if info.get(name)), ''))}"


def _foreign(text: object) -> str:
    """A text of a server or a library, without credentials and control characters, and not long."""
    return shown(scrubbed(str(text)[:30_000]))[:300]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


# Files that are needed soon


def with_files(
    steps: Iterable[int], source: Source, rows_of: Callable[[int], tuple[Source, Iterable[int]]], batch: int
) -> Iterator[int]:
    """The steps; if a part of the source is remote, threads fetch the files of the next ones meanwhile.

    Args: rows_of: a step; batch: rows of each. The reader of a file reports what fails.
    """
    most = -(-int(settings().ahead) // batch)
    if not (most and getattr(source, "remote", False)):
        yield from steps
        return
    coming, following, limit = iter(steps), dict[int, set[str]](), settings().limit
    wanted = queue.SimpleQueue[str]()
    for _ in range(THREADS):
        threading.Thread(target=_fetched, args=(wanted,), daemon=True).start()
    try:
        while True:
            while (
                len(following) <= most
                and sum(int(name.rpartition("#")[2].partition("-")[0]) for name in set().union(*following.values()))
                < limit / 2
            ):
                if (step := next(coming, None)) is None:
                    break
                source, rows = rows_of(step)
                following[step] = {_file_of(source, row) for row in rows} - {""}
                for name in following[step]:
                    wanted.put(name)
            if not following:
                return
            yield (step := next(iter(following)))
            del following[step]
    finally:
        with suppress(queue.Empty):
            while True:
                wanted.get_nowait()
        for _ in range(THREADS):
            wanted.put("")


def _fetched(wanted: queue.SimpleQueue[str]) -> None:
    while name := wanted.get():
        with suppress(Unreachable):
            opened(name).close()


def _file_of(source: Any, row: int) -> str:
    while hasattr(source, "locate"):
        source, row = source.locate(row)
    return str(source.remote_file(row)) if getattr(source, "remote", False) else ""
