"""Tables of the user for the transforms: partners of samples, and captions for pairs of samples."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from kiloword.data.sources.columns import check_once
from kiloword.data.sources.optional import keys
from kiloword.data.sources.sample import check_regular
from kiloword.types import Source


def read_columns(path: str, names: Sequence[str]) -> list[list[str]]:
    """Text columns of a parquet file. Raises: ValueError when it cannot be read, or lacks a column or a value."""
    check_regular(Path(path))
    try:
        present = pa.parquet.read_schema(path).names
        missing = [name for name in names if name not in present]
        if missing:
            raise ValueError(f"{path} has the columns {', '.join(present)}: expected {', '.join(names)}.")
        check_once(Path(path), present, *names)
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


@dataclass(frozen=True)
class Rewrites:
    """Captions of pairs of samples, by their keys in either order."""

    captions: dict[tuple[str, str], list[str]]
    pairs: int  # number of unordered pairs of samples in the source

    @staticmethod
    def read(path: str, source: Source) -> Rewrites:
        """Read a parquet file (key, partner, caption); several rows of a pair are several captions.

        Raises: ValueError when it cannot be read, or names no pair of the source.
        """
        captions: dict[tuple[str, str], list[str]] = {}
        for key, partner, caption in zip(*read_columns(path, ("key", "partner", "caption")), strict=True):
            captions.setdefault((key, partner), []).append(caption)
        all_keys = set(keys(source))
        pairs = {frozenset(pair) for pair in captions if all_keys.issuperset(pair)}
        if not pairs:
            first = next(iter(captions), ("", ""))
            raise ValueError(
                f"{path}: no row names two samples of {source.name}, the first is {first}. Was it made of other data?"
            )
        return Rewrites(captions, sum(len(pair) == 2 for pair in pairs))

    def share(self, source: Source, partners: Sequence[int] | None) -> float:
        """The share of rows for whose pair with their partner captions exist, [0, 1].

        Args: partners: row of each row's partner, negative for none; None: any other row with equal probability.
        """
        if partners is None:
            rows = len(source)
            return min(1.0, 2 * self.pairs / max(rows * (rows - 1), 1))
        all_keys = keys(source)
        mixed = [(all_keys[row], all_keys[other]) for row, other in enumerate(partners) if other >= 0]
        return sum(bool(a and b and self.of(a, b)) for a, b in mixed) / max(len(mixed), 1)

    def of(self, key: str, partner: str) -> list[str]:
        """Captions of a pair; [] if there are none."""
        return self.captions.get((key, partner)) or self.captions.get((partner, key)) or []
