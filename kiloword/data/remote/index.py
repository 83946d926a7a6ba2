"""The index of a remote tar, in the cache folder: downloaded from beside the tar, or made by reading the tar once."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kiloword.data.remote.errors import Patience, TooLarge, Unreachable
from kiloword.data.remote.file import RemoteFile, small_file, wrong_bytes
from kiloword.data.remote.http_files import date
from kiloword.data.tars.index import SUFFIX, Index, IndexFile, header_file, parse_index, scan, write_index
from kiloword.files import replacing
from kiloword.terminal import shown

_CHUNK = 8 << 20  # bytes in memory
_NOTE = 200  # characters of the note of a downloaded index


def open_remote_index(tar: RemoteFile, damaged: bool = False) -> IndexFile:
    """The index of a remote tar; one process makes it, others wait.

    Args: damaged: the table may be damaged: it is checked, and the index is made again if it is.
    Errors: Unreachable; ValueError when the file is no plain tar, or no index can be written.
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
    return index if index and index.header.times == tar.times() else None


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
    update = {"mtime_ns": tar.times()[1], "note": shown(index.header.note)[:_NOTE]}
    return replace(index, header=index.header.model_copy(update=update))


def _scanned(tar: RemoteFile) -> Index:
    """The index from one pass over the whole tar, which also checks it and stores the checksum of each block."""
    patience, expected = Patience(tar.address, tar.config), tar.info.checksum
    while True:
        whole = Whole(tar)
        index: Index | ValueError
        try:
            index = scan(whole)
        except Unreachable:
            raise
        except ValueError as error:  # perhaps of wrong bytes
            index = error
        whole.finish()
        value = whole.checksum.hexdigest()
        if expected is None or value == expected.value:
            break
        tar.drop()
        patience.again(wrong_bytes(expected, value))
    if isinstance(index, ValueError):
        tar.drop()
        raise index
    with replacing(tar.sums) as file:
        file.write(b"".join(sums.digest() for sums in whole.sums))
    return index


class Whole:
    """A remote tar as `scan` reads it. All bytes before the last one read are read and hashed, too.

    `checksum` is of all bytes, `sums` of each block: complete after `finish`.
    """

    def __init__(self, tar: RemoteFile) -> None:
        self.tar = tar
        self._start, self._chunk = 0, b""  # the last chunk of the pass
        self.checksum = hashlib.new(tar.info.checksum.algorithm if tar.info.checksum else "sha256")
        self.sums: list[Any] = []

    def __str__(self) -> str:
        return str(self.tar)

    def times(self) -> tuple[int, int]:
        return self.tar.times()

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer at the end of the file."""
        stop = min(offset + size, self.tar.info.size)
        while self._start + len(self._chunk) < stop:
            self._read_chunk()
        if offset < self._start:
            return self.tar.read(offset, size)
        return self._chunk[offset - self._start : stop - self._start]

    def finish(self) -> None:
        """Read and hash the rest of the file."""
        self.read(self.tar.info.size, 0)

    def _read_chunk(self) -> None:
        self._start += len(self._chunk)
        before = self._start % self.tar.block_size  # bytes of this block that are hashed
        self._chunk = self.tar.read(self._start, min(_CHUNK, self.tar.block_size - before))
        self.checksum.update(self._chunk)
        if before == 0:
            self.sums.append(hashlib.sha256())
        self.sums[-1].update(self._chunk)
