"""The byte-offset index of one tar: where each sample's members lie, from one scan, stored in a file beside the tar.

The key of a member is its name without the last suffix: `IMG_2023.05.01.jpg` and `IMG_2023.05.01.txt` are one sample.
Where that leaves an image or a text alone, words before the suffix are the name of a field, as in webdataset:
`0.image.jpg` and `0.caption.txt` are sample 0. Members that are not read are counted by reason.

A .npy of at most `MAX_LABEL` bytes, which may name several classes, stands for the cls of a sample without one. Beside
a cls it may hold groups (DataComp), and stands for the json of a sample without one.

File format (`0.tar.kwindex`): a line, then int64 [N, 9] little-endian (offset and size of image, txt, json and cls, -1
for a missing member; end of the key), then the keys, UTF-8, end to end. The line is `Header` as JSON, a space and its
digest; it suffices to open a data set. The rest is read and checked in blocks of `BLOCK` samples.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from kiloword.data import files
from kiloword.data.sources.sample import IMAGE_SUFFIXES
from kiloword.data.tars.headers import ReadableFile, Tar
from kiloword.terminal import shown

PARTS = ("image", "txt", "json", "cls")
SUFFIX = ".kwindex"
MAX_LABEL = 1 << 17  # bytes of a .npy
COLUMNS = 2 * len(PARTS) + 1
BLOCK = 512  # samples that are read and checked together
_ROW = 8 * COLUMNS  # bytes
_BY_ARRAY = tuple(2 * PARTS.index(part) for part in ("cls", "json"))  # columns for which a .npy may stand
_LINE = 1 << 12  # bytes; most first lines are shorter: 8 characters of digest per block, and the other fields
_LONGEST_LINE = 1 << 26
_READ = 1 << 23  # bytes of a tar read at once
_FIELD = re.compile(r"(?<=[^/])(\.[^\W\d][^./]*)+$")  # words between the key and the suffix
_READ_SUFFIXES = (*IMAGE_SUFFIXES, *PARTS[1:], "npy")


class Header(BaseModel):
    """What an index says about its tar. It is valid while the tar has this `size` and `mtime_ns`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: Literal["kwindex-3"] = "kwindex-3"
    size: int
    mtime_ns: int
    samples: int
    digest: str  # of everything after this line: the same on every machine
    note: str = ""  # what is wrong with the tar as a whole
    left_out: dict[str, int] = {}  # number of members that are not read, by reason
    named: dict[str, list[str]] = {}  # the first of them
    contents: str = ""  # digest of all members' bytes, if `kiloword data index --digest` made it
    blocks: tuple[str, ...] = ()  # digest of each block

    @property
    def times(self) -> tuple[int, int]:
        """Size and mtime_ns of the tar."""
        return self.size, self.mtime_ns


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
        """Offset and size in bytes of one member; None if the sample has none."""
        column = 2 * PARTS.index(part)
        offset, size = self.table[row, column : column + 2].tolist()
        return None if offset < 0 else (offset, size)

    def is_possible(self) -> bool:
        """Whether everything that the table names can exist: digests detect accidents, not files made on purpose."""
        places, ends = self.table[:, :-1], self.table[:, -1]
        ordered = bool((np.diff(ends, prepend=0) >= 0).all()) and sum(ends[-1:].tolist()) == len(self.keys)
        paired = bool(((places[:, ::2] < 0) == (places[:, 1::2] < 0)).all())
        return ordered and paired and bool((places >= -1).all() and (places <= self.header.size + 1).all())


def make_index(header: Header, table: NDArray[np.int64], keys: bytes) -> Index:
    """An index with newly computed digests. Args: table: [N, 9]; keys: end to end."""
    raw = table.astype("<i8").tobytes()
    whole = hashlib.blake2b(raw, digest_size=16)
    whole.update(keys)
    blocks, begin = [], 0
    for first in range(0, len(table), BLOCK):
        end = int(table[first : first + BLOCK][-1, -1])
        blocks.append(_block_digest(begin, raw[first * _ROW : (first + BLOCK) * _ROW], keys[begin:end]))
        begin = end
    return Index(header.model_copy(update={"digest": whole.hexdigest(), "blocks": tuple(blocks)}), table, keys)


@dataclass(frozen=True)
class IndexFile:
    """An open index whose header is in memory. Replacing the file on disk does not change this one."""

    header: Header
    _file: files.PositionlessFile
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
        return index if right and index.is_possible() else None

    def whole(self) -> Index | None:
        """All samples; None when they are damaged. Raises: OSError."""
        return parse_index(self._file.read(0, self._file.times()[0]))


def open_file(path: Path) -> IndexFile | None:
    """None for an index that is missing, of another version, or damaged as far as header and length show.

    Raises: OSError when it cannot be read.
    """
    try:
        file = files.PositionlessFile(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    line, size = _first_line(file), file.times()[0]
    header, start = _parse_line(line), len(line) + 1
    if header is None:
        return None
    keys = start + header.samples * _ROW
    last = file.read(keys - 8, 8) if header.samples and keys <= size else b""
    return IndexFile(header, file, start) if size == keys + int.from_bytes(last, "little", signed=True) else None


def header_file(path: Path) -> IndexFile | None:
    """As `open_file`; None also for an index that cannot be read: it is only a cache, so it is made again."""
    with suppress(OSError):
        return open_file(path)
    return None


def parse_index(raw: bytes) -> Index | None:
    """None when it is damaged, or of another version."""
    line, _, body = raw.partition(b"\n")
    header = _parse_line(line)
    if header is None or len(body) < header.samples * _ROW:
        return None
    index = make_index(header, _table(body, header.samples), body[header.samples * _ROW :])
    return index if index.header == header and index.is_possible() else None


def write_index(file: BinaryIO, index: Index) -> None:
    """Write the file that `open_file` and `parse_index` read."""
    line = index.header.model_dump_json().encode()
    file.write(line + b" " + _short_digest(line).encode() + b"\n")
    file.write(index.table.astype("<i8").tobytes() + index.keys)


def _first_line(file: files.PositionlessFile) -> bytes:
    line, size = file.read(0, _LINE), _LINE
    while b"\n" not in line and len(line) == size < _LONGEST_LINE:
        size *= 2
        line = file.read(0, size)
    return line.partition(b"\n")[0]


def _parse_line(line: bytes) -> Header | None:
    """None when it is damaged, or of another version."""
    text, _, digest = line.rpartition(b" ")
    try:
        header = Header.model_validate_json(text)
    except ValidationError:
        return None
    possible = header.samples >= 0 and len(header.blocks) == -(-header.samples // BLOCK)
    return header if possible and digest == _short_digest(text).encode() else None


def _table(raw: bytes, rows: int) -> NDArray[np.int64]:
    """[rows, 9]"""
    return np.frombuffer(raw, "<i8", rows * COLUMNS).reshape(-1, COLUMNS).astype(np.int64, copy=False)


def _block_digest(begin: int, rows: bytes, keys: bytes) -> str:
    """Args: begin: of the first key, in bytes."""
    return _short_digest(begin.to_bytes(8, "little", signed=True) + rows + keys)


def _short_digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def open_header(tar: Path) -> Header:
    """The header of the index of a tar, which is made if there is none. Errors: as of `open_index`."""
    file, digest = _valid(tar)
    return file.header if file and (file.header.contents or not digest) else open_index(tar).header


def open_index(tar: Path, digest: bool = False) -> Index:
    """The index of a tar, scanned now unless a valid one lies beside it or in the cache folder.

    Args: digest: with a digest of all members; an index that had one gets a new one when the tar has changed.
    Errors: ValueError when the file is not a plain tar, or when the index cannot be written anywhere.
    """
    file, had_digest = _valid(tar)
    digest, index = digest or had_digest, None
    with suppress(OSError):
        index = file.whole() if file else None
    if index and (index.header.contents or not digest):
        return index
    index = index or scan(tar)
    if digest:
        index = replace(index, header=index.header.model_copy(update={"contents": _contents(tar, index)}))
    files.write(tar, SUFFIX, lambda file: write_index(file, index))
    return index


def _valid(tar: Path) -> tuple[IndexFile | None, bool]:
    """The valid index of a tar; whether it, or an outdated one, has a digest of all members."""
    stat, digest = tar.stat(), False
    for file in filter(None, map(header_file, files.places(tar, SUFFIX))):
        digest = digest or bool(file.header.contents)
        if file.header.times == (stat.st_size, stat.st_mtime_ns):
            return file, digest
    return None, digest


def _contents(tar: Path, index: Index) -> str:
    """Digest of the bytes of all samples' members; reads the whole tar."""
    file, digest = files.PositionlessFile(tar), hashlib.blake2b(digest_size=16)
    for offset, size in index.table[:, :-1].reshape(-1, 2).tolist():
        digest.update(f"{size} ".encode())
        for start in range(offset, offset + size if offset >= 0 else offset, _READ):
            digest.update(file.read(start, min(_READ, offset + size - start)))
    return digest.hexdigest()


def scan(tar: Path | ReadableFile) -> Index:
    """Read every header of a tar once. Samples are in order of their first member; a tar without images has none.

    Errors: ValueError when the file is not a plain tar.
    """
    rows: list[list[int]] = []
    keys: list[bytes] = []
    current: dict[str, int] = {}  # key -> row; members of a sample need not be neighbours
    members, seen = Tar(tar), set[tuple[int, str]]()
    named = [(name, *_split(name), offset, size) for name, offset, size in members]
    key_of, left_out = _keys((stem, suffix) for _, stem, suffix, *_ in named), members.left_out
    for name, stem, suffix, offset, size in sorted(named, key=lambda one: one[2] == "npy"):
        free, places = list[int](), list[int]()  # columns for which the member may stand, the first choice first
        if suffix not in _READ_SUFFIXES:
            reason = f".{suffix} is not read" if suffix else "the name is hidden or has no suffix"
        elif suffix == "npy":  # alone it is no sample
            places = rows[current[stem]] if stem in current and size <= MAX_LABEL else []
            free = [column for column in _BY_ARRAY if places and places[column] < 0]
            reason = "a .npy that is too large, or whose sample lacks neither .cls nor .json"
        else:
            key = key_of[stem]
            if not key:
                left_out.add(shown(name), "its sample has a member of this kind without a field's name")
                continue
            row = current.get(key)
            if row is None or (row, name) in seen:  # the same member again: another sample of the same name
                row = current[key] = len(rows)
                rows.append([-1] * (COLUMNS - 1))
                keys.append(key.encode("utf-8", "surrogateescape"))
            seen.add((row, name))
            places, part = rows[row], "image" if suffix in IMAGE_SUFFIXES else suffix
            free = [column for column in [2 * PARTS.index(part)] if places[column] < 0]
            reason = f"the sample has another {part} before"
        if free:
            places[free[0] : free[0] + 2] = offset, size
        else:
            left_out.add(shown(name), reason)
    if not any(row[0] >= 0 for row in rows):
        rows, keys = [], []
    ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
    table = np.column_stack([np.array(rows, np.int64).reshape(-1, COLUMNS - 1), ends])
    size, mtime_ns = members.times
    header = Header(size=size, mtime_ns=mtime_ns, samples=len(rows), digest="", note=members.note)
    unread = {"left_out": left_out.counts, "named": left_out.first}
    return make_index(header.model_copy(update=unread), table, b"".join(keys))


def _split(name: str) -> tuple[str, str]:
    """A member's name without its suffix, and the suffix; no suffix for names that are hidden or meant for others."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.rpartition(".")
    hidden = base.startswith((".", "__"))
    return (name, "") if hidden or not stem else (folder + slash + stem, suffix.lower())


def _keys(members: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The key of the sample of each member, by the member's name without its suffix; "": the sample has its own."""
    kinds, joined = dict[str, set[bool]](), dict[str, set[bool]]()  # whether there are images, and texts
    for stem, suffix in members:
        if suffix in _READ_SUFFIXES[:-1]:
            kinds.setdefault(stem, set()).add(suffix in IMAGE_SUFFIXES)
    key_of = {stem: stem if len(both) > 1 else _FIELD.sub("", stem) for stem, both in kinds.items()}
    key_of |= {stem: "" for stem, key in key_of.items() if key != stem and kinds[stem] <= kinds.get(key, set())}
    for stem, both in kinds.items():
        joined.setdefault(key_of[stem], set()).update(both)
    return {stem: key if not key or len(joined[key]) > 1 else stem for stem, key in key_of.items()}
