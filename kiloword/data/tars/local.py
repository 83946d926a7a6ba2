"""Tars of this machine as they were when the data set was opened, whatever happens to them while a run reads them.

A tar that is gone, cut or replaced makes its samples bad; one that grows keeps those that it had.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kiloword.data import cache
from kiloword.data.tars.index import open_index, scan
from kiloword.data.tars.index_file import SUFFIX, IndexFile, header_file, open_file
from kiloword.types import BadSample

_Times = tuple[int, int]  # size and mtime_ns


def index_as_it_was(tar: Path, digest: str, damaged: bool = False) -> IndexFile:
    """The index of that digest, also when the tar has changed since.

    Args: damaged: it may be behind its header: read as a whole, and made again if it is.
    Raises: BadSample when there is none any more; OSError.
    """
    try:
        found = None if damaged else _kept(tar, digest, header_file)
        if found is None:
            open_index(tar)
            found = _kept(tar, digest, open_file)
    except FileNotFoundError:
        raise BadSample(f"{tar.name} is missing") from None
    except ValueError:
        pass  # no plain tar any more
    if found is None:
        raise _changed(tar)
    return found


def _kept(tar: Path, digest: str, read: Callable[[Path], IndexFile | None]) -> IndexFile | None:
    files = map(read, cache.places(tar, SUFFIX))
    return next((file for file in files if file and file.header.digest == digest), None)


class LocalTar:
    """An open tar that is read only as long as it is the one that `index` describes."""

    def __init__(self, path: Path, index: IndexFile) -> None:
        self.path, self.index = path, index
        self._file: cache.PositionlessFile | None = None
        self._known: dict[_Times, bool] = {(index.header.size, index.header.mtime_ns): True}

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`. Raises: BadSample for a tar that is gone, shorter or another one; OSError."""
        try:
            if self._file is None:
                self._file = cache.PositionlessFile(self.path)
            if not self._is_same(self._file.times()):
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

    def _is_same(self, times: _Times) -> bool:
        if times not in self._known:
            self._known[times] = self._agrees()
        return self._known[times]

    def _agrees(self) -> bool:
        """Whether the samples that both have lie where they did; the last one of a tar that was cut may be half."""
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
