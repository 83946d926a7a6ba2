"""Parts of tables that are computed from a data set once, such as features and captions, and what a table is made of.

A part is an Arrow file with the readable images among `part` rows of the data, in their order. Its metadata holds the
identity of the table, the bad rows and a checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from kiloword.config.settings import BaseSettings, about
from kiloword.files import write_atomic
from kiloword.types import Skipped


@dataclass(frozen=True, kw_only=True)
class TableSettings(BaseSettings):
    """What a table is computed from; a file beside the parts holds it."""

    data: str  # as given by the user
    fingerprint: str  # of the data
    rows: int = field(metadata=about(low=1, high=1e12))  # of the data, including bad ones
    part: int = field(metadata=about(low=1, high=1e9))  # rows in a part

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part)

    def rows_of(self, number: int) -> range:
        """The rows of the data in a part."""
        return range(number * self.part, min((number + 1) * self.part, self.rows))

    def schema(self) -> pa.Schema:
        """Columns of a part, among them `key`, and `content`: a digest [16] of what the row is computed from."""
        raise NotImplementedError

    def compared(self) -> Sequence[tuple[Any, str]]:
        """Values that must be equal to resume the table, each with its text in messages."""
        raise NotImplementedError

    def identity(self) -> str:
        """The identity of the table, recorded in each part."""
        return hashlib.blake2b(json.dumps(self.written(), sort_keys=True).encode(), digest_size=16).hexdigest()

    def written(self) -> dict[str, Any]:
        """What the file beside the parts holds."""
        return asdict(self)


class Part:
    """A part of a table, memory-mapped. Errors: ValueError when the file is missing or damaged."""

    again: ClassVar[str] = "Run the same command again to complete it."

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        if path.exists() and not path.is_file():  # a pipe or a device may be endless
            raise ValueError(f"{path} is damaged. {self.again}")
        try:
            with pa.memory_map(os.fsencode(path)) as file, pa.ipc.open_file(file) as reader:
                columns = reader.schema.equals(schema)
                meta = json.loads((reader.schema.metadata or {})[b"kiloword"])
                self.table, self._crc = meta["table"], meta["crc"]
                self.skipped = [Skipped(*row) for row in meta["skipped"]]
                self.batch = reader.get_batch(0)
            self.batch.validate()  # reads offsets alone
        except FileNotFoundError:
            raise ValueError(f"{path} is missing. {self.again}") from None
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            raise ValueError(f"{path} is damaged. {self.again}") from None
        if not columns:
            raise ValueError(f"{path} has other columns than its table.json. {self.again}")
        if any(column.null_count for column in self.batch.columns):
            raise ValueError(f"{path} is damaged. {self.again}")

    def whole(self) -> bool:
        """Whether the checksum of the whole file matches."""
        try:
            self.batch.validate(full=True)
        except pa.ArrowException:
            return False
        return bool(checksum(self.batch.columns) == self._crc)


def write_part(path: Path, batches: Sequence[pa.RecordBatch], skipped: Sequence[Skipped], table: TableSettings) -> None:
    """Write a part atomically. Args: batches: of its rows, with the columns of the table."""
    schema = table.schema()
    batches = [empty_batch(schema), *batches]
    columns = [pa.concat_arrays([batch.column(name) for batch in batches]) for name in schema.names]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    batch = pa.ipc.read_record_batch(batch.serialize(), schema)  # buffers as a reader sees them
    meta = {"table": table.identity(), "skipped": [astuple(row) for row in skipped], "crc": checksum(batch.columns)}
    schema = schema.with_metadata({"kiloword": json.dumps(meta)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    write_atomic(path, sink.getvalue().to_pybytes())


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows."""
    return pa.RecordBatch.from_arrays([pa.array([], kind) for kind in schema.types], schema=schema)


def checksum(columns: Iterable[pa.Array]) -> int:
    """CRC32 of all columns of a part."""
    buffers = (buffer for column in columns for buffer in column.buffers() if buffer is not None)
    return reduce(lambda crc, buffer: zlib.crc32(buffer, crc), buffers, 0)


def part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.arrow"
