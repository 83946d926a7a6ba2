"""Images inside a parquet file. Single values of a parquet page cannot be read, so images are copied to a flat file.

File format (`x.parquet.kwpictures`): the images end to end; a digest [N, 16] and an end, int64 [N], of each; the
fingerprint of the table (32 hexadecimal digits).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from kiloword.data import files
from kiloword.data.sources.sample import MAX_IMAGE, check_size
from kiloword.terminal import shown

MAX_TABLE = 1 << 33  # bytes of text that the columns of a table may hold
_SUFFIX = ".kwpictures"
_DIGEST = 16


class Embedded:
    """N images; any one is a single `pread`. Each process opens the file itself."""

    def __init__(self, table: Path, column: str, fingerprint: str) -> None:
        rows = pa.parquet.read_metadata(table).num_rows
        valid = next((p for p in files.places(table, _SUFFIX) if _is_valid(p, rows, fingerprint)), None)
        self.path = valid or files.write(table, _SUFFIX, lambda file: _copy_images(file, table, column, fingerprint))
        self._start, self.rows = _tables_start(self.path.stat().st_size, rows, fingerprint), rows
        self._open()

    def _open(self) -> None:
        self._file = files.PositionlessFile(self.path)
        raw = self._file.read(self._start + self.rows * _DIGEST, self.rows * 8)
        self._ends = np.concatenate([[0], np.frombuffer(raw, "<i8")])

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_ends")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def digests(self) -> pa.Array:
        """[N] one digest per image: equal for equal images, null for those of zero bytes."""
        raw = self._file.read(self._start, self.rows * _DIGEST)
        digests = pa.FixedSizeBinaryArray.from_buffers(pa.binary(_DIGEST), self.rows, [None, pa.py_buffer(raw)])
        return pa.compute.if_else(pa.array(np.diff(self._ends) > 0), digests, None)

    def read(self, row: int) -> bytes:
        start, end = int(self._ends[row]), int(self._ends[row + 1])
        check_size("the image", end - start, MAX_IMAGE)
        return self._file.read(start, end - start)


@contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Turn Arrow's errors of a damaged table into a ValueError. Errors of the disk are raised unchanged."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as a table: {shown(reason[:200])}") from None


def check_rows(table: Path, *counts: int) -> None:
    """Errors: ValueError when the columns of a damaged table, or its header and its pages, have different lengths."""
    if len(set(counts)) > 1:
        raise ValueError(
            f"{table} is damaged: its columns have {' and '.join(map(str, counts))} rows, expected equal numbers."
        )


def check_expanded(table: Path, columns: Sequence[str]) -> None:
    """Errors: ValueError when text columns take more than MAX_TABLE bytes: parquet stores repeated cells only once.

    The sizes are computed from stored dictionaries, before memory is allocated.
    """
    leaves = pa.parquet.read_metadata(table).schema
    paths = (leaves.column(n).path for n in range(len(leaves)))
    packed = [path for path in paths if path.split(".")[0] in columns]
    total = 0
    with pa.parquet.ParquetFile(table, read_dictionary=packed) as parquet:
        for batch in parquet.iter_batches(columns=list(columns)):
            total += sum(_expanded(column) for column in batch.columns)
            if total > MAX_TABLE:
                raise ValueError(
                    f"{table}: the columns {', '.join(columns)} hold more than {MAX_TABLE:,} bytes of text."
                )


def _expanded(column: pa.Array) -> int:
    """Bytes of an array without its dictionary."""
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pa.compute.binary_length(column.dictionary).take(column.indices)
    return int(pa.compute.sum(lengths).as_py() or 0)


def is_embedded(table: Path, column: str) -> bool:
    """Whether a column contains images, not paths. Errors: ValueError when it can contain neither."""
    kind = pa.parquet.read_schema(table).field(column).type
    if not pa.types.is_struct(kind):
        return _is_bytes(kind)
    inner = [field for field in kind if field.name == "bytes"]
    if len(inner) != 1 or not _is_bytes(inner[0].type):
        raise ValueError(
            f"{table}: the column {column} is {shown(str(kind)[:100])}. Expected paths, bytes, or `bytes` inside."
        )
    return True


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _tables_start(size: int, rows: int, fingerprint: str) -> int:
    return size - rows * (_DIGEST + 8) - len(fingerprint)


def _is_valid(path: Path, rows: int, fingerprint: str) -> bool:
    size = path.stat().st_size if path.is_file() else 0
    start = _tables_start(size, rows, fingerprint)
    if start < 0 or rows < 1:
        return False
    file = files.PositionlessFile(path)
    last_end = int.from_bytes(file.read(size - len(fingerprint) - 8, 8), "little")
    return last_end == start and file.read(size - len(fingerprint), len(fingerprint)) == fingerprint.encode()


def _copy_images(file: BinaryIO, table: Path, column: str, fingerprint: str) -> None:
    digests, ends, end = [], [], 0
    with arrow_errors(table), pa.parquet.ParquetFile(table) as parquet:
        for batch in parquet.iter_batches(batch_size=256, columns=[column]):
            images = batch.column(0)
            if pa.types.is_struct(images.type):
                images = images.field("bytes")
            for image in (p.as_py() or b"" for p in images):
                end += file.write(image)
                digests.append(hashlib.blake2b(image, digest_size=_DIGEST).digest())
                ends.append(end)
    check_rows(table, len(ends), pa.parquet.read_metadata(table).num_rows)
    file.write(b"".join(digests) + np.array(ends, "<i8").tobytes() + fingerprint.encode())
