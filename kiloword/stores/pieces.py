"""Tables computed from a data set piece by piece, so that the same command goes on after an interruption."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kiloword.config.settings import differing, read_config
from kiloword.data.reading import EvalBatch, left_out
from kiloword.data.rows import key_text
from kiloword.data.stored import TableSettings
from kiloword.distributed.sharing import alone, is_first, of_first, part_by_part, share
from kiloword.files import Lock, atomic, is_taken, write_json
from kiloword.terminal import say
from kiloword.terminal.progress import Bar
from kiloword.types import Skipped, Source

Settings = TypeVar("Settings", bound=TableSettings)
COMMON = {"row": pa.int64(), "key": pa.binary(), "reason": pa.string()}  # why a row is bad; null: it is not
FREE = ("data", "model", "part", "sources", "images")  # settings that the fingerprints cover
Shape = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of a row of a column."""


class Rows(NamedTuple):
    """Cells of the computed rows of a batch, where bad ones have a `reason`, and values of the others in columns."""

    cells: list[dict[str, Any]]
    columns: Mapping[str, NDArray[Any]] = MappingProxyType({})


@contextmanager
def computed(
    folder: Path,
    settings: Settings,
    schema: pa.Schema,
    source: Source,
    batch: int,
    read: Callable[[list[range]], Iterator[EvalBatch]],
    compute: Callable[[EvalBatch], Rows],
    report: TextIO | None,
    *,
    out: Path,
    name: str,
    what: str,
    columns: Mapping[str, Shape] = MappingProxyType({}),
    finished: Path | None = None,
) -> Iterator[tuple[Settings, pa.Table] | None]:
    """The table of all rows of a source and its settings, on the first rank, while its folder is locked.

    Pieces are files `part-N.parquet`, each there as a whole, and `.npy` files that grow; those that are there are not
    computed again. Ranks share the batches.

    Args: read: ranges of rows to batches of images; report: gets progress and bad rows; out: of the command; name: of
    the file of settings in the folder; what: the table holds; columns: that grow; finished: file of the whole table.
    Raises: ValueError when the folder holds something else, or a table of another model, other data or options, and
    when no row is usable, or batches have none.
    """

    if batch < 1:
        raise ValueError(f"--batch is {batch}: expected at least 1.")

    def piece(number: int) -> Path:
        return folder / f"part-{number:05d}.parquet"

    def made(batches: list[range]) -> Iterator[Rows]:
        """Computed rows of each batch, with a progress bar over all rows that are left."""
        left, ready, bar = sum(map(len, todo)), 0, Bar("images", "images", report)
        if report is not None and left < len(source):
            say(f"{len(source) - left:,} of {len(source):,} rows are done already.", to=report)
        for images in read(batches):
            with alone():
                rows = compute(images)
            ready += len(rows.cells) * share()[1]  # the other ranks have done about as much
            bar(min(ready, left), left)
            yield rows

    with ExitStack() as locked:
        done, lengths = 0, dict[str, int]()
        if is_first():
            existing = _existing(folder, name, settings, what)  # what is no table gets no lock
            locked.enter_context(Lock(out, "writing", folder))
            if existing is None:
                write_json(folder / name, asdict(settings))
            settings = existing or settings
            if finished is not None and finished.is_file():
                done = settings.parts
            elif done := next(n for n in count() if not piece(n).is_file()):
                last = read_table(piece(done - 1)).schema.metadata or {}
                lengths = {name: int(last[name.encode()]) for name in columns}
        done, parts, part = of_first((done, settings.parts, settings.part))
        todo = [range(n * part, min((n + 1) * part, len(source))) for n in range(done, parts)]
        try:
            for rows in part_by_part(todo, batch, made):
                if is_first():  # columns first: what they hold beyond the last piece is written again
                    for column, shape in columns.items():
                        values = [one.columns[column] for one in rows if one.columns]
                        lengths[column] = _grow(folder / f"{column}.npy", shape, lengths.get(column, 0), values)
                    cells = [cell for one in rows for cell in sorted(one.cells, key=lambda cell: cell["row"])]
                    table = pa.Table.from_pylist(cells, schema.with_metadata({k: str(n) for k, n in lengths.items()}))
                    with atomic(piece(done)) as file:
                        pq.write_table(table, file)
                done += 1
        except KeyboardInterrupt:
            if not is_first():
                raise
            kept = f"{min(done * part, len(source)):,} of {len(source):,} rows are kept"
            raise KeyboardInterrupt(f"{kept}, the same command goes on with the others.") from None
        if not is_first():
            yield None
            return
        files = [finished] if finished is not None and finished.is_file() else map(piece, range(parts))
        table = pa.concat_tables([read_table(path).replace_schema_metadata() for path in files]).combine_chunks()
        named = table.select(list(COMMON)).filter(table.column("reason").is_valid()).to_pylist()
        bad_rows = [Skipped(cells["row"], key_text(cells["key"]), cells["reason"]) for cells in named]
        bad = left_out(bad_rows)
        if len(bad_rows) == len(table):
            raise ValueError(f"{settings.data}: none of its {settings.rows} rows is a usable image: {bad}.")
        if report is not None and bad_rows:
            say(*bad.lines(), f"{len(bad_rows):,} of {len(table):,} samples are bad, and not in the table.", to=report)
        yield settings, table


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


def _existing(folder: Path, name: str, settings: Settings, what: str) -> Settings | None:
    """Settings of the table in a folder; None in a new folder. Raises: see `computed`."""
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
