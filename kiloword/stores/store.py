"""A store: what a model computed once of the rows of a data set. Features of images and captions, or tokens of either.

Format (a folder): `store.json` (`kiloword.data.stored.StoreFile`); `keys.parquet`, all rows of the data in their order
(`SCHEMA`), written last; and a memory map for each column, of the n rows that are not bad, which are counted by place:

    images [n, K, D]    features of images, of K views each
    texts [T, D]        features of captions, image by image
    tokens [m, W]       tokens of images (m = n * K * N) or of captions, as dtype says; int8 with
    scales [m, 2G]      the minimum and the step of each group of channels
    starts              [n + 1] captions of an image, or [T + 1] tokens of a caption: starts[i] to starts[i + 1]
    captions            [T] digests of the captions; of tokens [2, T]: ascending, and their numbers

While it is written there are pieces in place of `keys.parquet` (`pieces.PieceWriter`), and columns only grow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kiloword.data.stored import STORE, Kind, StoreFile, store_file
from kiloword.files import SaveError, atomic
from kiloword.stores.pieces import COMMON, PieceWriter, Rows, read_table, resumed

KEYS = "keys.parquet"
SCHEMA = pa.schema(
    {
        **COMMON,
        "source": pa.int32(),  # number in `StoreFile.sources`
        "at": pa.int64(),  # row of that source
        "image": pa.binary(16),  # digest of the image before any transform
        "captions": pa.list_(pa.binary()),
        "lengths": pa.list_(pa.int32()),  # of the captions in tokens
    }
)
GROUP = 64  # channels of a token that share a minimum and a step
AGAIN = "Make it again by `kiloword embed`."
_DTYPES = {"fp16": "<f2", "fp32": "<f4", "int8": "|u1"}


def group_of(width: int) -> int:
    """Channels of a token that share a minimum and a step: GROUP, or all where that does not divide them."""
    return GROUP if width % GROUP == 0 else width


def columns_of(file: StoreFile) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of a row of each column that grows."""
    dtype = np.dtype(_DTYPES[file.dtype])
    if file.kind == "features":
        return {"images": ((file.views, file.width), dtype), "texts": ((file.width,), dtype)}
    scales = {"scales": ((2 * file.width // group_of(file.width),), np.dtype("<f4"))} if file.dtype == "int8" else {}
    return {"tokens": ((file.width,), dtype), **scales}


def _good(table: pa.Table) -> pa.Table:
    return table.filter(table.column("reason").is_null())


def _lengths(table: pa.Table, file: StoreFile, column: str) -> int:
    """Rows of a column that belong to rows of the data."""
    if file.kind == "texts":
        return int(pc.sum(table.column("lengths").combine_chunks().flatten()).as_py() or 0)
    if column == "texts":
        return len(table.column("captions").combine_chunks().flatten())
    return int(_good(table).num_rows) * (file.views * file.tokens if file.kind == "images" else 1)


class StoreWriter(PieceWriter[StoreFile]):
    """Writes the store in a folder. Raises: ValueError for a folder of something else."""

    def __init__(self, folder: Path, file: StoreFile) -> None:
        existing = resumed(folder, STORE, file, WHAT[file.kind])
        super().__init__(folder, STORE, file, existing, (folder / KEYS).is_file())
        if not (folder / KEYS).is_file():
            done = [read_table(self.path(number)) for number in range(self.done)]
            self._columns = {
                name: _Column(folder / f"{name}.npy", shape, dtype, sum(_lengths(t, self.file, name) for t in done))
                for name, (shape, dtype) in columns_of(self.file).items()
            }

    def write(self, number: int, rows: Sequence[Rows]) -> None:
        """Write one piece; columns first, so that what they hold beyond the last piece is written again."""
        for name, column in self._columns.items():
            column.append([one.columns[name] for one in rows if one.columns])
        super().write(number, rows)

    def finish(self) -> pa.Table:
        """Write what rows are found by, then `keys.parquet`; its contents. Raises: ValueError without a usable row."""
        if not (self.folder / KEYS).is_file():
            table = self.table()
            for column in self._columns.values():
                column.finish()
            for name, values in _found_by(table, self.file.kind).items():
                with atomic(self.folder / f"{name}.npy") as out:
                    np.save(out, values)
            with atomic(self.folder / KEYS) as out:
                pq.write_table(table, out)
        for number in range(self.done):
            self.path(number).unlink(missing_ok=True)
        return read_table(self.folder / KEYS)


class _Column:
    """A `.npy` file that grows. Args: length: rows that stay of what is there."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], length: int) -> None:
        self.path, self.shape, self.dtype, self.length = path, shape, dtype, length
        try:
            path.touch()
            with path.open("r+b") as file:
                self._header(file)
                file.truncate(file.tell() + length * dtype.itemsize * int(np.prod(shape)))
        except OSError as error:
            raise SaveError(f"cannot write {path}: {error.strerror or error}.") from error

    def _header(self, file: Any) -> None:
        """The header, which numpy pads so that it does not grow with the length."""
        shape = (self.length, *self.shape)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)

    def append(self, values: Sequence[NDArray[Any]]) -> None:
        """Write rows at the end. Raises: ValueError when that fails."""
        try:
            with self.path.open("ab") as file:
                for part in values:
                    file.write(np.ascontiguousarray(part, self.dtype).data)
                    self.length += part.size // int(np.prod(self.shape))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SaveError(f"cannot write {self.path}: {error.strerror or error}.") from error

    def finish(self) -> None:
        """Write the length."""
        with self.path.open("r+b") as file:
            self._header(file)
            os.fsync(file.fileno())


def _found_by(table: pa.Table, kind: Kind) -> dict[str, NDArray[Any]]:
    """The columns that captions are found by."""
    if kind == "images":
        return {}
    good = _good(table)
    captions = good.column("captions").combine_chunks()
    texts = [text or b"" for text in captions.flatten().to_pylist()]
    digests, counts = np.fromiter(map(key_digest, texts), np.uint64, len(texts)), pc.list_value_length(captions)
    if kind == "texts":
        order, counts = np.argsort(digests, kind="stable"), good.column("lengths").combine_chunks().flatten()
        digests = np.stack([digests[order], order.astype(np.uint64)])
    return {"captions": digests, "starts": np.concatenate([[0], np.cumsum(pc.fill_null(counts, 0), dtype=np.int64)])}


class Store:
    """A finished store, memory-mapped. Pickling it for a worker sends the path.

    Raises: ValueError when the folder is not a finished store of this kind.
    """

    kind: Kind

    def __init__(self, folder: Path | str) -> None:
        self.path = Path(folder) / ("" if self.kind == "features" else self.kind)
        if not (self.path / STORE).is_file():
            holds = _holds(Path(folder))
            raise ValueError(f"{folder} holds no {WHAT[self.kind]}: {holds}. Make them by `kiloword embed`.")
        self.file = store_file(self.path)
        if not (self.path / KEYS).is_file():
            raise ValueError(f"{folder} is not finished. Run the same `kiloword embed` command again to complete it.")
        self._open()

    def _open(self) -> None:
        self._maps: dict[str, NDArray[Any]] = {}
        for name in columns_of(self.file):
            self.column(name)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "file": self.file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def column(self, name: str) -> NDArray[Any]:
        """A column, memory-mapped."""
        if name not in self._maps:
            path = self.path / f"{name}.npy"
            try:
                self._maps[name] = np.asarray(np.load(path, mmap_mode="r"))
            except (OSError, ValueError, EOFError) as error:
                raise ValueError(f"{path} is damaged ({error}): remove {self.path}. {AGAIN}") from None
        return self._maps[name]

    def cells(self, *names: str) -> pa.Table:
        """Columns of `keys.parquet`, of the rows that are not bad, by place."""
        return _good(read_table(self.path / KEYS, ["reason", *names]))

    def __len__(self) -> int:
        return int(self.cells().num_rows)

    @property
    def megabytes(self) -> float:
        """Size on disk."""
        return sum(path.stat().st_size for path in self.path.iterdir()) / 1e6


WHAT = {"features": "features", "images": "tokens of images", "texts": "tokens of captions"}
FLAGS = {"features": "features", "images": "image-features", "texts": "text-features"}


def _holds(folder: Path) -> str:
    """What a folder without store of a kind holds."""
    kinds = [store_file(path).kind for path in (folder, *map(folder.joinpath, FLAGS)) if (path / STORE).is_file()]
    if (folder / STORE).is_file() and kinds[0] != "features":
        return f"it is a part of a folder of features, {folder.parent}: name that folder"
    if (folder / "table.json").is_file() or list(folder.glob("*/table.json")):
        return "an earlier version of kiloword wrote it, in another format"
    return " and ".join(f"it has {WHAT[kind]}, which --{FLAGS[kind]} takes" for kind in kinds) or f"it has no {STORE}"


def key_digest(raw: bytes) -> int:
    """Unsigned 64-bit hash; two of a million keys collide with probability 3e-8, so callers compare the key itself."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
