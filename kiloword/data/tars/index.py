"""The byte-offset index of one tar: where each sample's members lie, found by one scan and kept beside the tar."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from kiloword.data import cache
from kiloword.data.sources.sample import IMAGE_SUFFIXES
from kiloword.data.tars.headers import FileTimes, ReadableFile, Tar
from kiloword.data.tars.index_file import (
    COLUMNS,
    PARTS,
    SUFFIX,
    Header,
    Index,
    IndexFile,
    header_file,
    make_index,
    read_index,
    write_index,
)

_BLOCK = 1 << 23  # bytes that are read at once
# Key: up to the first dot of the base name, folders included.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
Kept = TypeVar("Kept", Index, IndexFile)


def open_header(tar: Path) -> Header:
    """The header of the index of a tar, which is made where there is none. Errors: as of `open_index`."""
    found, digest = _valid(tar, header_file)
    return found.header if found and (found.header.contents or not digest) else open_index(tar).header


def open_index(tar: Path, digest: bool = False) -> Index:
    """The index of a tar, scanned now unless a valid one lies beside it or in the cache folder.

    Args: digest: with a digest of all members, which an index that had one gets again when the tar has changed.
    Errors: ValueError when the file is no plain tar, holds no images, or when no index can be written anywhere.
    """
    valid, had_digest = _valid(tar, read_index)
    digest = digest or had_digest
    if valid and valid.header.blocks and (valid.header.contents or not digest):
        return valid
    index = make_index(valid.header, valid.table, valid.keys) if valid else scan(tar)
    if digest and not index.header.contents:
        index = replace(index, header=index.header.model_copy(update={"contents": _contents(tar, index)}))
    cache.write(tar, SUFFIX, lambda file: write_index(file, index))
    return index


def _valid(tar: Path, read: Callable[[Path], Kept | None]) -> tuple[Kept | None, bool]:
    """The kept index of a tar as it is now; whether it, or one that no longer holds, has a digest of all members."""
    stat, digest = tar.stat(), False
    for found in filter(None, map(read, cache.places(tar, SUFFIX))):
        digest = digest or bool(found.header.contents)
        if (found.header.size, found.header.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return found, digest
    return None, digest


def _contents(tar: Path, index: Index) -> str:
    """Digest of the bytes of all samples' members; reads the whole tar."""
    file, digest = cache.PositionlessFile(tar), hashlib.blake2b(digest_size=16)
    for place in index.table[:, :-1].reshape(-1, 2).tolist():
        offset, size = place
        digest.update(f"{size} ".encode())
        for start in range(offset, offset + size if offset >= 0 else offset, _BLOCK):
            digest.update(file.read(start, min(_BLOCK, offset + size - start)))
    return digest.hexdigest()


def scan(tar: Path | ReadableFile) -> Index:
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
            rows.append([-1] * (COLUMNS - 1))
            keys.append(key)
        suffixes.add((row, suffix))
        column = 2 * PARTS.index("image" if suffix in IMAGE_SUFFIXES else suffix)
        if rows[row][column] < 0:  # of two images (.jpg and .png) the first counts
            rows[row][column : column + 2] = offset, size
    if not any(row[0] >= 0 for row in rows):
        kinds = ", ".join(f".{s}" for s in IMAGE_SUFFIXES)
        raise ValueError(f"{tar} holds no images ({kinds}). Expected a webdataset tar, as img2dataset writes it.")
    return _build(stat, rows, keys, members.note)


def _split(name: str) -> tuple[str, str] | None:
    """Key and suffix of a member; None for what belongs to no sample."""
    match = _NAME.fullmatch(name)
    if match is None or name.rsplit("/", 1)[-1].startswith("__"):
        return None
    suffix = match[2].lower()
    return (match[1], suffix) if suffix in (*IMAGE_SUFFIXES, *PARTS[1:]) else None


def _build(stat: FileTimes, rows: list[list[int]], keys: list[str], note: str) -> Index:
    raw = [key.encode("utf-8", "surrogateescape") for key in keys]
    table = np.empty((len(rows), COLUMNS), np.int64)
    table[:, :-1] = rows
    table[:, -1] = np.cumsum([len(r) for r in raw])
    header = Header(size=stat.st_size, mtime_ns=stat.st_mtime_ns, samples=len(rows), digest="", note=note)
    return make_index(header, table, b"".join(raw))
