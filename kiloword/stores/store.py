"""A store: what a model computed once of the rows of a data set. Features of images and captions, or tokens of either.

Format (a folder): `store.json` (`kiloword.data.stored.StoreFile`); `keys.parquet`, all rows of the data in their order
(`SCHEMA`), written last; and a memory map for each column, of the n rows that are not bad, which are counted by place:

    images [n, K, D]    features of images, of K views each
    texts [T, D]        features of captions, image by image
    tokens [m, W]       tokens of images (m = n * K * N) or of captions, as dtype says; int8 with
    scales [m, 2G]      the minimum and the step of each group of channels
    starts              [n + 1] captions of an image, or [T + 1] tokens of a caption: starts[i] to starts[i + 1]
    captions            [T] digests of the captions; of tokens [2, T]: ascending, and their numbers

While it is written there are pieces in place of `keys.parquet`, see `pieces.PieceWriter`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kiloword.data.stored import STORE, Kind, StoreFile, store_file
from kiloword.stores.pieces import COMMON, Shape, read_table

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


def place_of(folder: Path | str, kind: Kind) -> Path:
    """Where a folder of features has the store of a kind."""
    return Path(folder) / ("" if kind == "features" else kind)


def columns_of(file: StoreFile) -> dict[str, Shape]:
    """Shape and type of a row of each column that grows."""
    dtype = np.dtype(_DTYPES[file.dtype])
    if file.kind == "features":
        return {"images": ((file.views, file.width), dtype), "texts": ((file.width,), dtype)}
    scales = {"scales": ((2 * file.width // group_of(file.width),), np.dtype("<f4"))} if file.dtype == "int8" else {}
    return {"tokens": ((file.width,), dtype), **scales}


def _good(table: pa.Table) -> pa.Table:
    return table.filter(table.column("reason").is_null())


def found_by(table: pa.Table, kind: Kind) -> dict[str, NDArray[Any]]:
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
        self.path = place_of(folder, self.kind)
        if not (self.path / STORE).is_file():
            there = [WHAT[kind] for kind in WHAT if (place_of(folder, kind) / STORE).is_file()]
            holds = f"{' and '.join(there)} alone" if there else f"no {STORE}"
            raise ValueError(f"{folder} holds no {WHAT[self.kind]}: it has {holds}. Make them by `kiloword embed`.")
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

    def __str__(self) -> str:
        file, megabytes = self.file, sum(path.stat().st_size for path in self.path.iterdir()) / 1e6
        views, of = f"{file.shown}, of " if file.augmented else "", "rows" if file.kind == "texts" else "images"
        if file.kind == "features":
            what = f"{len(self.column('texts')):,} captions, {file.width} dimensions"
        else:
            what = f"{file.tokens or 'captions as'} tokens x {file.width} as {file.dtype}"
        return f"{views}{len(self):,} {of}, {what}, {megabytes:,.1f} MB"


def check_alike(store: Store, whose: str, do: str, **wanted: Any) -> None:
    """Raises: ValueError where a store was not made as wanted.

    Args: whose: what has the values that are wanted; do: what the user can do; wanted: values of `StoreFile`.
    """
    for name, value in wanted.items():
        made = getattr(store.file, name)
        if made != value:
            raise ValueError(f"{store.path} has {name} {made}, and {whose} {value}: {do}")


WHAT: dict[Kind, str] = {"features": "features", "images": "tokens of images", "texts": "tokens of captions"}


def key_digest(raw: bytes) -> int:
    """Unsigned 64-bit hash; two of a million keys collide with probability 3e-8, so callers compare the key itself."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
