"""Tables that a user wrote beside the data: who goes with whom, and what is said of the two."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from kiloword.data.sources.extra_captions import key_of
from kiloword.data.sources.mixture import MixtureSource
from kiloword.data.sources.sample import check_regular
from kiloword.data.sources.tables import check_once
from kiloword.types import BadSample, Source


def read_columns(path: str, names: Sequence[str]) -> list[list[str]]:
    """Text columns of a parquet file. Raises: ValueError when it cannot be read, or lacks a column or a value."""
    check_regular(Path(path))
    try:
        found = pa.parquet.read_schema(path).names
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(f"{path} has the columns {', '.join(found)}: expected {', '.join(names)}.")
        check_once(Path(path), found, *names)
        table = pa.parquet.read_table(path, columns=list(names))
        columns = [table.column(name).cast(pa.large_string()).to_pylist() for name in names]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {os.strerror(error.errno or errno.EIO)}.") from None
    except pa.ArrowException as error:
        raise ValueError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None
    for name, column in zip(names, columns, strict=True):
        if None in column:
            raise ValueError(f"{path}: row {column.index(None)} has no {name}. Expected text in every row.")
    return columns


def keys(source: Source) -> list[str | None]:
    """The key of every row; None where a row cannot be read and only its record knows."""
    return [_key(source, row) for row in range(len(source))]


def _key(source: Source, row: int) -> str | None:
    if isinstance(source, MixtureSource):
        return _key(*source.locate(row))
    try:
        return key_of(source, row)
    except BadSample:
        return None


@dataclass(frozen=True)
class Rewrites:
    """What is said of pairs of examples, by their keys, in either order."""

    captions: dict[tuple[str, str], list[str]]
    pairs: int  # of two samples that the source has, either order once

    @staticmethod
    def read(path: str, source: Source) -> Rewrites:
        """A parquet file (key, partner, caption); several rows of a pair are several captions.

        Raises: ValueError when it cannot be read, or names no two rows of the source.
        """
        found: dict[tuple[str, str], list[str]] = {}
        for key, partner, caption in zip(*read_columns(path, ("key", "partner", "caption")), strict=True):
            found.setdefault((key, partner), []).append(caption)
        known = set(keys(source))
        pairs = {frozenset(pair) for pair in found if known.issuperset(pair)}
        if not pairs:
            first = next(iter(found), ("", ""))
            raise ValueError(
                f"{path}: no row names two samples of {source.name}, the first is {first}. Was it made of other data?"
            )
        return Rewrites(found, sum(len(pair) == 2 for pair in pairs))

    def share(self, source: Source, partners: Sequence[int] | None) -> float:
        """The share of a source's rows whose partner is one for whom something was written, [0, 1].

        Args: partners: the row of each row's partner, negative for none; None: any other row, all alike.
        """
        if partners is None:
            rows = len(source)
            return min(1.0, 2 * self.pairs / max(rows * (rows - 1), 1))
        all_keys = keys(source)
        mixed = [(all_keys[own], all_keys[other]) for own, other in enumerate(partners) if other >= 0]
        return sum(bool(a and b and self.of(a, b)) for a, b in mixed) / max(len(mixed), 1)

    def of(self, key: str, partner: str) -> list[str]:
        """Captions of a pair, [] where nothing was written."""
        return self.captions.get((key, partner)) or self.captions.get((partner, key)) or []
