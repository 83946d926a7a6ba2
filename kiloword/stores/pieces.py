"""Tables computed from a data set piece by piece, so that the same command goes on after an interruption."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kiloword.config.settings import differing, read_config
from kiloword.data.reading import EvalBatch, left_out
from kiloword.data.rows import key_text
from kiloword.data.stored import TableSettings
from kiloword.distributed.sharing import alone, of_first, part_by_part, share
from kiloword.files import atomic, is_taken, write_json
from kiloword.terminal import say
from kiloword.terminal.progress import Bar
from kiloword.types import Skipped, Source

Settings = TypeVar("Settings", bound=TableSettings)
COMMON = {"row": pa.int64(), "key": pa.binary(), "reason": pa.string()}  # why a row is bad; null: it is not
FREE = ("data", "model", "part", "sources", "images")  # settings that the fingerprints cover
Shape = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of a row of a column."""


class Rows(NamedTuple):
    """Computed rows of a batch, also the bad ones, and values of the others in columns."""

    table: pa.Table
    columns: Mapping[str, NDArray[Any]] = MappingProxyType({})


def rows_table(schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Rows by their cells, in the order of the data; bad ones have a `reason`."""
    return pa.Table.from_pylist(sorted(rows, key=lambda cells: cells["row"]), schema)


class PieceWriter(Generic[Settings]):
    """Writes the pieces of a table, a file each, which is there if the piece is complete, and columns that grow.

    Args: folder: of the pieces; name: of the file of settings in it; existing: settings of the table that is there (see
    `resumed`), None for a new one; finished: nothing is missing; columns: `.npy` files that grow, by name.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: Settings,
        existing: Settings | None,
        finished: bool,
        columns: Mapping[str, Shape] | None = None,
    ) -> None:
        self.folder, self.file, self.columns = folder, existing or settings, columns or {}
        self.lengths = dict[str, int]()
        if existing is None:
            write_json(folder / name, asdict(settings))
        self.done = self.file.parts if finished else next(n for n in count() if not self.path(n).is_file())
        if self.done and not finished:
            last = read_table(self.path(self.done - 1)).schema.metadata or {}
            self.lengths = {name: int(last[name.encode()]) for name in self.columns}

    def path(self, number: int) -> Path:
        """The file of a piece."""
        return self.folder / f"part-{number:05d}.parquet"

    def write(self, rows: Sequence[Rows]) -> None:
        """Write the next piece; columns first, as what they hold beyond the last piece is written again."""
        for name, shape in self.columns.items():
            values = [one.columns[name] for one in rows if one.columns]
            self.lengths[name] = _grow(self.folder / f"{name}.npy", shape, self.lengths.get(name, 0), values)
        table = pa.concat_tables([one.table for one in rows]).combine_chunks()
        with atomic(self.path(self.done)) as file:
            pq.write_table(table.replace_schema_metadata({name: str(n) for name, n in self.lengths.items()}), file)
        self.done += 1

    def table(self) -> pa.Table:
        """The complete pieces. Raises: ValueError when no row is usable."""
        pieces = [read_table(self.path(number)).replace_schema_metadata() for number in range(self.done)]
        table = pa.concat_tables(pieces).combine_chunks()
        if table.column("reason").null_count == 0:
            why = left_out(bad_rows(table))
            raise ValueError(f"{self.file.data}: none of its {self.file.rows} rows is a usable image: {why}.")
        return table


def _grow(path: Path, shape: Shape, length: int, values: Sequence[NDArray[Any]]) -> int:
    """Write rows after the first ones of a `.npy` file, which stay; returns the new length."""
    of_row, dtype = shape
    parts = [np.ascontiguousarray(part, dtype).reshape(-1, *of_row) for part in values]
    longer = length + sum(map(len, parts))
    with path.open("r+b" if path.exists() else "w+b") as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": (longer, *of_row)}
        np.lib.format.write_array_header_1_0(file, header)  # padded, so that it does not grow with the length
        file.seek(length * dtype.itemsize * math.prod(of_row), os.SEEK_CUR)
        file.truncate()
        for part in parts:
            file.write(part.data)
        file.flush()
        os.fsync(file.fileno())
    return longer


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A parquet table."""
    with pa.OSFile(os.fsencode(path)) as file:  # a file of Python's may be closed by a thread when Python has ended
        return pq.read_table(file, columns=columns)


def bad_rows(table: pa.Table) -> list[Skipped]:
    """The bad rows of a table."""
    bad = table.select(list(COMMON)).filter(table.column("reason").is_valid()).to_pylist()
    return [Skipped(cells["row"], key_text(cells["key"]), cells["reason"]) for cells in bad]


def resumed(folder: Path, name: str, settings: Settings, what: str) -> Settings | None:
    """Settings of the table in a folder; None in a new folder.

    Raises: ValueError when the folder holds something else, or a table of another model, other data or options.
    """
    if (folder / name).is_file():
        existing = read_config(folder / name, type(settings))
        check_same(folder, existing, settings, what)
        return existing
    if is_taken(folder):
        raise ValueError(f"{folder} exists and holds no {what}: choose another --out, or remove it.")
    return None


def check_same(path: Path, existing: TableSettings, new: TableSettings, what: str) -> None:
    """Raises: ValueError for a table of another model, other data or options."""
    found = differing(asdict(existing), asdict(new)).items()
    if different := [f"{name} {a} there, {b} here" for name, (a, b) in found if name.partition(".")[0] not in FREE]:
        raise ValueError(
            f"{path} holds other {what}, of {existing.data} by {existing.model}, not of {new.data} by {new.model}: "
            f"{'; '.join(different)}. Choose another --out, or remove what is there."
        )


def fill(
    writer: PieceWriter[Settings] | None,
    source: Source,
    batch: int,
    read: Callable[[list[range]], Iterator[EvalBatch]],
    compute: Callable[[EvalBatch], Rows],
    report: TextIO | None,
) -> None:
    """Compute and write the missing pieces of a table; ranks share the batches.

    Args: writer: on the first rank, else None; read: ranges of rows to batches of images; report: gets progress.
    """
    begun = None if writer is None else (writer.done, writer.file.parts, writer.file.part)
    done, parts, part = of_first(begun) or (0, 0, 1)
    todo = [range(n * part, min((n + 1) * part, len(source))) for n in range(done, parts)]
    left, read_rows = sum(map(len, todo)), 0
    if report is not None and done:
        say(f"{len(source) - left:,} of {len(source):,} rows are done already.", to=report)
    bar = Bar("images", "images", report)

    def make(batches: list[range]) -> Iterator[Rows]:
        nonlocal read_rows
        for images in read(batches):
            with alone():
                rows = compute(images)
            read_rows += len(rows.table) * share()[1]  # the other ranks have done about as much
            if report is not None:
                bar(min(read_rows, left), left)
            yield rows

    try:
        for rows in part_by_part(todo, batch, make):
            if writer is not None:
                writer.write(rows)
    except KeyboardInterrupt:
        if writer is None:
            raise
        kept = f"{min(writer.done * part, len(source)):,} of {len(source):,} rows are kept"
        raise KeyboardInterrupt(f"{kept}, the same command goes on with the others.") from None


def say_bad(table: pa.Table, report: TextIO | None) -> None:
    """Print the bad rows of a table, and how many there are."""
    if report is not None and (bad := bad_rows(table)):
        say(*left_out(bad).lines(), f"{len(bad):,} of {len(table):,} rows are bad, and not in the table.", to=report)
