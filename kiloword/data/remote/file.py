"""A remote file that is read like a local one: its blocks are fetched to the cache folder when they are needed."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kiloword.addresses import Address, address_of
from kiloword.data.remote.cache import FileCache
from kiloword.data.remote.config import RemoteConfig, remote_folder
from kiloword.data.remote.errors import Fault, Patience, Unreachable, retried
from kiloword.data.remote.fsspec_files import Fsspec
from kiloword.data.remote.http_files import Http
from kiloword.data.remote.transport import Checksum, Stat

MOST_SMALL = 1 << 26  # bytes of an index, of checksums, of class names
_SHA256_BYTES = 32


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL as it was when it was opened.

    Errors of everything that reads: Unreachable when the network fails for good, the file has changed, or the cache
    cannot hold the bytes.
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
    def block_size(self) -> int:
        """Bytes that are fetched together: the whole file if the server supports no ranges."""
        return min(int(self.config.block), self.info.size) if self.info.ranged else self.info.size

    def __str__(self) -> str:
        return self.url

    def times(self) -> tuple[int, int]:
        """The size, and a number that changes with the file."""
        return self.info.size, int(_digest(self._tag)[:15], 16)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer at the end of the file."""
        stop = min(offset + size, self.info.size)
        parts = []
        while offset < stop:
            n, start = divmod(offset, self.block_size)
            length = min(stop - offset, self.block_size - start)
            with self._cache.opened(self.block_name(n), self._span(n)[1], lambda fd, n=n: self._fill(n, fd)) as fd:  # type: ignore[misc]
                parts.append(os.pread(fd, length, start))
            offset += length
        return b"".join(parts)

    def fetch(self, n: int) -> None:
        """Fetch a block into the cache, unless another process is doing so."""
        self._cache.fetch(self.block_name(n), self._span(n)[1], lambda fd: self._fill(n, fd))

    def covering(self, offset: int, stop: int) -> range:
        """The numbers of the blocks that hold the bytes [offset, stop)."""
        return range(offset // self.block_size, -(-stop // self.block_size))

    def whole(self) -> Path:
        """The complete file in the cache folder, where it is never deleted: for tables, not for shards.

        Raises: Unreachable for a file larger than the limit of the cache.
        """
        self.check_fits()
        cache, name = FileCache(remote_folder("tables")), f"{self._version(0)}-{_safe_name(self.url)}"
        with cache.opened(name, self.info.size, lambda fd: self._download(fd, 0, self.info.size, self.info.checksum)):
            return cache.folder / name

    def check_fits(self) -> None:
        """Raises: Unreachable for a file that is fetched as a whole and larger than the limit of the cache."""
        if self.info.size > self.config.limit:
            raise Unreachable(
                f"{self.url} has {self.info.size:,} bytes, but the limit of what is fetched is "
                f"{self.config.limit:,.0f}: set KILOWORD_REMOTE to another, such as limit=200GB."
            )

    def block_name(self, n: int) -> str:
        return f"{self._version(self.block_size)}-{n:06d}"

    def drop(self) -> None:
        """Delete all cached blocks: they hold wrong bytes."""
        self._cache.drop_all(self._version(self.block_size) + "-")

    @property
    def sums(self) -> Path:
        """The file with the SHA-256 of every block, written once the file was read as a whole."""
        return remote_folder("index") / f"{self._version(self.block_size)}.sha256"

    @property
    def index(self) -> Path:
        return remote_folder("index") / f"{_digest(self.url)}-{_safe_name(self.url)}.kwindex"

    @property
    def _cache(self) -> FileCache:
        return FileCache(remote_folder("blocks"), self.config.limit)

    @property
    def _tag(self) -> str:
        """What changes with the file: if the server sends nothing, the parameters that may select it."""
        return self.info.tag or self.address.selector

    def _version(self, block_size: int) -> str:
        return _digest(self.url, self._tag, str(self.info.size), str(block_size))

    def _span(self, n: int) -> tuple[int, int]:
        """Offset and size of a block."""
        start = n * self.block_size
        return start, min(self.block_size, self.info.size - start)

    def _fill(self, n: int, fd: int) -> None:
        start, size = self._span(n)
        self._download(fd, start, start + size, self._checksum(n))

    def _download(self, fd: int, start: int, stop: int, expected: Checksum | None) -> None:
        patience = Patience(self.address, self.config)
        while True:
            digest, at = hashlib.new(expected.algorithm if expected else "sha256"), 0
            for chunk in self._chunks(start, stop):
                at += os.pwrite(fd, chunk, at)
                digest.update(chunk)
            if expected is None or digest.hexdigest() == expected.value:
                return
            patience.again(wrong_bytes(expected, digest.hexdigest()))

    def _chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes [start, stop); interrupted downloads are continued. Raises: Unreachable."""
        transport, patience = _transport(self.address, self.config), Patience(self.address, self.config)
        while start < stop:
            first = start
            try:
                for chunk in transport.read(self.info, start, stop):
                    start += len(chunk)
                    yield chunk
                if start < stop:
                    raise Fault(f"the body ended {stop - start:,} bytes before its end")
            except Fault as fault:
                patience.progress(start - first)
                patience.again(fault)

    def _checksum(self, n: int) -> Checksum | None:
        if self.block_size == self.info.size and self.info.checksum:
            return self.info.checksum
        try:
            with self.sums.open("rb") as file:
                file.seek(n * _SHA256_BYTES)
                raw = file.read(_SHA256_BYTES)
        except OSError:
            return None
        return Checksum("sha256", raw.hex()) if len(raw) == _SHA256_BYTES else None


RemoteBlock = tuple[RemoteFile, int]
"""A remote file and the number of one of its blocks."""


def open_remote_file(address: Address | str, config: RemoteConfig) -> RemoteFile:
    """Ask the server how long a file is. Raises: Unreachable."""
    where = address_of(address) if isinstance(address, str) else address
    file = RemoteFile(where, retried(where, config, lambda: _transport(where, config).stat()), config)
    if not file.info.ranged:
        file.check_fits()
    return file


def small_file(address: Address, config: RemoteConfig) -> bytes | None:
    """The content of an optional file; None if there is none. Raises: Unreachable, TooLarge."""
    return retried(address, config, lambda: _transport(address, config).small(MOST_SMALL))


def wrong_bytes(expected: Checksum, value: str) -> Fault:
    """The fault of a download whose checksum is another than the expected one."""
    return Fault(f"wrong bytes came, {expected.algorithm} {value} and not {expected.value}")


def name_of(url: str) -> str:
    """The file's name: `0.tar` of `https://host/a/0.tar?download=true`."""
    return unquote(urlsplit(url).path).rpartition("/")[2]


def _safe_name(url: str) -> str:
    """The end of a name, in characters that every file system accepts; the suffix stays."""
    return re.sub(r"[^\w.-]", "_", name_of(url))[-80:]


def _transport(address: Address, config: RemoteConfig) -> Http | Fsspec:
    return (Http if address.url.startswith(("http://", "https://")) else Fsspec)(address, config)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()
