"""Files wherever they lie: what reading shards needs of them."""

from __future__ import annotations

from typing import Protocol


class FileTimes(Protocol):
    """The part of `os.stat` that decides whether an index still holds."""

    @property
    def st_size(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...


class ReadableFile(Protocol):
    """A file that is no path of this machine."""

    def stat(self) -> FileTimes: ...
    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer at the end of the file."""
