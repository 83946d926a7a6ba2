"""Webdataset tars as a map-style data set: reading a sample takes one index lookup and a few `pread`s."""

from __future__ import annotations

import hashlib
import math
import os
import re
import resource
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kiloword.data.remote.file import RemoteBlock, RemoteFile
from kiloword.data.remote.index import open_remote_index
from kiloword.data.sources.sample import (
    MAX_IMAGE,
    MAX_TEXT,
    check_size,
    make_record,
    parse_captions,
    parse_label,
    question_in,
)
from kiloword.data.tars import catalogue
from kiloword.data.tars.index import BLOCK, PARTS, Index, IndexFile
from kiloword.data.tars.local import LocalTar, index_as_it_was
from kiloword.errors import LeftOut
from kiloword.types import BadSample, Record

_OPEN = 128  # tars that a process keeps open, each with its index, if its limit of open files allows
_SHARE = 6  # part of that limit for each of the two: a third for one source
_BLOCKS = 512  # index blocks in memory, 50 kB each: more than the order of rows mixes (see `sampler`)

RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MOST_NAMES = 1_000_000  # files of one pattern


class TarSource:
    """Samples of one or more tars, in order of the tars.

    Args: classnames, templates: of class data, else None. `notes` says which tars are `damaged` (cut), and what is left
    out. Pickling it for a worker sends names only; each process opens tars and indexes when it first needs them.
    Errors: ValueError without tars or without images, and as of `catalogue.headers`.
    """

    natural = True

    def __init__(
        self,
        name: str,
        tars: Sequence[Path | RemoteFile],
        classnames: list[str] | None = None,
        templates: list[str] | None = None,
    ) -> None:
        if not tars:
            raise ValueError(f"{name}: no tars. Expected at least one, as img2dataset writes them.")
        self.name, self.tars = name, list(tars)
        self.classnames, self.templates = classnames, templates
        self.remote = any(isinstance(tar, RemoteFile) for tar in self.tars)
        headers = catalogue.headers(self.tars)
        self._ends = list(accumulate(h.samples for h in headers))
        self.damaged = [f"{tar}: {h.note}" for tar, h in zip(self.tars, headers, strict=True) if h.note]
        empty, members = LeftOut("tar"), LeftOut("member")
        for tar, header in zip(self.tars, headers, strict=True):
            members.extend(LeftOut("member", counts=header.left_out, first=header.named))
            if not header.samples:
                empty.add(tar.name, "no images in it")
        if not len(self):
            raise ValueError(
                f"{name} holds no images. Expected webdataset tars, as img2dataset writes. {members}".strip()
            )
        self.notes = [*self.damaged, *(f"{name}: {line}" for line in (*empty.lines(), *members.lines()))]
        self.fingerprint = _fingerprint(self.tars, [f"{h.size} {h.digest}" for h in headers])
        self._digests = [h.digest for h in headers]
        contents = [h.contents for h in headers]
        self.digest = _fingerprint(self.tars, contents) if all(contents) else ""  # of all members; "": not computed
        self._open_caches()

    def _open_caches(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = _OPEN if limit == resource.RLIM_INFINITY else min(_OPEN, max(2, limit // _SHARE))
        self._index = lru_cache(most)(self._index_of)
        self._block = lru_cache(_BLOCKS)(self._block_of)
        self._file = lru_cache(most)(self._file_of)

    def _index_of(self, shard: int, damaged: bool = False) -> IndexFile:
        tar, digest = self.tars[shard], self._digests[shard]
        return open_remote_index(tar, damaged) if isinstance(tar, RemoteFile) else index_as_it_was(tar, digest, damaged)

    def _block_of(self, shard: int, number: int) -> Index:
        """Raises: BadSample, OSError."""
        with suppress(OSError):
            if block := self._index(shard).block(number):
                return block
        self._index.cache_clear()
        try:
            block = self._index_of(shard, damaged=True).block(number)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.tars[shard])) from error
        if block is None:
            raise BadSample(f"the index of {self.tars[shard].name} is damaged again after it was rebuilt")
        return block

    def _file_of(self, shard: int) -> LocalTar | RemoteFile:
        tar = self.tars[shard]
        return tar if isinstance(tar, RemoteFile) else LocalTar(tar, self._index(shard))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_index", "_block", "_file")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_caches()

    def __len__(self) -> int:
        return self._ends[-1]

    def key(self, row: int) -> str:
        """The name of the sample's members without their suffix, folders included (see `index`)."""
        _, index, local = self._locate(row)
        return index.key(local)

    def captions(self, row: int) -> list[str]:
        """Captions, read without the image; may be empty for class data. Raises: BadSample."""
        return parse_captions(self._part(row, "txt"), self._part(row, "json"))[0]

    def question(self, row: int) -> str | None:
        """The question of the json, if any, read without the image. Raises: BadSample."""
        return question_in(parse_captions(None, self._part(row, "json"))[1])

    def record(self, row: int) -> Record:
        """The stored sample. Raises: BadSample with the reason."""
        shard, index, local = self._locate(row)
        image = self._part(row, "image")
        if image is None:
            raise BadSample("no image" + self._because(shard, row))
        meta, text, cls = (self._part(row, part) for part in ("json", "txt", "cls"))
        try:
            return make_record(index.key(local), image, text, meta, cls)
        except BadSample as error:
            # the same object: `NoCaption`, a subclass, is an error only for training
            error.args = (f"{error}{self._because(shard, row)}",)
            raise

    def stored(self, row: int) -> list[bytes | None]:
        """The bytes of a row's members; empty for remote tars, whose servers distinguish versions of a file.

        Raises: BadSample, OSError.
        """
        return [] if self.remote else [self._part(row, part) for part in PARTS]

    def remote_blocks(self, row: int) -> list[RemoteBlock]:
        """The blocks of remote files that hold one row."""
        shard, index, local = self._locate(row)
        tar = self.tars[shard]
        places = [place for part in PARTS if (place := index.place(local, part))]
        if not isinstance(tar, RemoteFile) or not places:
            return []
        spans = ((offset, min(offset + size, tar.info.size)) for offset, size in places if size <= MAX_IMAGE)
        return [(tar, n) for n in sorted({n for span in spans for n in tar.covering(*span)})]

    @property
    def labels(self) -> NDArray[np.int64]:
        """[N] class indices; -1 for a sample without one, or with several. Reads every .cls."""
        labels = (parse_label(self._part(row, "cls")) for row in range(len(self)))
        return np.array([label if isinstance(label, int) else -1 for label in labels], np.int64)

    def _locate(self, row: int) -> tuple[int, Index, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        shard = bisect_right(self._ends, row)
        block, local = divmod(row - (self._ends[shard - 1] if shard else 0), BLOCK)
        return shard, self._block(shard, block), local

    def _part(self, row: int, part: str) -> bytes | None:
        shard, index, local = self._locate(row)
        place = index.place(local, part)
        if place is None:
            return None
        offset, size = place
        if offset + size > index.header.size:
            raise BadSample("the tar ends in the middle of this sample")
        name, most = ("the image", MAX_IMAGE) if part == "image" else (f"the .{part}", MAX_TEXT)
        check_size(name, size, most)
        return self._file(shard).read(offset, size)

    def _because(self, shard: int, row: int) -> str:
        """An addition to a message: the last sample of a cut tar lacks members because of the cut."""
        note = self._index(shard).header.note
        return f" (the tar is {note})" if note and row == self._ends[shard] - 1 else ""


def _fingerprint(tars: Sequence[Path | RemoteFile], contents: Sequence[str]) -> str:
    """From names, sizes and index digests (offsets, sizes and keys of all members), not from times or folders."""
    lines = "\n".join(f"{tar.name} {content}" for tar, content in zip(tars, contents, strict=True))
    return hashlib.blake2b(lines.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def expand(pattern: str) -> list[str]:
    """The names of a brace pattern: `x-{08..10}.tar` gives x-08.tar, x-09.tar and x-10.tar, as wide as the first.

    Errors: ValueError for a range that is empty, and for more than a million names.
    """
    sizes = [max(1, int(last) - int(first) + 1) for first, last in RANGE.findall(pattern)]
    if math.prod(sizes) > _MOST_NAMES:
        raise ValueError(f"{pattern} names {math.prod(sizes):,} files. Expected at most {_MOST_NAMES:,}.")
    match = RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match[1], match[2]
    if int(last) < int(first):
        raise ValueError(f"{pattern}: the range {match[0]} is empty. Write the smaller number first.")
    numbers = (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return [name for n in numbers for name in expand(pattern[: match.start()] + n + pattern[match.end() :])]


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that compares numbers in names as numbers: 2.tar before 10.tar."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,1000})", name)]


def text_lines(where: str, raw: bytes) -> list[str]:
    """The lines of a file. Errors: ValueError when it is not UTF-8, or has an empty line."""
    try:
        lines = [line.strip() for line in raw.decode("utf-8-sig").strip().split("\n")]
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8.") from None
    if not all(lines):  # class indices count lines: skipping an empty one would move all that follow
        raise ValueError(f"{where}: line {lines.index('') + 1} is empty. Expected text in every line.")
    return lines
