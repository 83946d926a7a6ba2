"""A remote file that is read like a local one: pieces of it come to the cache folder when they are needed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from kiloword.addresses import Address, address_of
from kiloword.data.remote.cache import FileCache
from kiloword.data.remote.config import RemoteConfig, remote_folder
from kiloword.data.remote.errors import Fault, Patience, Unreachable
from kiloword.data.remote.fsspec_files import Fsspec
from kiloword.data.remote.http_files import Http
from kiloword.data.remote.stat import Checksum, Stat

SHA256_BYTES = 32
MOST_SMALL = 1 << 26  # bytes of an index, of checksums, of class names
T = TypeVar("T")


class RemoteTimes(NamedTuple):
    """As `os.stat` names them; the time is a number that changes with the file."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL as it was when it was opened.

    Errors of all that reads: Unreachable when the network fails for good or the file has changed; ValueError when the
    cache cannot hold what comes.
    """

    address: Address
    info: Stat
    config: RemoteConfig

    @property
    def url(self) -> str:
        """Without credentials."""
        return self.address.url

    @property
    def name(self) -> str:
        return name_of(self.url)

    @property
    def piece(self) -> int:
        """Bytes that come together: all of a file whose server knows no ranges."""
        return min(int(self.config.piece), self.info.size) if self.info.ranged else self.info.size

    def __str__(self) -> str:
        return self.url

    def stat(self) -> RemoteTimes:
        return RemoteTimes(self.info.size, int(_digest(self._tag)[:15], 16))

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer at the end of the file."""
        stop = min(offset + size, self.info.size)
        parts = []
        while offset < stop:
            n, start = divmod(offset, self.piece)
            length = min(stop - offset, self.piece - start)
            with self._cache.opened(self.piece_name(n), self._span(n)[1], lambda fd, n=n: self._fill(n, fd)) as fd:  # type: ignore[misc]
                parts.append(os.pread(fd, length, start))
            offset += length
        return b"".join(parts)

    def fetch(self, n: int) -> None:
        """A piece into the cache, unless somebody is at it."""
        self._cache.fetch(self.piece_name(n), self._span(n)[1], lambda fd: self._fill(n, fd))

    def covering(self, offset: int, stop: int) -> range:
        """The pieces that hold some bytes."""
        return range(offset // self.piece, -(-stop // self.piece))

    def whole(self) -> Path:
        """The file in the cache folder, not counted there: nobody gives it up. Of a table, not of shards.

        Raises: Unreachable for one that is larger than the limit of the shards.
        """
        self.check_fits()
        cache, name = FileCache(remote_folder("tables")), f"{self._version(0)}-{_kept_name(self.url)}"
        with cache.opened(
            name, self.info.size, lambda fd: self._fill_checked(fd, 0, self.info.size, self.info.checksum)
        ):
            return cache.folder / name

    def check_fits(self) -> None:
        """Raises: Unreachable for a file that is larger than all that may be kept; of one that comes as a whole."""
        if self.info.size > self.config.limit:
            raise Unreachable(
                f"{self.url} has {self.info.size:,} bytes, but the limit of what is fetched is "
                f"{self.config.limit:,.0f}: set KILOWORD_REMOTE to another, such as limit=200GB."
            )

    def pieces(self) -> int:
        return -(-self.info.size // self.piece) if self.info.size else 0

    def piece_name(self, n: int) -> str:
        return f"{self._version(self.piece)}-{n:06d}"

    def drop(self) -> None:
        """Give up all pieces: they hold wrong bytes."""
        self._cache.drop_all(self._version(self.piece) + "-")

    @property
    def sums(self) -> Path:
        """SHA-256 of every piece, once the file was read as a whole."""
        return remote_folder("index") / f"{self._version(self.piece)}.sha256"

    @property
    def index(self) -> Path:
        return remote_folder("index") / f"{_digest(self.url)}-{_kept_name(self.url)}.kwindex"

    @property
    def _cache(self) -> FileCache:
        return FileCache(remote_folder("pieces"), self.config.limit)

    @property
    def _tag(self) -> str:
        """What changes with the file. Where the server says nothing: what of the query may select it."""
        return self.info.tag or self.address.selector

    def _version(self, piece: int) -> str:
        return _digest(self.url, self._tag, str(self.info.size), str(piece))

    def _span(self, n: int) -> tuple[int, int]:
        """Offset and size of a piece."""
        start = n * self.piece
        return start, min(self.piece, self.info.size - start)

    def _fill(self, n: int, fd: int) -> None:
        start, size = self._span(n)
        self._fill_checked(fd, start, start + size, self._checksum(n))

    def _fill_checked(self, fd: int, start: int, stop: int, expected: Checksum | None) -> None:
        patience = Patience(self.address, self.config)
        while True:
            digest, at = hashlib.new(expected.algorithm if expected else "sha256"), 0
            for chunk in arriving(self, start, stop):
                at += os.pwrite(fd, chunk, at)
                digest.update(chunk)
            if expected is None or digest.hexdigest() == expected.value:
                return
            patience.again(
                Fault(f"wrong bytes came, {expected.algorithm} {digest.hexdigest()} and not {expected.value}")
            )

    def _checksum(self, n: int) -> Checksum | None:
        if self.pieces() == 1 and self.info.checksum:
            return self.info.checksum
        try:
            with self.sums.open("rb") as file:
                file.seek(n * SHA256_BYTES)
                raw = file.read(SHA256_BYTES)
        except OSError:
            return None
        return Checksum("sha256", raw.hex()) if len(raw) == SHA256_BYTES else None


Piece = tuple[RemoteFile, int]


def open_remote_file(address: Address | str, config: RemoteConfig) -> RemoteFile:
    """Asks the server how long a file is. Raises: Unreachable."""
    where = address_of(address) if isinstance(address, str) else address
    file = RemoteFile(where, patiently(where, config, lambda: _transport(where, config).stat()), config)
    if not file.info.ranged:
        file.check_fits()
    return file


def small_file(address: Address, config: RemoteConfig) -> bytes | None:
    """A file that a data set can do without; None where there is none. Raises: Unreachable, TooLarge."""
    return patiently(address, config, lambda: _transport(address, config).small(MOST_SMALL))


def arriving(file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
    """The bytes [start, stop), cut downloads taken up where they were cut. Raises: Unreachable."""
    transport, patience = _transport(file.address, file.config), Patience(file.address, file.config)
    while start < stop:
        begun = start
        try:
            for chunk in transport.read(file.info, start, stop):
                start += len(chunk)
                yield chunk
            if start < stop:
                raise Fault(f"the body ended {stop - start:,} bytes before its end")
        except Fault as fault:
            patience.progress(start - begun)
            patience.again(fault)


def patiently(address: Address, config: RemoteConfig, ask: Callable[[], T]) -> T:
    """An answer, asked for until it comes. Raises: Unreachable."""
    patience = Patience(address, config)
    while True:
        try:
            return ask()
        except Fault as fault:
            patience.again(fault)


def name_of(url: str) -> str:
    """The file's name: `0.tar` of `https://host/a/0.tar?download=true`."""
    return unquote(urlsplit(url).path).rpartition("/")[2]


def _kept_name(url: str) -> str:
    """The end of a name as any file system takes it; the suffix stays."""
    return re.sub(r"[^\w.-]", "_", name_of(url))[-80:]


def _transport(address: Address, config: RemoteConfig) -> Http | Fsspec:
    return (Http if address.url.startswith(("http://", "https://")) else Fsspec)(address, config)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()
