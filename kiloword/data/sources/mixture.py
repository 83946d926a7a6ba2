"""A mixture of several sources, each with a weight."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kiloword.data.sources.optional import key_of, question, texts_of
from kiloword.randomness import permutation
from kiloword.types import Record, Source


class MixtureSource:
    """Concatenated sources; a weight is the number of passes over a source in an epoch.

    A weight of 2.3 is two whole passes and a part of round(0.3 N) rows from a keyed permutation. Every pass has its own
    row numbers, and so its own random draws. `at(epoch)` moves the part along the permutation: after 1/0.3 epochs all
    rows were used equally often. The length never changes, only the rows of the part.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], epoch: int = 0) -> None:
        self.sources, self.weights, self.epoch = list(sources), list(weights), epoch
        self.name = " + ".join(f"{w:g} x {s.name}" for s, w in zip(sources, weights, strict=True))
        lines = "\n".join(f"{s.fingerprint} {w!r}" for s, w in zip(sources, weights, strict=True))
        self.fingerprint = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
        self.natural = all(getattr(s, "natural", True) for s in sources)
        self.classnames, self.templates = (_common(sources, name) for name in ("classnames", "templates"))
        self.notes = [note for s in sources for note in getattr(s, "notes", [])]
        self._parts = [_part(s, math.modf(w)[0], epoch) for s, w in zip(sources, weights, strict=True)]
        lengths = [int(w) * len(s) + len(p) for s, w, p in zip(sources, weights, self._parts, strict=True)]
        self._ends = list(accumulate(lengths))

    def at(self, epoch: int) -> MixtureSource:
        """The same mixture with the parts of another epoch."""
        return MixtureSource(self.sources, self.weights, epoch)

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, row: int) -> tuple[Source, int]:
        """The source and its row for a row of the mixture."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        which = bisect_right(self._ends, row)
        source, local = self.sources[which], row - (self._ends[which - 1] if which else 0)
        passes = int(self.weights[which]) * len(source)
        return source, local % len(source) if local < passes else int(self._parts[which][local - passes])

    @property
    def stored_rows(self) -> int:
        """Number of rows of all sources, whatever their weights."""
        return sum(map(stored_rows, self.sources))

    def stored_row(self, row: int) -> int:
        """The number of a row among those of all sources: the same in each pass and epoch."""
        source, local = self.locate(row)
        which = next(n for n, one in enumerate(self.sources) if one is source)
        return sum(map(stored_rows, self.sources[:which])) + stored_row(source, local)

    def key(self, row: int) -> str:
        """The key of the row in its source. Raises BadSample."""
        return key_of(*self.locate(row))

    def captions(self, row: int) -> list[str]:
        """Captions, without reading the image if the source supports that. Raises BadSample."""
        return texts_of(*self.locate(row))

    def question(self, row: int) -> str | None:
        """The question, without reading the image if the source supports that. Raises BadSample."""
        return question(*self.locate(row))

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        source, local = self.locate(row)
        return source.record(local)


def stored_rows(source: Source) -> int:
    """Number of rows of a source, in a mixture without repetitions by weights."""
    return int(getattr(source, "stored_rows", len(source)))


def stored_row(source: Source, row: int) -> int:
    """A number of a row that each pass and epoch of a mixture has alike, below `stored_rows`."""
    return int(source.stored_row(row)) if hasattr(source, "stored_row") else row


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
            raise ValueError(f"weight {weight:g} of {source.name} takes none of its {len(source):,} rows.")
    return sources[0] if weights == [1.0] else MixtureSource(sources, weights)


def parts_of(source: Source) -> list[Source]:
    """The sources of a mixture and of mixtures within it; a source that is none by itself."""
    return [p for part in source.sources for p in parts_of(part)] if isinstance(source, MixtureSource) else [source]


def every_row(source: Source) -> Source:
    """The source, or a mixture of the same sources, each once, whatever its weight."""
    return mix(list({(part.name, part.fingerprint): part for part in parts_of(source)}.values()))


def _common(sources: Sequence[Source], name: str) -> list[str] | None:
    """A list that all sources have alike; None where they differ."""
    first, *others = (getattr(source, name, None) for source in sources)
    return first if all(other == first for other in others) else None


def _part(source: Source, share: float, epoch: int) -> NDArray[np.integer[Any]]:
    """[round(share N)] rows, ascending so that reading stays sequential."""
    count = round(share * len(source))
    if not count:
        return np.empty(0, np.int64)
    rows = permutation(len(source), source.fingerprint, "part of a mixture")
    start = epoch * count % len(source)
    part = np.concatenate([rows[start : start + count], rows[: max(0, start + count - len(source))]])
    part.sort()
    return part
