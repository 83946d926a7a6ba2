"""Writing a feature store part by part; parts are atomic, so that an interrupted run can continue."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from kiloword.checkpoint.files import is_taken, write_atomic, write_json
from kiloword.config.recipes import read_config
from kiloword.data.feature_store import (
    INDEX,
    TABLE,
    FeatureStore,
    StoredFeatures,
    StorePart,
    TableFile,
    check_name,
    checksum,
    part_path,
)
from kiloword.data.files import key_bytes, lookup_table
from kiloword.types import Skipped

# fields that must be equal to continue a store, and their text in messages
_SAME: dict[str, Callable[[TableFile], str]] = {
    "teacher_fingerprint": lambda file: f"teacher {file.teacher} ({file.teacher_fingerprint[:16]})",
    "contents": lambda file: f"data {file.data} ({file.fingerprint[:16]})",
    "name": lambda file: f"name {file.name}",
    "dim": lambda file: f"dim {file.dim}",
    "precision": lambda file: f"precision {file.precision}",
    "dtype": lambda file: f"dtype {file.dtype}",
}


@dataclass
class FeatureRows:
    """The images of one part, while they are collected."""

    keys: list[bytes] = field(default_factory=list)
    captions: list[list[str]] = field(default_factory=list)
    images: list[StoredFeatures] = field(default_factory=list)  # [n, D] each
    texts: list[StoredFeatures] = field(default_factory=list)  # [t, D] each
    skipped: list[Skipped] = field(default_factory=list)


class FeatureWriter:
    """The feature store in a folder, new or gone on with.

    Errors: ValueError when the folder holds something else, or features of another teacher or data.
    """

    def __init__(self, folder: Path, file: TableFile) -> None:
        check_name(file.name)
        self.folder = folder
        self.file = what_is_there(folder, file) or file
        if self.file is file:
            write_json(folder / TABLE, asdict(file))
        self._id = _identity(self.file)
        self._contents: dict[bytes, bytes] = {}  # content of every key so far
        self.skipped: list[Skipped] = []
        self.repeated = 0  # number of rows that repeat a key with its content
        self.missing = [number for number in range(self.file.parts) if not self._is_whole(number)]
        if self.missing:
            (folder / INDEX).unlink(missing_ok=True)  # readers then see that the store is not finished

    def rows_of(self, number: int) -> range:
        """The rows of the data in a part."""
        return range(number * self.file.part, min((number + 1) * self.file.part, self.file.rows))

    def _is_whole(self, number: int) -> bool:
        """Whether a part exists and is undamaged; records its keys and bad rows."""
        try:
            part = StorePart(part_path(self.folder, number), self.file.schema())
        except ValueError:
            return False
        if part.table != self._id or not part.whole():
            return False
        self._contents.update(zip(part.keys.to_pylist(), part.contents.to_pylist(), strict=True))
        self.skipped += [Skipped(*sample) for sample in part.skipped]
        return True

    def is_new(self, key: str, content: bytes) -> bool:
        """Whether the key of a row is new.

        Args: content: see `content_of`. Raises: ValueError when it came before with another image or other captions.
        """
        raw = key_bytes(key)
        earlier = self._contents.get(raw)
        if earlier is None:
            self._contents[raw] = content
            return True
        if earlier != content:
            raise ValueError(
                f"two images of {self.file.data} have the key {key!r} and differ in pixels or captions. Features are "
                "joined by key: give each image its own key, or embed and train on one source at a time."
            )
        self.repeated += 1
        return False

    def write(self, number: int, rows: FeatureRows) -> None:
        """Write one part atomically. Errors: ValueError when it cannot be written."""
        dim, kind = self.file.dim, np.float16 if self.file.dtype == "fp16" else np.float32
        images, texts = (_stack(parts, dim, kind) for parts in (rows.images, rows.texts))
        starts = np.cumsum([0, *map(len, rows.captions)], dtype=np.int32)
        captions = pa.array([key_bytes(c) for of_image in rows.captions for c in of_image], pa.binary())
        columns = [
            pa.array(rows.keys, pa.binary()),
            pa.array([self._contents[key] for key in rows.keys], pa.binary(16)),
            pa.FixedSizeListArray.from_arrays(pa.array(images.ravel()), dim),
            pa.ListArray.from_arrays(pa.array(starts), captions),
            pa.ListArray.from_arrays(pa.array(starts), pa.FixedSizeListArray.from_arrays(pa.array(texts.ravel()), dim)),
        ]
        skipped = [[sample.row, sample.key, sample.reason] for sample in rows.skipped]
        meta = {"table": self._id, "skipped": skipped, "crc": checksum(columns)}
        schema = self.file.schema().with_metadata({"kiloword": json.dumps(meta)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as out:
            out.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        write_atomic(part_path(self.folder, number), sink.getvalue().to_pybytes())
        self.skipped += rows.skipped

    def finish(self) -> FeatureStore:
        """Write the index after all parts. Raises: ValueError when no image is usable."""
        keys: list[bytes] = []
        places = []
        for number in range(self.file.parts):
            part_keys = StorePart(part_path(self.folder, number), self.file.schema()).keys.to_pylist()
            places.append((number << 32) + np.arange(len(part_keys), dtype=np.uint64))
            keys += part_keys
        if not keys:
            why = f", the first because: {self.skipped[0].reason}" if self.skipped else ""
            raise ValueError(f"{self.file.data}: none of its {self.file.rows} rows is a usable image{why}.")
        data = io.BytesIO()
        np.save(data, lookup_table(keys, np.concatenate(places)))
        write_atomic(self.folder / INDEX, data.getvalue())
        return FeatureStore(self.folder)


def what_is_there(folder: Path, file: TableFile) -> TableFile | None:
    """The table.json in a folder; None in a new folder. Raises: ValueError when the folder has other contents."""
    path = folder / TABLE
    if path.is_file():
        existing = read_config(path, TableFile)
        _check_same(folder, existing, file)
        return existing
    if is_taken(folder):
        raise ValueError(f"{folder} exists and is no feature store: choose another --out, or remove it.")
    return None


def _check_same(folder: Path, existing: TableFile, new: TableFile) -> None:
    for name, say in _SAME.items():
        if getattr(existing, name) != getattr(new, name):
            raise ValueError(
                f"{folder} holds other features: {say(existing)} there, {say(new)} here. Choose another --out, or "
                "remove that folder."
            )


def _identity(file: TableFile) -> str:
    """The identity of a store, recorded in each part."""
    return hashlib.blake2b(json.dumps(asdict(file), sort_keys=True).encode(), digest_size=16).hexdigest()


def content_of(image: Tensor, captions: Iterable[str]) -> bytes:
    """A digest of a preprocessed image, uint8 [3, H, W], and of its captions."""
    digest = hashlib.blake2b(image.contiguous().numpy().data, digest_size=16)
    for caption in captions:
        digest.update(b"\0" + key_bytes(caption))
    return digest.digest()


def _stack(parts: list[StoredFeatures], dim: int, kind: type[np.floating[Any]]) -> StoredFeatures:
    """[n, D] as stored; n may be 0."""
    return np.concatenate([np.empty((0, dim), kind), *parts]).astype(kind)
