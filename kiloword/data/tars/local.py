"""Local tars as they were when the data set was opened, even if they change while a run reads them.

The samples of a tar that is gone, cut or replaced are bad; a tar that grows keeps the samples that it had.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kiloword.data import files
from kiloword.data.tars.index import SUFFIX, IndexFile, header_file, open_file, open_index, scan
from kiloword.types import BadSample


def index_as_it_was(tar: Path, digest: str, damaged: bool = False) -> IndexFile:
    """The index with this digest, even if the tar has changed since.

    Args: damaged: the table may be damaged: it is checked, and the index is made again if it is.
    Raises: BadSample when there is no such index any more; OSError.
    """
    try:
        index = None if damaged else _with_digest(tar, digest, header_file)
        if index is None:
            open_index(tar)
            index = _with_digest(tar, digest, open_file)
    except FileNotFoundError:
        raise BadSample(f"{tar.name} is missing") from None
    except ValueError:  # not a plain tar any more
        index = None
    if index is None:
        raise _changed(tar)
    return index


def _with_digest(tar: Path, digest: str, read: Callable[[Path], IndexFile | None]) -> IndexFile | None:
    indexes = map(read, files.places(tar, SUFFIX))
    return next((index for index in indexes if index and index.header.digest == digest), None)


class LocalTar:
    """An open tar that is read only as long as it is the one that `index` describes."""

    def __init__(self, path: Path, index: IndexFile) -> None:
        self.path, self.index = path, index
        self._file: files.PositionlessFile | None = None
        self._is_same = {index.header.times: True}

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`. Raises: BadSample when the tar is gone, shorter or replaced; OSError."""
        try:
            if self._file is None:
                self._file = files.PositionlessFile(self.path)
            times = self._file.times()
            if times not in self._is_same:
                self._is_same[times] = self._agrees()
            if not self._is_same[times]:
                raise _changed(self.path)
            raw = self._file.read(offset, size)
        except FileNotFoundError:
            raise BadSample(f"{self.path.name} is missing") from None
        except OSError as error:  # the next attempt opens it again: a stale handle of a network drive stays stale
            self._file = None
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
        if len(raw) < size:
            raise BadSample(f"{self.path.name} has become shorter since it was indexed")
        return raw

    def _agrees(self) -> bool:
        """Whether the common samples lie where they did; the last sample of a tar that was cut may be incomplete."""
        try:
            was, now = self.index.whole(), scan(self.path)
        except ValueError:
            return False
        both = 0 if was is None else min(len(now.table), len(was.table)) - 1
        if was is None or both < 1 or not np.array_equal(now.table[:both], was.table[:both]):
            return False
        end = int(was.table[both - 1, -1])
        return now.keys[:end] == was.keys[:end]


def _changed(tar: Path) -> BadSample:
    return BadSample(f"{tar.name} is another file than when the run began")
