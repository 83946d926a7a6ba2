"""The byte-offset index of one tar: where each sample's members lie, found by one scan and kept beside the tar.

File format (`0.tar.kwindex`): one line of JSON (`Header`), then int64 [N, 9] little-endian (offset and size of picture,
txt, json and cls, -1 where there is none; end of the key), then the keys, UTF-8, end to end.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from kiloword.data import cache
from kiloword.data.sample import IMAGE_SUFFIXES
from kiloword.data.stored import Stored, Times
from kiloword.data.tar import Tar

PARTS = ("image", "txt", "json", "cls")
SUFFIX = ".kwindex"
_BLOCK = 1 << 23  # bytes that are read at once
_COLUMNS = 2 * len(PARTS) + 1
# Key: up to the first dot of the base name, folders included.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)


class Header(BaseModel):
    """What an index says about its tar. `size` and `mtime_ns` decide whether it still holds."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: Literal["kwindex-1"] = "kwindex-1"
    size: int
    mtime_ns: int
    samples: int
    digest: str  # of all that follows this line: the same on every machine
    note: str = ""  # what is wrong with the tar as a whole
    contents: str = ""  # digest of all members' bytes, where `kiloword data index --digest` made it


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


def open_index(tar: Path, digest: bool = False) -> Index:
    """The index of a tar, scanned now unless a valid one lies beside it or in the cache folder.

    Args: digest: with a digest of all members, which an index that had one gets again when the tar has changed.
    Errors: ValueError when the file is no plain tar, holds no pictures, or when no index can be written anywhere.
    """
    stat, valid = tar.stat(), None
    for found in filter(None, map(read_index, cache.places(tar, SUFFIX))):
        digest = digest or bool(found.header.contents)
        if (found.header.size, found.header.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            valid = found
            break
    if valid and (valid.header.contents or not digest):
        return valid
    index = valid or scan(tar)
    if digest:
        index = replace(index, header=index.header.model_copy(update={"contents": _contents(tar, index)}))
    cache.write(tar, SUFFIX, lambda file: write_index(file, index))
    return index


def _contents(tar: Path, index: Index) -> str:
    """Digest of the bytes of all samples' members; reads the whole tar."""
    file, digest = cache.PositionlessFile(tar), hashlib.blake2b(digest_size=16)
    for place in index.table[:, :-1].reshape(-1, 2).tolist():
        offset, size = place
        digest.update(f"{size} ".encode())
        for start in range(offset, offset + size if offset >= 0 else offset, _BLOCK):
            digest.update(file.read(start, min(_BLOCK, offset + size - start)))
    return digest.hexdigest()


def scan(tar: Path | Stored) -> Index:
    """Reads every header of a tar once. Samples are in order of their first member."""
    stat = tar.stat()
    rows: list[list[int]] = []
    keys: list[str] = []
    current: dict[str, int] = {}  # key -> row; members of a sample need not be neighbours
    members, suffixes = Tar(tar), set[tuple[int, str]]()
    for name, offset, size in members:
        if (named := _split(name)) is None:
            continue
        key, suffix = named
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


def _split(name: str) -> tuple[str, str] | None:
    """Key and suffix of a member; None for what belongs to no sample."""
    match = _NAME.fullmatch(name)
    if match is None or name.rsplit("/", 1)[-1].startswith("__"):
        return None
    suffix = match[2].lower()
    return (match[1], suffix) if suffix in (*IMAGE_SUFFIXES, *PARTS[1:]) else None


def _build(stat: Times, rows: list[list[int]], keys: list[str], note: str) -> Index:
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


def read_index(path: Path) -> Index | None:
    """None for a missing or damaged index: it is only a cache, so it is made again."""
    try:
        return parse_index(path.read_bytes())
    except OSError:
        return None


def parse_index(raw: bytes) -> Index | None:
    """None when it is damaged."""
    line, _, body = raw.partition(b"\n")
    try:
        header = Header.model_validate_json(line)
    except ValidationError:
        return None
    split = header.samples * _COLUMNS * 8
    if header.samples < 1 or len(body) < split:
        return None
    table = np.frombuffer(body, "<i8", header.samples * _COLUMNS).reshape(-1, _COLUMNS).astype(np.int64, copy=False)
    keys = body[split:]
    index = Index(header, table, keys)
    return index if _digest(table, keys) == header.digest and _is_possible(index) else None


def _is_possible(index: Index) -> bool:
    """Whether all that the table names can exist: the digest alone tells accidents, not a file made on purpose."""
    places, ends = index.table[:, :-1], index.table[:, -1]
    ordered = bool((np.diff(ends, prepend=0) >= 0).all()) and int(ends[-1]) == len(index.keys)
    paired = bool(((places[:, ::2] < 0) == (places[:, 1::2] < 0)).all())
    return ordered and paired and bool((places >= -1).all() and (places <= index.header.size + 1).all())


def write_index(file: BinaryIO, index: Index) -> None:
    """As `read_index` reads it."""
    file.write(index.header.model_dump_json().encode() + b"\n")
    file.write(index.table.astype("<i8").tobytes() + index.keys)
