"""The index of a remote tar: found beside it, or made by reading it once from end to end; kept in the cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from kiloword.checkpoint.files import replacing
from kiloword.data.remote.errors import Fault, Patience, TooLarge, Unreachable
from kiloword.data.remote.file import RemoteFile, small_file
from kiloword.data.remote.http_files import date
from kiloword.data.tars.headers import FileTimes
from kiloword.data.tars.index import SUFFIX, Index, IndexFile, header_file, parse_index, scan, write_index
from kiloword.terminal import shown

_BLOCK = 8 << 20  # bytes in memory
_NOTE = 200  # characters of the note of a downloaded index


def open_remote_index(tar: RemoteFile, damaged: bool = False) -> IndexFile:
    """The index of a remote tar; one process makes it, others wait.

    Args: damaged: the table may be damaged: it is checked, and the index is made again if it is.
    Errors: Unreachable; ValueError when the file is no plain tar, holds no images, or no index can be written.
    """
    index = None if damaged else _valid(tar)
    if index:
        return index
    with _locked(tar.index):
        index = _valid(tar)
        if index is None or (damaged and index.whole() is None):
            made = _downloaded(tar) or _scanned(tar)
            with replacing(tar.index) as file:
                write_index(file, made)
            index = _valid(tar)
    if index is None:
        raise ValueError(f"{tar.index} was written, but cannot be read. Set KILOWORD_CACHE to a local disk.")
    return index


def _valid(tar: RemoteFile) -> IndexFile | None:
    index = header_file(tar.index)
    return index if index and index.header.is_of(tar.stat()) else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise ValueError(
            f"{path.parent} cannot keep an index ({error.strerror}). Set KILOWORD_CACHE to a folder on a local disk."
        ) from error
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _downloaded(tar: RemoteFile) -> Index | None:
    """The index file beside the tar, if it describes a tar of this size and is not older than the tar."""
    if tar.address.query:  # a signature is valid for one file
        return None
    try:
        raw = small_file(tar.address.beside(tar.url + SUFFIX), tar.config)
    except TooLarge:  # for memory: the tar is read instead
        return None
    index = None if raw is None else parse_index(raw)
    if index is None or index.header.size != tar.info.size:
        return None
    written, changed = index.header.mtime_ns / 1e9, date(tar.info.tag)
    if changed is not None and written > changed + 1:  # of a newer tar than the one that is there
        return None
    note = shown(index.header.note)[:_NOTE]
    return replace(index, header=index.header.model_copy(update={"mtime_ns": tar.stat().st_mtime_ns, "note": note}))


def _scanned(tar: RemoteFile) -> Index:
    """By one pass over the whole tar, which also checks it and notes what each piece should be."""
    patience, expected = Patience(tar.address, tar.config), tar.info.checksum
    while True:
        whole = Whole(tar)
        try:
            index, refusal = scan(whole), None
        except Unreachable:
            raise
        except ValueError as error:  # perhaps of wrong bytes
            index, refusal = None, error
        whole.finish()
        value = whole.checksum.hexdigest()
        if expected is None or value == expected.value:
            break
        tar.drop()
        patience.again(Fault(f"wrong bytes came, {expected.algorithm} {value} and not {expected.value}"))
    if index is None:
        assert refusal is not None
        tar.drop()
        raise refusal
    with replacing(tar.sums) as file:
        whole.write_sums(file)
    return index


class Whole:
    """A remote tar as `scan` reads it: forward, without skipping a byte.

    `checksum` is of all bytes, `sums` of each piece that came: all of them once `finish` was called.
    """

    def __init__(self, tar: RemoteFile) -> None:
        self.tar = tar
        self._block, self._raw, self._next = -1, b"", 0
        self.checksum = hashlib.new(tar.info.checksum.algorithm if tar.info.checksum else "sha256")
        self.sums: list[Any] = []

    def __str__(self) -> str:
        return str(self.tar)

    def stat(self) -> FileTimes:
        return self.tar.stat()

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer at the end of the file."""
        stop = min(offset + size, self.tar.info.size)
        parts = []
        while offset < stop:
            block, start = divmod(offset, self._size)
            parts.append(self._load(block)[start : start + stop - offset])
            offset += len(parts[-1])
        return b"".join(parts)

    def write_sums(self, file: BinaryIO) -> None:
        for sums in self.sums:
            file.write(sums.digest())

    def finish(self) -> None:
        """Read what `scan` had no need of."""
        if self.tar.info.size:
            self._load((self.tar.info.size - 1) // self._size)

    @property
    def _size(self) -> int:
        """Bytes of a block: a piece, but of a large file that comes as a whole."""
        return self.tar.piece if self.tar.info.ranged else min(self.tar.piece, _BLOCK)

    def _load(self, block: int) -> bytes:
        while self._next <= block:
            self._raw, self._block = self.tar.read(self._next * self._size, self._size), self._next
            self.checksum.update(self._raw)
            if self._next * self._size // self.tar.piece == len(self.sums):
                self.sums.append(hashlib.sha256())
            self.sums[-1].update(self._raw)
            self._next += 1
        if self._block != block:  # back into what was read
            self._raw, self._block = self.tar.read(block * self._size, self._size), block
        return self._raw
