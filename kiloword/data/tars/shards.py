"""Webdataset tars as a map-style data set: any sample is one index look-up and a few `pread`s away."""

from __future__ import annotations

import hashlib
import logging
import os
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

from kiloword.data.remote.file import Piece, RemoteFile
from kiloword.data.remote.index import open_remote_index
from kiloword.data.sources.questions import question_in
from kiloword.data.sources.sample import MAX_IMAGE, MAX_TEXT, check_size, make_record, parse_captions, parse_label
from kiloword.data.tars import catalogue
from kiloword.data.tars.index_file import BLOCK, PARTS, Index, IndexFile
from kiloword.data.tars.local import LocalTar, index_as_it_was
from kiloword.types import BadSample, Record

_OPEN = 128  # tars, each with its index, that a process keeps open at once, where its limit of open files allows
_SHARE = 6  # of that limit: a third for one source
_BLOCKS = 512  # of indexes that it keeps in memory, 50 kB each: more than the order of rows mixes (see `sampler`)
log = logging.getLogger(__name__)


class TarSource:
    """Samples of one or more tars, in order of the tars.

    `notes` says what is wrong with whole tars (cut, damaged). `classnames`, `templates`: of class data, else None.
    Sending it to a worker sends names only; each process opens tars and indexes itself when it first needs them.
    """

    natural = True
    from_files = True

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
        self.remote = any(isinstance(tar, RemoteFile) for tar in self.tars)  # tars come over the network
        headers = catalogue.headers(self.tars)
        self._ends = list(accumulate(h.samples for h in headers))
        self.notes = [f"{tar}: {h.note}" for tar, h in zip(self.tars, headers, strict=True) if h.note]
        for note in self.notes:
            log.warning("%s (its complete samples are used)", note)
        self.fingerprint = _fingerprint(self.tars, [f"{h.size} {h.digest}" for h in headers])
        self._digests = [h.digest for h in headers]
        contents = [h.contents for h in headers]
        self.digest = _fingerprint(self.tars, contents) if all(contents) else ""  # of all members; "": not made
        self._open_caches()

    def _open_caches(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = _OPEN if limit == resource.RLIM_INFINITY else min(_OPEN, max(2, limit // _SHARE))
        self._index = lru_cache(most)(self._index_of)
        self._block = lru_cache(_BLOCKS)(self._block_of)
        self._file = lru_cache(most)(self._file_of)

    def _index_of(self, shard: int, damaged: bool = False) -> IndexFile:
        tar = self.tars[shard]
        if isinstance(tar, RemoteFile):
            return open_remote_index(tar, damaged)
        return index_as_it_was(tar, self._digests[shard], damaged)

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
            raise BadSample(f"the index of {self.tars[shard].name} is damaged again and again")
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
        """The sample's name up to the first dot of its base name, folders included."""
        _, index, local = self._locate(row)
        return index.key(local)

    def captions(self, row: int) -> list[str]:
        """Captions without the image; may be empty for class data. Raises BadSample."""
        return parse_captions(self._part(row, "txt"), self._part(row, "json"))[0]

    def question(self, row: int) -> str | None:
        """The question without the image, where the json asks one. Raises BadSample."""
        return question_in(parse_captions(None, self._part(row, "json"))[1])

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        shard, index, local = self._locate(row)
        image = self._part(row, "image")
        if image is None:
            raise BadSample("no image" + self._because(shard, row))
        meta, text, cls = (self._part(row, part) for part in ("json", "txt", "cls"))
        try:
            return make_record(index.key(local), image, text, meta, cls)
        except BadSample as error:
            # raised again as it is: a `NoCaption` is a loss to training alone
            error.args = (f"{error}{self._because(shard, row)}",)
            raise

    def stored(self, row: int) -> list[bytes | None]:
        """The bytes of a row's members; none of remote tars, whose servers tell one version of a file from another.

        Raises: BadSample, OSError.
        """
        return [] if self.remote else [self._part(row, part) for part in PARTS]

    def pieces(self, row: int) -> list[Piece]:
        """What one row needs from the network."""
        shard, index, local = self._locate(row)
        tar = self.tars[shard]
        places = [place for part in PARTS if (place := index.place(local, part))]
        if not isinstance(tar, RemoteFile) or not places:
            return []
        spans = ((offset, min(offset + size, tar.info.size)) for offset, size in places if size <= MAX_IMAGE)
        return [(tar, n) for n in sorted({n for span in spans for n in tar.covering(*span)})]

    @property
    def labels(self) -> NDArray[np.int64]:
        """[N] class indices; -1 where a sample has none. Reads every .cls."""
        labels = (parse_label(self._part(row, "cls")) for row in range(len(self)))
        return np.array([-1 if label is None else label for label in labels], np.int64)

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
        check_size("the image" if part == "image" else f"the .{part}", size, MAX_IMAGE if part == "image" else MAX_TEXT)
        return self._file(shard).read(offset, size)

    def _because(self, shard: int, row: int) -> str:
        """The last sample of a cut tar lacks members because of the cut."""
        note = self._index(shard).header.note
        return f" (the tar is {note})" if note and row == self._ends[shard] - 1 else ""


def _fingerprint(tars: Sequence[Path | RemoteFile], contents: Sequence[str]) -> str:
    """From names, sizes and index digests (offsets, sizes and keys of all members), not from times or places."""
    lines = "\n".join(f"{tar.name} {content}" for tar, content in zip(tars, contents, strict=True))
    return hashlib.blake2b(lines.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
