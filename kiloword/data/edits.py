"""What makes a data set of others: some of their rows, other captions, several sources with weights."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kiloword.data.rows import key_bytes
from kiloword.data.source import info_of, key_of, keys, texts_of
from kiloword.randomness import permutation
from kiloword.types import NoCaption, Record, Source

HELD_OUT = 0.1  # share of the keys
PARTS = ("train-part", "val-part")  # PART:SRC is that part of SRC: data without a split, in two parts by key
_OF_A_ROW = {"scene", "hierarchies"}
_OF_ALL_ROWS = {"natural", "remote", "classnames", "templates", "notes", "answers", "majority", "labels", "relevance"}

Edit = Callable[[int, list[str]], list[str]]
"""From a row of a source and its captions to other captions of the row. Raises: BadSample."""


def digest(*texts: str) -> str:
    """A fingerprint, from fingerprints, choices and names of files: 32 hexadecimal digits."""
    return hashlib.blake2b("\n".join(texts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


class Derived:
    """Rows of other sources: `locate` says which."""

    def locate(self, row: int) -> tuple[Source, int]:
        """The source, and its row."""
        raise NotImplementedError

    def key(self, row: int) -> str:
        """The key of the row in its source. Raises BadSample."""
        return key_of(*self.locate(row))

    def captions(self, row: int) -> list[str]:
        """Captions, without reading the image if the source supports that. Raises BadSample."""
        return texts_of(*self.locate(row))

    def info(self, row: int) -> Mapping[str, Any]:
        """`Record.info`, without reading the image if the source supports that. Raises BadSample."""
        return info_of(*self.locate(row))

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        source, place = self.locate(row)
        return source.record(place)


@dataclass(eq=False, repr=False)
class Selection(Derived):
    """Some rows of a source, or other captions; all else is that of the source.

    Args: fingerprint: see `kiloword.types.Source`; rows [n]: of the source, None: all; edit: makes captions of those
    of the source. A row without a caption gets what `edit` gives it; other bad rows stay bad.
    """

    source: Source
    name: str
    fingerprint: str
    rows: NDArray[np.integer[Any]] | None = None
    edit: Edit | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_A_ROW | _OF_ALL_ROWS:
            raise AttributeError(name)
        member = getattr(self.source, name)
        if name in _OF_A_ROW:
            return lambda row: member(self.locate(row)[1])
        if name == "relevance":
            return lambda captions, rows: member(captions, [self.locate(row)[1] for row in rows])
        return member if name != "labels" or self.rows is None else member[self.rows]

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    def locate(self, row: int) -> tuple[Source, int]:
        return self.source, row if self.rows is None else int(self.rows[row])

    def captions(self, row: int) -> list[str]:
        captions = super().captions(row)
        return captions if self.edit is None else self.edit(self.locate(row)[1], captions)

    def record(self, row: int) -> Record:
        if self.edit is None:
            return super().record(row)
        try:
            record = super().record(row)
        except NoCaption as error:
            record = error.record
        record = replace(record, captions=self.edit(self.locate(row)[1], record.captions))
        if not record.captions and record.label is None:
            raise NoCaption(record)
        return record


def part_of(src: str) -> tuple[str, str]:
    """The part that a SRC names, and the rest of it: "val-part:photos" -> ("val-part", "photos"); else ("", SRC)."""
    part, colon, rest = src.partition(":")
    return (part, rest) if colon and part in PARTS else ("", src)


def is_held_out(key: str) -> bool:
    """Whether a key is in the part to validate on: by a digest of the key alone, so that new images move no others."""
    drawn = hashlib.blake2b(key_bytes(key), digest_size=8, person=b"held out").digest()
    return int.from_bytes(drawn, "big") < HELD_OUT * 2**64


def held_out(source: Source, part: str) -> Selection:
    """The rows of a source that are in one of its two parts; images with one key are in the same part.

    Args: part: "train-part", or "val-part" (see `is_held_out`); a row whose key cannot be read is in the first.
    Errors: ValueError where the part has no row.
    """
    inside = np.array([key is not None and is_held_out(key) for key in keys(source)], dtype=bool)
    rows, name = np.flatnonzero(inside == (part == "val-part")), f"{part}:{source.name}"
    if not len(rows):
        raise ValueError(
            f"{name} is empty: of the {len(source):,} images of {source.name} a share of {HELD_OUT:.0%} is held out by "
            f"key, which here is {inside.sum():,}. Use more images, or name a validation set."
        )
    return Selection(source, name, digest(f"{part} {HELD_OUT} {source.fingerprint}"), rows)


class MixtureSource(Derived):
    """Concatenated sources; a weight is the number of passes over a source in an epoch.

    A weight of 2.3 is two whole passes and a part of round(0.3 N) rows from a keyed permutation, along which
    `at(epoch)` moves the part. Every pass has its own row numbers, and so its own random draws.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], epoch: int = 0) -> None:
        self.sources, self.weights, self.epoch = list(sources), list(weights), epoch
        pairs = list(zip(sources, weights, strict=True))
        self.name = " + ".join(f"{w:g} x {s.name}" for s, w in pairs)
        self.fingerprint = digest(*(f"{s.fingerprint} {w!r}" for s, w in pairs))
        self.natural = all(getattr(s, "natural", True) for s in sources)
        self.remote = any(getattr(s, "remote", False) for s in sources)
        self.classnames, self.templates = (_common(sources, name) for name in ("classnames", "templates"))
        self.notes = [note for s in sources for note in getattr(s, "notes", [])]
        self._parts = _parts(epoch, *((len(s), s.fingerprint, math.modf(w)[0]) for s, w in pairs))
        self._ends = list(accumulate(int(w) * len(s) + len(p) for (s, w), p in zip(pairs, self._parts, strict=True)))

    def at(self, epoch: int) -> MixtureSource:
        """The same mixture with the parts of another epoch."""
        return MixtureSource(self.sources, self.weights, epoch)

    def __len__(self) -> int:
        return self._ends[-1]

    def _place(self, row: int) -> tuple[int, int]:
        """The number of the source, and its row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        which = bisect_right(self._ends, row)
        rows, local = len(self.sources[which]), row - (self._ends[which - 1] if which else 0)
        whole = local < int(self.weights[which]) * rows
        return which, local % rows if whole else int(self._parts[which][local - int(self.weights[which]) * rows])

    def locate(self, row: int) -> tuple[Source, int]:
        which, local = self._place(row)
        return self.sources[which], local

    def stored_row(self, row: int) -> int:
        """The number of a row among those of all sources: the same in each pass and epoch."""
        which, local = self._place(row)
        return sum(map(len, self.sources[:which])) + local


def stored_row(source: Source, row: int) -> int:
    """A number of a row that each pass and epoch of a mixture has alike."""
    return int(source.stored_row(row)) if hasattr(source, "stored_row") else row


def origin(source: Source, row: int) -> tuple[Source, int]:
    """The source and the row that a row of selections and mixtures comes from."""
    while isinstance(source, Derived):
        source, row = source.locate(row)
    return source, row


def origins(source: Source) -> list[Source]:
    """The sources that rows come from, see `origin`."""
    if not isinstance(source, Selection | MixtureSource):
        return [source]
    inner = source.sources if isinstance(source, MixtureSource) else [source.source]
    return list({(one.name, one.fingerprint): one for each in inner for one in origins(each)}.values())


def mix(sources: Sequence[Source], weights: Sequence[float] = ()) -> Source:
    """One source from several; without weights every row is used once per epoch.

    Errors: ValueError when there are no sources, or the weights do not fit.
    """
    if not sources:
        raise ValueError("no data: name at least one source.")
    weights = list(weights) or [1.0] * len(sources)
    if len(weights) != len(sources):
        raise ValueError(f"{len(weights)} weights for {len(sources)} sources: give one weight per source, or none.")
    for source, weight in zip(sources, weights, strict=True):
        if not (math.isfinite(weight) and round(weight * len(source)) >= 1):
            raise ValueError(f"weight {weight:g} of {source.name} takes none of its {len(source):,} rows: enlarge it.")
    return sources[0] if weights == [1.0] else MixtureSource(sources, weights)


def parts_of(source: Source) -> list[Source]:
    """The sources of a mixture; a source that is none by itself."""
    return source.sources if isinstance(source, MixtureSource) else [source]


def every_row(source: Source) -> Source:
    """The source, or a mixture of the same sources, each once, whatever its weight."""
    return mix(list({(part.name, part.fingerprint): part for part in parts_of(source)}.values()))


def _common(sources: Sequence[Source], name: str) -> list[str] | None:
    """A list that all sources have alike; None where they differ."""
    first, *others = (getattr(source, name, None) for source in sources)
    return first if all(other == first for other in others) else None


@lru_cache(maxsize=4)  # a run reads at the end of an epoch what is in the next one, too
def _parts(epoch: int, *sources: tuple[int, str, float]) -> list[NDArray[np.integer[Any]]]:
    return [_part(*source, epoch) for source in sources]


def _part(n: int, fingerprint: str, share: float, epoch: int) -> NDArray[np.integer[Any]]:
    """[round(share n)] of n rows, ascending so that reading stays sequential."""
    count = round(share * n)
    if not count:
        return np.empty(0, np.int64)
    rows = permutation(n, fingerprint, "part of a mixture")
    start = epoch * count % n
    return np.sort(np.concatenate([rows[start : start + count], rows[: max(0, start + count - n)]]))
