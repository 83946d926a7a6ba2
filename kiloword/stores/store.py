"""A store: what a model computed once of the rows of a data set. Features of images and captions, or tokens of either.

Format (a folder): `store.json` (`kiloword.data.stored.StoreFile`); `keys.parquet`, all rows of the data in their order
(`SCHEMA`), written last; and a memory map for each column, of the n rows that are not bad, which are counted by place:

    images [n, K, D]    features of images, of K views each
    texts [T, D]        features of captions, image by image
    tokens [m, W]       tokens of images (m = n * K * N) or of captions, as dtype says; int8 with
    scales [m, 2G]      the minimum and the step of each group of channels
    starts              [n + 1] captions of an image, or [T + 1] tokens of a caption: starts[i] to starts[i + 1]
    captions            [2, T] digests of the captions, ascending, and the numbers of the captions

While it is written there are pieces in place of `keys.parquet`, see `pieces.computed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kiloword.data.edits import every_row, origin, origins, parts_of
from kiloword.data.joins import image_digests, key_column, places_of, shown_key, spread
from kiloword.data.reading import captions_at, name_of
from kiloword.data.rows import key_bytes
from kiloword.data.stored import STORE, Kind, StoreFile, store_file
from kiloword.stores.pieces import COMMON, Shape, read_table
from kiloword.terminal import shown
from kiloword.types import BadSample, Source

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
IMAGES, CAPTIONS = 64, 1000  # rows of a source whose images, or captions, are compared with those of a store
GROUP = 64  # channels of a token that share a minimum and a step


def group_of(width: int) -> int:
    """Channels of a token that share a minimum and a step: GROUP, or all where that does not divide them."""
    return GROUP if width % GROUP == 0 else width


def place_of(folder: Path | str, kind: Kind) -> Path:
    """Where a folder of features has the store of a kind."""
    return Path(folder) / ("" if kind == "features" else kind)


def columns_of(file: StoreFile) -> dict[str, Shape]:
    """Shape and type of a row of each column that grows."""
    dtype = np.dtype({"fp16": "<f2", "fp32": "<f4", "int8": "|u1"}[file.dtype])
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
        counts = good.column("lengths").combine_chunks().flatten()
    order = np.argsort(digests, kind="stable")
    starts = np.concatenate([[0], np.cumsum(pc.fill_null(counts, 0), dtype=np.int64)])
    return {"captions": np.stack([digests[order], order.astype(np.uint64)]), "starts": starts}


class Store:
    """A finished store, memory-mapped. Pickling it for a worker sends the path.

    Raises: ValueError when the folder is not a finished store of this kind.
    """

    kind: Kind

    def __init__(self, folder: Path | str) -> None:
        self.folder, self.path, self._maps = folder, place_of(folder, self.kind), dict[str, NDArray[Any]]()
        if not (self.path / STORE).is_file():
            raise ValueError(
                f"{folder} holds no {WHAT[self.kind]}, as {self.path} has no {STORE}: make them by `kiloword embed`."
            )
        self.file = store_file(self.path)
        if not (self.path / KEYS).is_file():
            raise ValueError(f"{folder} is not finished. Run the same `kiloword embed` command again to complete it.")
        for name in columns_of(self.file):
            self.column(name)

    def __reduce__(self) -> Any:
        return type(self), (self.folder,)

    def column(self, name: str) -> NDArray[Any]:
        """A column, memory-mapped."""
        if name not in self._maps:
            path = self.path / f"{name}.npy"
            try:
                self._maps[name] = np.asarray(np.load(path, mmap_mode="r"))
            except (OSError, ValueError, EOFError) as error:
                raise ValueError(f"{path} is damaged ({error}): remove {self.path}, and make it again.") from None
        return self._maps[name]

    def find(self, caption: str) -> int | None:
        """The number of a caption; None where the store lacks it."""
        digests, numbers = self.column("captions")
        digest = np.uint64(key_digest(key_bytes(caption)))
        place = int(np.searchsorted(digests, digest))
        return int(numbers[place]) if place < len(digests) and digests[place] == digest else None

    def cells(self, *names: str) -> pa.Table:
        """Columns of `keys.parquet`, of the rows that are not bad, by place."""
        return _good(read_table(self.path / KEYS, ["reason", *names]))

    def __len__(self) -> int:
        return len(self.cells())

    def __str__(self) -> str:
        file, megabytes = self.file, sum(path.stat().st_size for path in self.path.iterdir()) / 1e6
        views, of = f"{file.shown}, of " if file.augmented else "", "rows" if file.kind == "texts" else "images"
        if file.kind == "features":
            what = f"{len(self.column('texts')):,} captions, {file.width} dimensions"
        else:
            what = f"{file.tokens or 'captions as'} tokens x {file.width} as {file.dtype}"
        return f"{views}{len(self):,} {of}, {what}, {megabytes:,.1f} MB"


Kept = TypeVar("Kept", bound=Store)


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
    """Unsigned 64-bit hash; two of a million captions collide with probability 3e-8."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


class Places(Generic[Kept]):
    """The places of a source's rows in stores, of which each data set takes the first that has all of its rows.

    A data set that a store was made from, by its fingerprint, is joined by row. Another one (a subset, other shards)
    is joined by key, if no two images of the store have one of its keys and differ.
    Raises: ValueError where no store has a data set, and where the images of some rows are others than the store's.
    """

    def __init__(self, stores: Sequence[Kept], source: Source) -> None:
        whole, self._of = every_row(source), dict[tuple[str, str], tuple[Kept, NDArray[np.int64]]]()
        used: dict[tuple[str, str], list[int]] = {(base.name, base.fingerprint): [] for base in origins(whole)}
        for part in parts_of(whole):
            if origins(part) == [part]:
                used[part.name, part.fingerprint] += range(len(part))
            else:
                for base, at in (origin(part, row) for row in range(len(part))):
                    used[base.name, base.fingerprint].append(at)
        for base in origins(whole):
            errors = list[ValueError]()
            for store in stores:
                try:
                    places = _places(store, base, np.array(used[base.name, base.fingerprint], np.int64))
                    self._of[base.name, base.fingerprint] = store, places
                    break
                except ValueError as error:
                    errors.append(error)
            else:
                raise errors[0]

    @property
    def stores(self) -> list[Kept]:
        """The stores that are read."""
        return list(dict.fromkeys(store for store, _ in self._of.values()))

    def find(self, source: Source, row: int) -> tuple[Kept, int] | None:
        """The store that has a row, and its place; None for a row that was bad."""
        base, at = origin(source, row)
        store, places = self._of[base.name, base.fingerprint]
        return (store, int(places[at])) if places[at] >= 0 else None


def _places(store: Store, base: Source, used: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each row of a data set [N]; -1: it is bad. Args: used: rows that must be there. Raises: `Places`."""
    table = read_table(store.path / KEYS, ["source", "at", "key", "image", "reason"])
    good, images = table.column("reason").is_null().to_numpy(), table.column("image")
    places: NDArray[np.int64] = np.append(np.where(good, np.cumsum(good) - 1, -1), -1)  # the last is of no row

    def other(rows: NDArray[np.int64], drawn: bool) -> list[str]:
        chosen = [row for row in spread(len(base), IMAGES) if places[rows[row]] >= 0]
        found = image_digests(base, chosen, drawn)
        return [key for row, (key, image) in found.items() if images[rows[row]].as_py().hex() != image]

    at, number = table.column("at").to_numpy(), table.column("source").to_numpy()
    for n, one in enumerate(store.file.sources):
        if (one.fingerprint, one.rows) == (base.fingerprint, len(base)):
            mine, rows = np.flatnonzero(number == n), np.full(len(base), -1)
            rows[at[mine]] = mine
            remote = getattr(base, "remote", False)  # its images are not compared, nor those that are drawn
            if (rows[used] >= 0).all() and (remote or not other(rows, drawn=False)):
                return np.take(places, rows)
    order = np.argsort(~good, kind="stable")  # of equal keys one that is not bad
    names, keys = pa.chunked_array(table.column("key").cast(pa.large_binary())).combine_chunks(), key_column(base)
    found = places_of(keys, names.take(pa.array(order)))
    rows = np.where(found < 0, -1, order[found])
    missing = used[(rows[used] < 0) & keys.is_valid().to_numpy(False)[used]]
    by_key = pa.table({"key": names, "image": images}).filter(good).group_by("key")
    counts = by_key.aggregate([("image", "count_distinct")])
    differ = counts.column("key").filter(pc.greater(counts.column("image_count_distinct"), 1)).combine_chunks()
    twice, wrong = np.flatnonzero(places_of(keys, differ) >= 0), ""
    if len(missing):
        wrong = f"lacks {len(missing):,} images, such as {shown_key(keys[int(missing[0])])},"
    elif len(twice):
        wrong = f"has two images with the key {shown_key(keys[int(twice[0])])} that differ, a key"
    elif others := other(rows, drawn=True):
        wrong = f"has another image with the key {shown(others[0][:100])!r} than that"
    if wrong:
        raise ValueError(
            f"{store.path} was made from {store.file.data}, and {wrong} of {base.name} ({base.fingerprint[:16]}). Make "
            f"one from the same data by `kiloword embed {store.file.model} --data SRC --out DIR`."
        )
    return np.take(places, rows)


def check_captions(stores: Sequence[Store], source: Source, bad: Callable[[Source, int], bool]) -> None:
    """Raises: ValueError where stores lack captions of a source, among some rows that are spread over it.

    Args: bad: whether they have nothing of a row, as it was bad.
    """
    whole = every_row(source)
    if not stores or whole.fingerprint in {store.file.fingerprint for store in stores}:
        return
    for row in spread(len(whole), CAPTIONS):
        with suppress(BadSample):
            found = [any(store.find(text) is not None for store in stores) for text in captions_at(whole, row)]
            if not all(found) and not bad(whole, row):
                made = ", ".join(f"{store.path} (of {store.file.data})" for store in stores)
                raise ValueError(
                    f"{made} lacks captions of {source.name} ({source.fingerprint[:16]}), such as one of "
                    f"{name_of(whole, row)}: make one from the same data and extra captions by `kiloword embed "
                    f"{stores[0].file.model} --data SRC`."
                )
