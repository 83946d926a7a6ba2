"""Tables that a user wrote beside the data: who goes with whom, and what is said of the two."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from kiloword.data.extra_captions import key_of
from kiloword.data.mixture import Mixture
from kiloword.data.sample import check_regular
from kiloword.data.tables import check_once
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
    if isinstance(source, Mixture):
        return _key(*source.locate(row))
    try:
        return key_of(source, row)
    except BadSample:
        return None


@dataclass(frozen=True)
class Rewrites:
    """What is said of pairs of examples, by their keys, in either order."""

    captions: dict[tuple[str, str], list[str]]

    @staticmethod
    def read(path: str, source: Source) -> Rewrites:
        """A parquet file (key, partner, caption); several rows of a pair are several captions.

        Raises: ValueError when it cannot be read, or names no two rows of the source.
        """
        found: dict[tuple[str, str], list[str]] = {}
        for key, partner, caption in zip(*read_columns(path, ("key", "partner", "caption")), strict=True):
            found.setdefault((key, partner), []).append(caption)
        known = set(keys(source))
        if not any(a in known and b in known for a, b in found):
            first = next(iter(found), ("", ""))
            raise ValueError(
                f"{path}: no row names two samples of {source.name}, the first is {first}. Was it made of other data?"
            )
        return Rewrites(found)

    def of(self, key: str, partner: str) -> list[str]:
        """Captions of a pair, [] where nothing was written."""
        return self.captions.get((key, partner)) or self.captions.get((partner, key)) or []
