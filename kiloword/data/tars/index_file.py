"""The file that keeps the index of one tar; its first line alone answers what opening a data set asks.

Format (`0.tar.kwindex`): a line, then int64 [N, 9] little-endian (offset and size of image, txt, json and cls, -1 where
there is none; end of the key), then the keys, UTF-8, end to end. The line holds `Header` as JSON, a space and its
digest. What follows is read and checked in blocks of `BLOCK` samples. A line without a digest is of an earlier version,
which had no blocks: such a file is read and checked as a whole.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from kiloword.data.cache import PositionlessFile

PARTS = ("image", "txt", "json", "cls")
SUFFIX = ".kwindex"
COLUMNS = 2 * len(PARTS) + 1
BLOCK = 512  # samples that are read and checked together
_ROW = 8 * COLUMNS  # bytes
_LINE = 1 << 12  # bytes in which most first lines end: 8 characters of digest a block, and some more
_LONGEST_LINE = 1 << 26


class Header(BaseModel):
    """What an index says about its tar. `size` and `mtime_ns` decide whether it still holds."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: Literal["kwindex-1", "kwindex-2"] = "kwindex-2"
    size: int
    mtime_ns: int
    samples: int
    digest: str  # of all that follows this line: the same on every machine
    note: str = ""  # what is wrong with the tar as a whole
    contents: str = ""  # digest of all members' bytes, where `kiloword data index --digest` made it
    blocks: tuple[str, ...] = ()  # digest of each block


@dataclass(frozen=True)
class Index:
    """N samples of one tar: all of them, or one block."""

    header: Header  # of the tar
    table: NDArray[np.int64]  # [N, 9]
    keys: bytes

    def key(self, row: int) -> str:
        start = int(self.table[row - 1, -1]) if row else 0
        return self.keys[start : int(self.table[row, -1])].decode("utf-8", "surrogateescape")

    def place(self, row: int, part: str) -> tuple[int, int] | None:
        """Offset and size in bytes of one member; None where the sample has none."""
        column = 2 * PARTS.index(part)
        offset, size = int(self.table[row, column]), int(self.table[row, column + 1])
        return None if offset < 0 else (offset, size)


def make_index(header: Header, table: NDArray[np.int64], keys: bytes) -> Index:
    """An index with its digests, whatever the header said of them. Args: table: [N, 9]; keys: end to end."""
    digests = {"format": "kwindex-2", "digest": _digest(table, keys), "blocks": _block_digests(table, keys)}
    return Index(header.model_copy(update=digests), table, keys)


@dataclass(frozen=True)
class IndexFile:
    """An index of which the header is in memory. The file stays open: who replaces it does not change this one."""

    header: Header
    _file: PositionlessFile
    _start: int  # of the table, in bytes

    def block(self, number: int) -> Index | None:
        """Samples [512 number, 512 (number + 1)) as an index of their own; None when damaged. Raises: OSError."""
        first, stop = number * BLOCK, min((number + 1) * BLOCK, self.header.samples)
        before = 1 if first else 0  # the row before says where the first key begins
        raw = self._file.read(self._start + (first - before) * _ROW, (stop - first + before) * _ROW)
        if len(raw) < (stop - first + before) * _ROW:
            return None
        table = _table(raw, stop - first + before).copy()
        begin, end = int(table[0, -1]) if before else 0, int(table[-1, -1])
        if not 0 <= begin <= end <= self._file.times()[0]:
            return None
        keys = self._file.read(self._start + self.header.samples * _ROW + begin, end - begin)
        right = _block_digest(begin, raw[before * _ROW :], keys) == self.header.blocks[number]
        table[:, -1] -= begin
        index = Index(self.header, table[before:], keys)
        return index if right and _is_possible(index) else None

    def whole(self) -> Index | None:
        """All samples; None when they are damaged. Raises: OSError."""
        return parse_index(self._file.read(0, self._file.times()[0]))


def open_file(path: Path) -> IndexFile | None:
    """None for an index that is missing, of an earlier version, or damaged as far as header and length tell.

    Raises: OSError when it cannot be read.
    """
    try:
        file = PositionlessFile(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    line, size = _first_line(file), file.times()[0]
    header, start = _parse_line(line), len(line) + 1
    if header is None or not header.blocks or len(header.blocks) != -(-header.samples // BLOCK):
        return None
    keys = start + header.samples * _ROW
    last = file.read(keys - 8, 8) if keys <= size else b""
    return IndexFile(header, file, start) if size == keys + int.from_bytes(last, "little", signed=True) else None


def header_file(path: Path) -> IndexFile | None:
    """As `open_file`; None also for an index that cannot be read: it is only a cache, so it is made again."""
    try:
        return open_file(path)
    except OSError:
        return None


def read_index(path: Path) -> Index | None:
    """None for a missing or damaged index: it is only a cache, so it is made again."""
    try:
        return parse_index(path.read_bytes())
    except OSError:
        return None


def parse_index(raw: bytes) -> Index | None:
    """None when it is damaged. One of an earlier version has no `blocks`."""
    line, _, body = raw.partition(b"\n")
    header = _parse_line(line)
    if header is None or header.samples < 1 or len(body) < header.samples * _ROW:
        return None
    table, keys = _table(body, header.samples), body[header.samples * _ROW :]
    right = header.digest == _digest(table, keys) and header.blocks in ((), _block_digests(table, keys))
    index = Index(header, table, keys)
    return index if right and _is_possible(index) else None


def write_index(file: BinaryIO, index: Index) -> None:
    """As `read_index` reads it."""
    line = index.header.model_dump_json().encode()
    file.write(line + b" " + _short_digest(line).encode() + b"\n")
    file.write(index.table.astype("<i8").tobytes() + index.keys)


def _first_line(file: PositionlessFile) -> bytes:
    line, size = file.read(0, _LINE), _LINE
    while b"\n" not in line and len(line) == size < _LONGEST_LINE:
        size *= 2
        line = file.read(0, size)
    return line.partition(b"\n")[0]


def _parse_line(line: bytes) -> Header | None:
    """None when it is damaged. Without a digest its blocks do not count."""
    text, _, digest = (line, b"", b"") if line.endswith(b"}") else line.rpartition(b" ")
    if digest and digest != _short_digest(text).encode():
        return None
    try:
        header = Header.model_validate_json(text)
    except ValidationError:
        return None
    return header if digest else header.model_copy(update={"blocks": ()})


def _table(raw: bytes, rows: int) -> NDArray[np.int64]:
    """[rows, 9]"""
    return np.frombuffer(raw, "<i8", rows * COLUMNS).reshape(-1, COLUMNS).astype(np.int64, copy=False)


def _digest(table: NDArray[np.int64], keys: bytes) -> str:
    digest = hashlib.blake2b(table.astype("<i8").tobytes(), digest_size=16)
    digest.update(keys)
    return digest.hexdigest()


def _block_digests(table: NDArray[np.int64], keys: bytes) -> tuple[str, ...]:
    digests, begin = [], 0
    for first in range(0, len(table), BLOCK):
        rows = table[first : first + BLOCK]
        end = int(rows[-1, -1])
        digests.append(_block_digest(begin, rows.astype("<i8").tobytes(), keys[begin:end]))
        begin = end
    return tuple(digests)


def _block_digest(begin: int, rows: bytes, keys: bytes) -> str:
    """Args: begin: of the first key, in bytes."""
    return _short_digest(begin.to_bytes(8, "little", signed=True) + rows + keys)


def _short_digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _is_possible(index: Index) -> bool:
    """Whether all that the table names can exist: the digest alone tells accidents, not a file made on purpose."""
    places, ends = index.table[:, :-1], index.table[:, -1]
    ordered = bool((np.diff(ends, prepend=0) >= 0).all()) and int(ends[-1]) == len(index.keys)
    paired = bool(((places[:, ::2] < 0) == (places[:, 1::2] < 0)).all())
    return ordered and paired and bool((places >= -1).all() and (places <= index.header.size + 1).all())
