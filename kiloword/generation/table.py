"""A table of captions, written in atomic parts so that a run can be resumed.

Files: `OUT.parts/captions.json` (`CaptionFile`) and `OUT.parts/part-00000.parquet`, ..., each with the images of `part`
rows of the data. At the end OUT, a parquet table with the columns key, captions (list of text, best first) and scores,
whose metadata is the `CaptionFile`; the parts are then removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from kiloword.checkpoint.files import atomic, is_taken, write_atomic, write_json
from kiloword.config.recipes import BaseSettings, parse, read_config
from kiloword.data.files import key_bytes
from kiloword.generation.options import GenerationOptions
from kiloword.types import Skipped

FILE = "captions.json"
SCHEMA = pa.schema({"key": pa.string(), "captions": pa.list_(pa.string()), "scores": pa.list_(pa.float32())})
_PART = SCHEMA.append(pa.field("content", pa.binary(16)))  # digest of the pixels


@dataclass(frozen=True, kw_only=True)
class CaptionFile(BaseSettings):
    """Model, data and options that captions were generated with."""

    model: str  # as given by the user
    model_fingerprint: str
    precision: str  # compute precision
    options: GenerationOptions
    data: str  # as the user wrote it
    fingerprint: str  # of the data
    rows: int  # number of rows of the data, bad ones included
    part: int  # rows per part
    format: Literal["kiloword-captions-1"] = "kiloword-captions-1"

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part)


# fields that must be equal to resume a table, and their description in messages
_SAME: dict[str, Callable[[CaptionFile], str]] = {
    "model_fingerprint": lambda file: f"model {file.model} ({file.model_fingerprint[:16]})",
    "fingerprint": lambda file: f"data {file.data} ({file.fingerprint[:16]})",
    "precision": lambda file: f"precision {file.precision}",
}


@dataclass
class CaptionRows:
    """Collected rows of one part."""

    keys: list[str] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    captions: list[list[str]] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


class CaptionWriter:
    """Writes the table of captions at a path: new, resumed, or finished (then `missing` is empty).

    Errors: ValueError if the path has anything else, or captions of another model, other data or other options.
    """

    def __init__(self, out: Path, file: CaptionFile) -> None:
        self.out, self.folder = out, parts_of(out)
        self.file = what_is_there(out, file) or file
        if self.file is file:
            write_json(self.folder / FILE, asdict(file))
        self._id = hashlib.blake2b(json.dumps(asdict(self.file), sort_keys=True).encode(), digest_size=16).hexdigest()
        self._contents: dict[bytes, bytes] = {}  # digest of the image of every key
        self.skipped: list[Skipped] = []
        self.repeated = 0  # rows that repeat a key and its image
        self.finished = out.exists()
        numbers = range(0 if self.finished else self.file.parts)
        self.missing = [number for number in numbers if not self._is_whole(number)]

    def rows_of(self, number: int) -> range:
        """The rows of the data that a part holds."""
        return range(number * self.file.part, min((number + 1) * self.file.part, self.file.rows))

    def _is_whole(self, number: int) -> bool:
        """Whether a part is complete; if so, loads its keys and bad rows."""
        try:
            table = self._read(number)
            meta = json.loads((table.schema.metadata or {})[b"kiloword"])
        except (OSError, pa.ArrowException, KeyError, ValueError):
            return False
        if meta.pop("digest", None) != _digest(table, meta) or meta["table"] != self._id:
            return False
        keys = (key_bytes(key) for key in table.column("key").to_pylist())
        self._contents.update(zip(keys, table.column("content").to_pylist(), strict=True))
        self.skipped += [Skipped(*one) for one in meta["skipped"]]
        self.repeated += meta["repeated"]
        return True

    def _read(self, number: int) -> pa.Table:
        with self._path(number).open("rb") as file:  # pyarrow takes no path that is not UTF-8
            return pq.read_table(file, use_threads=False)

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05d}.parquet"

    def is_new(self, key: str, content: bytes) -> bool:
        """Whether the key of a row is new.

        Args: content: see `content_of`. Raises: ValueError if the key occurred with another image.
        """
        raw = key_bytes(key)
        earlier = self._contents.get(raw)
        if earlier is None:
            self._contents[raw] = content
            return True
        if earlier != content:
            raise ValueError(
                f"two images of {self.file.data} have the key {key!r}. Captions are joined by key: give each image "
                "a unique key, or caption and train on one source at a time."
            )
        return False

    def write(self, number: int, rows: CaptionRows) -> None:
        """Write one part atomically. Errors: ValueError if it cannot be written."""
        repeated = len(self.rows_of(number)) - len(rows.skipped) - len(rows.keys)
        skipped = [[one.row, one.key, one.reason] for one in rows.skipped]
        meta = {"table": self._id, "skipped": skipped, "repeated": repeated}
        columns = {"key": rows.keys, "captions": rows.captions, "scores": rows.scores, "content": rows.contents}
        table = pa.table(columns, schema=_PART)
        meta["digest"] = _digest(table, meta)
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata({"kiloword": json.dumps(meta)}), buffer)
        write_atomic(self._path(number), buffer.getvalue())
        self.skipped += rows.skipped
        self.repeated += repeated

    def finish(self) -> tuple[int, int]:
        """Merge the parts; returns the numbers of images and captions. Raises: ValueError if there are none."""
        if not self.finished:
            if not self._contents:
                why = f", the first because: {self.skipped[0].reason}" if self.skipped else ""
                raise ValueError(f"{self.file.data}: none of its {self.file.rows} rows is a usable image{why}.")
            schema = SCHEMA.with_metadata({"kiloword": json.dumps(asdict(self.file))})
            with atomic(self.out) as file, pq.ParquetWriter(file, schema) as table:
                for part in self._tables():
                    table.write_table(part.cast(schema))
        shutil.rmtree(self.folder, ignore_errors=True)
        with self.out.open("rb") as file, pq.ParquetFile(file) as whole:
            batches = whole.iter_batches(columns=["captions"])
            return whole.metadata.num_rows, sum(len(batch.column(0).flatten()) for batch in batches)

    def leave(self) -> int:
        """After a failure: the number of finished parts; removes the folder if they have no captions."""
        kept = sum(self._path(number).is_file() for number in range(self.file.parts)) if self._contents else 0
        if not kept and not self.finished:
            shutil.rmtree(self.folder, ignore_errors=True)
        return kept

    def _tables(self) -> Iterator[pa.Table]:
        """Tables of the parts with images."""
        for number in range(self.file.parts):
            table = self._read(number).select(SCHEMA.names)
            if len(table):
                yield table


def _digest(table: pa.Table, meta: dict[str, Any]) -> str:
    """Digest of the content of a part."""
    content = repr([column.to_pylist() for column in table.columns]) + json.dumps(meta)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def content_of(image: Tensor) -> bytes:
    """A digest of a prepared image."""
    return hashlib.blake2b(image.contiguous().numpy().data, digest_size=16).digest()


def parts_of(out: Path) -> Path:
    """The folder of a table's parts."""
    return out.with_name(out.name + ".parts")


def what_is_there(out: Path, file: CaptionFile) -> CaptionFile | None:
    """`CaptionFile` of the captions at a path; None if there are none.

    Raises: ValueError if the path has anything else, or captions of another model, other data or other options.
    """
    there, folder = made_of(out), parts_of(out)
    if there is not None:
        _check_same(out if out.exists() else folder, there, file)
    elif is_taken(folder):
        raise ValueError(f"{folder} exists and holds no captions: choose another --out, or remove it.")
    return there


def made_of(out: Path) -> CaptionFile | None:
    """`CaptionFile` of finished or unfinished captions at a path. Raises: ValueError for anything else."""
    if out.exists():
        return _file_of(out)
    begun = parts_of(out) / FILE
    return read_config(begun, CaptionFile) if begun.is_file() else None


def _file_of(path: Path) -> CaptionFile:
    """`CaptionFile` of a finished table. Raises: ValueError for anything else."""
    try:
        with path.open("rb") as file:
            meta = pq.read_schema(file).metadata or {}
        return parse(json.loads(meta[b"kiloword"]), CaptionFile)
    except (OSError, pa.ArrowException, KeyError, ValueError):
        raise ValueError(f"{path} exists and is no table of captions: choose another --out, or remove it.") from None


def _check_same(path: Path, there: CaptionFile, new: CaptionFile) -> None:
    for name, say in _SAME.items():
        if getattr(there, name) != getattr(new, name):
            _refuse(path, say(there), say(new))
    for option in fields(GenerationOptions):
        old, now = (getattr(file.options, option.name) for file in (there, new))
        if old != now:
            _refuse(path, f"{option.name} {old}", f"{option.name} {now}")


def _refuse(path: Path, there: str, here: str) -> None:
    raise ValueError(
        f"{path} holds other captions: there {there}, here {here}. Choose another --out, or remove what is there."
    )


def columns(captions: Sequence[Sequence[tuple[str, float]]]) -> tuple[list[list[str]], list[list[float]]]:
    """Texts and scores of n images, without empty texts."""
    kept = [[(text, score) for text, score in texts if text] for texts in captions]
    return [[text for text, _ in texts] for texts in kept], [[score for _, score in texts] for texts in kept]
