"""Lookup of places by key in sorted digests: millions of keys open from a memory map, without building a dict."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Lookup = NDArray[np.uint64]
"""[2, N]: ascending digests, and the place of each."""


def digest(raw: bytes) -> int:
    """Unsigned 64-bit hash; two of a million keys collide with probability 3e-8, so callers compare the key itself."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def lookup(keys: Iterable[bytes], places: NDArray[np.uint64]) -> Lookup:
    """The lookup table of N keys; equal keys keep the order of their places [N]."""
    digests = np.fromiter((digest(key) for key in keys), np.uint64, len(places))
    order = np.argsort(digests, kind="stable")
    return np.stack([digests[order], places[order]])


def find(table: Lookup, raw: bytes) -> list[int]:
    """The possible places of a key: none, nearly always one, or several. O(log N)."""
    wanted = np.uint64(digest(raw))
    start = int(np.searchsorted(table[0], wanted))
    end = start
    while end < table.shape[1] and table[0, end] == wanted:
        end += 1
    return [int(place) for place in table[1, start:end]]


def raw(text: str) -> bytes:
    """A key or caption as UTF-8 bytes; lone surrogates (of file names that are not UTF-8) are kept."""
    return text.encode("utf-8", "surrogatepass")


def text(raw: bytes) -> str:
    """The inverse of `raw`."""
    return raw.decode("utf-8", "surrogatepass")
