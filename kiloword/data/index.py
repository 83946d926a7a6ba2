"""The byte-offset index of one tar: where each sample's members lie, found by one scan and kept beside the tar.

File format (`0.tar.kwindex`): one line of JSON (`Header`), then int64 [N, 9] little-endian (offset and size of picture,
txt, json and cls, -1 where there is none; end of the key), then the keys, UTF-8, end to end.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from kiloword.data import cache
from kiloword.data.sample import IMAGE_SUFFIXES

PARTS = ("image", "txt", "json", "cls")
_SUFFIX = ".kwindex"
_PADDING = 1 << 20  # zeros that may stand behind the end; tar itself writes at most 10 kB
_COLUMNS = 2 * len(PARTS) + 1
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")  # key: up to the first dot of the base name, folders included


class Header(BaseModel):
    """What an index says about its tar. `size` and `mtime_ns` decide whether it still holds."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: Literal["kwindex-1"] = "kwindex-1"
    size: int
    mtime_ns: int
    samples: int
    digest: str  # of all that follows this line: the same on every machine
    note: str = ""  # what is wrong with the tar as a whole


@dataclass(frozen=True)
class Index:
    """N samples of one tar."""

    header: Header
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


def open_index(tar: Path) -> Index:
    """The index of a tar, scanned now unless a valid one lies beside it or in the cache folder.

    Errors: ValueError when the file is no plain tar, holds no pictures, or when no index can be written anywhere.
    """
    stat = tar.stat()
    for place in cache.places(tar, _SUFFIX):
        found = _read(place)
        if found and (found.header.size, found.header.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return found
    index = scan(tar)
    _write(tar, index)
    return index


def scan(tar: Path) -> Index:
    """Reads every header of a tar once. Samples are in order of their first member."""
    stat = tar.stat()
    rows: list[list[int]] = []
    keys: list[str] = []
    current: dict[str, int] = {}  # key -> row; members of a sample need not be neighbours
    members, suffixes = _Members(tar), set[tuple[int, str]]()
    for key, suffix, offset, size in members:
        row = current.get(key)
        if row is None or (row, suffix) in suffixes:  # the same member again: another sample of the same name
            row = current[key] = len(rows)
            rows.append([-1] * (_COLUMNS - 1))
            keys.append(key)
        suffixes.add((row, suffix))
        column = 2 * PARTS.index("image" if suffix in IMAGE_SUFFIXES else suffix)
        if rows[row][column] < 0:  # of two pictures (.jpg and .png) the first counts
            rows[row][column : column + 2] = offset, size
    if not any(row[0] >= 0 for row in rows):
        kinds = ", ".join(f".{s}" for s in IMAGE_SUFFIXES)
        raise ValueError(f"{tar} holds no pictures ({kinds}). Expected a webdataset tar, as img2dataset writes it.")
    return _build(stat, rows, keys, members.note)


class _Members:
    """Iterates over (key, suffix, offset, size) of a tar's members; then `note` says what is wrong with the tar."""

    def __init__(self, tar: Path) -> None:
        self.path, self.note = tar, ""

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        try:
            with self.path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                yield from self._members(tar)
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(
                f"{self.path} cannot be read as a plain tar ({error}). "
                "Compressed tars have no byte offsets: unpack the .gz."
            ) from None

    def _members(self, tar: tarfile.TarFile) -> Iterator[tuple[str, str, int, int]]:
        while True:
            try:
                member = tar.next()
            except (tarfile.TarError, EOFError):
                member = None
            if member is None:
                break
            tar.members.clear()  # type: ignore[attr-defined]  # tarfile remembers all; an index of millions must not
            named = _split(member.name)
            if named and member.isreg() and not member.issparse():
                yield *named, member.offset_data, member.size
        self.note = self._ending(tar)

    def _ending(self, tar: tarfile.TarFile) -> str:
        """A whole tar ends with blocks of zeros; `tarfile` takes damage for the end, without a word.

        Behind the end may stand a second tar (`cat a.tar b.tar`), or the zeros of a download that never finished.
        """
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        block = tar.fileobj.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            return f"cut at byte {self.path.stat().st_size:,}"
        if any(block):
            return f"damaged at byte {tar.offset:,}; what follows is not read"
        rest = tar.fileobj.read(_PADDING)
        more = any(rest) or len(rest) == _PADDING
        return f"ended at byte {tar.offset:,}; what follows is not read" if more else ""


def _split(name: str) -> tuple[str, str] | None:
    """Key and suffix of a member; None for what belongs to no sample."""
    match = _NAME.fullmatch(name)
    if match is None or name.rsplit("/", 1)[-1].startswith("__"):
        return None
    suffix = match[2].lower()
    return (match[1], suffix) if suffix in (*IMAGE_SUFFIXES, *PARTS[1:]) else None


def _build(stat: os.stat_result, rows: list[list[int]], keys: list[str], note: str) -> Index:
    raw = [key.encode("utf-8", "surrogateescape") for key in keys]
    table = np.empty((len(rows), _COLUMNS), np.int64)
    table[:, :-1] = rows
    table[:, -1] = np.cumsum([len(r) for r in raw])
    blob = b"".join(raw)
    header = Header(
        size=stat.st_size, mtime_ns=stat.st_mtime_ns, samples=len(rows), digest=_digest(table, blob), note=note
    )
    return Index(header, table, blob)


def _digest(table: NDArray[np.int64], keys: bytes) -> str:
    digest = hashlib.blake2b(table.astype("<i8").tobytes(), digest_size=16)
    digest.update(keys)
    return digest.hexdigest()


def _read(path: Path) -> Index | None:
    """None for a missing or damaged index: it is only a cache, so it is made again."""
    try:
        raw = path.read_bytes()
        line, _, body = raw.partition(b"\n")
        header = Header.model_validate_json(line)
    except (OSError, ValidationError):
        return None
    split = header.samples * _COLUMNS * 8
    if header.samples < 1 or len(body) < split:
        return None
    table = np.frombuffer(body, "<i8", header.samples * _COLUMNS).reshape(-1, _COLUMNS).astype(np.int64, copy=False)
    keys = body[split:]
    return Index(header, table, keys) if _digest(table, keys) == header.digest else None


def _write(tar: Path, index: Index) -> None:
    def fill(file: BinaryIO) -> None:
        file.write(index.header.model_dump_json().encode() + b"\n")
        file.write(index.table.astype("<i8").tobytes() + index.keys)

    cache.write(tar, _SUFFIX, fill)
