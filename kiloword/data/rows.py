"""A data set made of files: a table of rows, and a way to the bytes of their images.

Functions that open a kind of data set make the table, once, with everything parsed. Its columns, of which only `key`
must exist:

    key       binary          see `key_bytes`
    captions  list<string>    cleaned captions, or answers where `info` has a question
    label     int64           class index; -1: none, in data that need no captions
    labels    list<int64>     classes of an image that may have several; `of` (int64): the number of all classes
    info      string          JSON: `Record.info`
    error     string          why the texts cannot be used; the row is then a bad sample
    file      binary          file of the image: below the folder of the rows, or absolute; may be a dictionary
    offset    int64           where in the file the image lies, and `size` (int64); null: the image is the whole file.
                              `file` is then NAME#VERSION (remote), or may be: bytes and time of change of the file

A cell that is null, or whose column is absent, says that the row has none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.compute
from filelock import FileLock
from numpy.typing import NDArray

from kiloword.addresses import is_url
from kiloword.data import remote
from kiloword.data.sample import IMAGE_SUFFIXES, MAX_IMAGE, check_size, read_whole
from kiloword.files import TEMPORARY, cache_folder, replacing
from kiloword.types import BadSample, LabelSet, NoCaption, Record

PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENETUNREACH)
PLAIN = dict.fromkeys(("label", "offset", "size"), pa.int64()) | dict.fromkeys(("info", "error"), pa.string())
PLAIN |= {"labels": pa.list_(pa.int64())}  # columns whose types no kind of data chooses
_VERSION = re.compile("#[0-9]+-[0-9]+$")


def key_bytes(text: str) -> bytes:
    """A key or caption as UTF-8 bytes; lone surrogates (of file names that are not UTF-8) stay."""
    return text.encode("utf-8", "surrogatepass")


def key_text(raw: bytes) -> str:
    """The inverse of `key_bytes`."""
    return raw.decode("utf-8", "surrogatepass")


class Rows:
    """The rows of a table with the columns above, as a `kiloword.types.Source`.

    Args: folder: of the files that `file` names, or a URL; fingerprint: see `kiloword.types.Source`; classnames,
    templates: of class data, else None; notes: what is left out; path: the Arrow file that the table maps, which a
    worker is sent in place of the table.
    """

    natural = True

    def __init__(
        self,
        name: str,
        table: pa.Table,
        folder: Path | str,
        fingerprint: str,
        *,
        classnames: list[str] | None = None,
        templates: list[str] | None = None,
        notes: Sequence[str] = (),
        path: Path | None = None,
    ) -> None:
        self.name, self.table, self.folder, self.fingerprint = name, table, str(folder), fingerprint
        self.classnames, self.templates, self.notes, self.path = classnames, templates, list(notes), path

    def __getstate__(self) -> dict[str, Any]:
        sent = {name: value for name, value in self.__dict__.items() if name != "_columns"}
        return sent | ({"table": None} if self.path else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.path:
            self.table = mapped(self.path)

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def _columns(self) -> dict[str, pa.ChunkedArray]:
        return {name: self.table[name] for name in self.table.column_names}

    def _cell(self, column: str, row: int) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        cells = self._columns.get(column)
        return None if cells is None else cells[row].as_py()

    def _check(self, row: int) -> None:
        if error := self._cell("error", row):
            raise BadSample(error)

    def key(self, row: int) -> str:
        """The key of a row, by which other files name it."""
        return key_text(self._cell("key", row))

    def captions(self, row: int) -> list[str]:
        """Captions, or answers to the question of the row, without reading the image. Raises BadSample."""
        self._check(row)
        return self._cell("captions", row) or []

    def info(self, row: int) -> dict[str, Any]:
        """`Record.info`, without reading the image. Raises BadSample."""
        self._check(row)
        info: dict[str, Any] = json.loads(self._cell("info", row) or "{}")
        return info

    def label(self, row: int) -> int | LabelSet | None:
        """The class of a row, or its classes."""
        if (several := self._cell("labels", row)) is not None:
            return LabelSet(tuple(several), self._cell("of", row))
        label: int | None = self._cell("label", row)
        return None if label == -1 else label

    @property
    def labels(self) -> NDArray[np.int64]:
        """[N] class of each row; -1 for none, or several."""
        return np.asarray(pyarrow.compute.fill_null(self.table["label"], -1), np.int64)

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        self._check(row)
        label = self.label(row)
        record = Record(self.key(row), self.image(row), self.captions(row), label, self.info(row))
        if not record.captions and label is None and self._cell("label", row) is None:
            raise NoCaption(record)
        return record

    def image(self, row: int) -> bytes:
        """The encoded image. Raises BadSample."""
        place, size = self.remote_file(row), self._cell("size", row)
        if not place:
            raise BadSample("no image")
        try:
            if size is None:
                file = image_file(self.folder, os.fsdecode(self._cell("file", row)))
                image = read_whole(Path(file), "the image", MAX_IMAGE)
            else:
                check_size("the image", size, MAX_IMAGE)
                offset = self._cell("offset", row)
                image = remote.read(place, offset, size) if self.remote else _opened(place).read_at(size, offset)
                if len(image) < size:
                    raise BadSample("its file ends in the middle of the image")
        except remote.Unreachable:
            raise
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            if getattr(error, "errno", None) in PASSING:
                _opened.cache_clear()  # a stale handle of a network drive stays stale
                raise
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "not a file name"
            reason += "; its name is not UTF-8" * any("\ud7ff" < sign < "\ue000" for sign in place)
            raise BadSample(f"image cannot be read ({reason})") from None
        if not image:
            raise BadSample("the image has zero bytes")
        return image

    @property
    def remote(self) -> bool:
        """Whether reading an image may need the network."""
        return is_url(self.folder)

    def remote_file(self, row: int) -> str:
        """The file with the image of a row, as `remote.opened` takes it for remote data; "": none."""
        name = self._cell("file", row)
        return os.path.join(self.folder, os.fsdecode(name)) if name else ""


def image_file(folder: Path | str, name: str) -> str:
    """The path of an image. Its name may lack the suffix, and have another form of Unicode or Windows' separators."""
    forms = dict.fromkeys([name, normalize("NFC", name), normalize("NFD", name), name.replace("\\", "/")])
    files = [os.path.join(folder, form) for form in forms]
    if os.path.splitext(name)[1].lower().removeprefix(".") not in IMAGE_SUFFIXES:
        files += [f"{file}.{suffix}" for file in files for suffix in IMAGE_SUFFIXES]
    return next(filter(os.path.exists, files), files[0])


@lru_cache(64)
def _opened(place: str) -> pa.OSFile:
    """A file that stays open, which processes and threads can share, as it is read without a position."""
    return pa.OSFile(os.fsencode(_VERSION.sub("", place)))


def mapped(path: Path) -> pa.Table:
    """The table of an Arrow file, memory-mapped."""
    return pa.ipc.open_file(pa.memory_map(os.fsencode(path))).read_all()


def made_once(identity: str, make: Callable[[], pa.Table | pa.RecordBatchReader]) -> tuple[pa.Table, Path | None]:
    """A table and its Arrow file in the cache folder, made by one process for all; no file where none may be written.

    Args: identity: whatever the table depends on, such as the path, size and time of change of its file.
    Errors: ValueError for a full disk.
    """
    folder = cache_folder() / "rows"
    path = folder / f"{hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()}.arrow"
    try:
        if (table := known(path)) is None:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            with FileLock(lock := f"{path}.lock"):
                if (table := known(path)) is None:
                    write(path, make())
                    table = mapped(path)
                Path(lock).unlink(missing_ok=True)
        touched(path)
        return table, path
    except OSError as error:
        if error.errno == errno.ENOSPC:
            with keeping(path):
                raise
        made = make()
        return made if isinstance(made, pa.Table) else made.read_all(), None


def known(path: Path) -> pa.Table | None:
    """As `mapped`; None for a file that is missing, or damaged, as after a crash of the machine."""
    with suppress(OSError, pa.ArrowInvalid):
        return mapped(path)
    return None


@contextmanager
def keeping(path: Path) -> Iterator[None]:
    """Errors: ValueError where a file in the cache folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of Arrow, about what is read
            raise
        raise ValueError(
            f"{path} cannot be written ({error.strerror or error}). Set KILOWORD_CACHE to a folder with space."
        ) from error


def touched(path: Path) -> None:
    """Keep a file of the cache folder, as it is used."""
    with suppress(OSError):  # the folder may be another user's
        os.utime(path)


@cache
def _sweep(folder: Path) -> None:
    """Remove what nobody has used for 90 days, and what killed processes left a day ago."""
    with suppress(OSError):
        for file in os.scandir(folder):
            if time.time() - file.stat().st_mtime > (1 if file.name.endswith(TEMPORARY) else 90) * 86400:
                os.unlink(file.path)


def write(path: Path, made: pa.Table | pa.RecordBatchReader) -> None:
    """Write a table as an Arrow file, atomically. Errors: OSError."""
    with replacing(path) as file, pa.ipc.new_file(file, made.schema) as out:
        for batch in made.to_batches() if isinstance(made, pa.Table) else made:
            out.write_batch(batch)
