"""A data set in two parts, by its keys: most rows to train on, a tenth to validate on, for data that has no split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kiloword.data.files import key_bytes
from kiloword.data.sources.optional import keys
from kiloword.types import Record, Source

HELD_OUT = 0.1  # share of the keys
PARTS = ("train-part", "val-part")  # PART:SRC is that part of SRC
_OF_A_ROW = ("key", "captions", "question", "info", "stored", "remote_blocks", "scene", "hierarchies")
_OF_ALL_ROWS = ("at", "image_levels", "contents", "digest")  # members of a source that say nothing of a part


def part_of(src: str) -> tuple[str, str]:
    """The part that a SRC names, and the rest of it: "val-part:photos" -> ("val-part", "photos"); else ("", SRC)."""
    part, colon, rest = src.partition(":")
    return (part, rest) if colon and part in PARTS else ("", src)


def is_held_out(key: str) -> bool:
    """Whether a key is in the part to validate on: by a digest of the key alone, so that new images move no others."""
    digest = hashlib.blake2b(key_bytes(key), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big") < HELD_OUT * 2**64


class SomeRows:
    """Some rows of a source, as a source.

    Args: rows [n]: of the source, n at least 1; name, fingerprint: of the result.
    """

    def __init__(self, source: Source, rows: NDArray[np.integer[Any]], name: str, fingerprint: str) -> None:
        self.source, self.rows, self.name = source, rows, name
        self.fingerprint = hashlib.blake2b(fingerprint.encode(), digest_size=16).hexdigest()
        self.natural = getattr(source, "natural", True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("source", "rows", *_OF_ALL_ROWS):
            raise AttributeError(name)  # during unpickling there is no source yet
        member = getattr(self.source, name)
        if name in _OF_A_ROW:
            return lambda row: member(int(self.rows[row]))
        if name == "labels":
            return member[self.rows]
        if name == "relevance":
            return lambda captions, rows: member(captions, self.places(rows))
        return member

    def places(self, rows: Sequence[int]) -> list[int]:
        """Rows of the source."""
        return [int(self.rows[row]) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        return self.source.record(int(self.rows[row]))


class SourcePart(SomeRows):
    """The rows of a source that are in one of its two parts; images with one key are in the same part.

    Args: part: "train-part", or "val-part" (see `is_held_out`); a row whose key cannot be read is in the first.
    Errors: ValueError where the part has no row.
    """

    def __init__(self, source: Source, part: str) -> None:
        held_out = np.array([key is not None and is_held_out(key) for key in keys(source)], dtype=bool)
        rows = np.flatnonzero(held_out == (part == "val-part")).astype(np.int64)
        name = f"{part}:{source.name}"
        if not len(rows):
            raise ValueError(
                f"{name} is empty: of the {len(source):,} images of {source.name} a share of {HELD_OUT:.0%} is "
                f"held out by key, which here is {held_out.sum():,}. Use more images, or name a validation set."
            )
        super().__init__(source, rows, name, f"{part} {HELD_OUT} {source.fingerprint}")
