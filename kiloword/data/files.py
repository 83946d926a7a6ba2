"""Files of data: where derived files (indexes) lie, reads that processes share, and lookup of places by key.

A derived file is stored beside its data file or, if that folder is read-only, in the cache folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kiloword.files import replacing


def folder() -> Path:
    """The cache folder: KILOWORD_CACHE, or ~/.cache/kiloword."""
    return Path(os.environ.get("KILOWORD_CACHE") or Path.home() / ".cache" / "kiloword")


def fallback(data: str, suffix: str, inside: str) -> str:
    """Path in the cache folder `inside` of the file derived from `data`. Strings, as Path is slow for 40,000 files."""
    name = hashlib.blake2b(os.fsencode(os.path.abspath(data)), digest_size=12).hexdigest()
    return f"{inside}/{name}-{os.path.basename(data)}{suffix}"


def places(data: Path, suffix: str) -> list[Path]:
    """Possible paths of the file derived from `data`, best first.

    A folder whose mode lacks write permission is not used, not even by root.
    """
    beside, in_cache = data.with_name(data.name + suffix), Path(fallback(str(data), suffix, str(folder())))
    writable = bool(data.parent.stat().st_mode & 0o222) and os.access(data.parent, os.W_OK)
    return [beside, in_cache] if writable or beside.exists() else [in_cache]


def write(data: Path, suffix: str, fill: Callable[[BinaryIO], None]) -> Path:
    """Write the file by `fill` at the first place that is writable, atomically.

    Errors: ValueError when no place is writable (read-only, disk full).
    """
    errors = []
    for place in places(data, suffix):
        try:
            with replacing(place) as file:
                fill(file)
            return place
        except OSError as error:
            errors.append(f"{place}: {error.strerror or error}")
    reasons = "; ".join(errors)
    raise ValueError(f"cannot write the index of {data} ({reasons}). Set KILOWORD_CACHE to a folder with space.")


class PositionlessFile:
    """An open file without a position, which processes and threads can share."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not block

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer at the end of the file."""
        raw = os.pread(self._fd, size, offset)
        while len(raw) < size and (chunk := os.pread(self._fd, size - len(raw), offset + len(raw))):
            raw += chunk  # one call returns at most 2 GiB, and less on some network file systems
        return raw

    def times(self) -> tuple[int, int]:
        """Current size and mtime_ns."""
        stat = os.fstat(self._fd)
        return stat.st_size, stat.st_mtime_ns

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


Lookup = NDArray[np.uint64]
"""[2, N]: ascending digests, and the place of each."""


def key_digest(raw: bytes) -> int:
    """Unsigned 64-bit hash; two of a million keys collide with probability 3e-8, so callers compare the key itself."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def lookup_table(keys: Iterable[bytes], places: NDArray[np.uint64]) -> Lookup:
    """The lookup table of N keys; equal keys keep the order of their places [N]."""
    digests = np.fromiter((key_digest(key) for key in keys), np.uint64, len(places))
    order = np.argsort(digests, kind="stable")
    return np.stack([digests[order], places[order]])


def find_key(table: Lookup, raw: bytes) -> list[int]:
    """The possible places of a key: none, nearly always one, or several. O(log N)."""
    wanted = np.uint64(key_digest(raw))
    start, end = np.searchsorted(table[0], wanted, "left"), np.searchsorted(table[0], wanted, "right")
    return [int(place) for place in table[1, start:end]]


def key_bytes(text: str) -> bytes:
    """A key or caption as UTF-8 bytes; lone surrogates (of file names that are not UTF-8) stay."""
    return text.encode("utf-8", "surrogatepass")


def key_text(raw: bytes) -> str:
    """The inverse of `key_bytes`."""
    return raw.decode("utf-8", "surrogatepass")
