"""Which rows of a store belong to the rows of a source: by source and row, else by key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kiloword.data.edits import contents, every_row, origin, origins, parts_of
from kiloword.data.joins import key_column, places_of, same_images, shown_key, spread
from kiloword.data.reading import captions_at, name_of
from kiloword.stores.pieces import read_table
from kiloword.stores.store import KEYS, Store
from kiloword.terminal import shown
from kiloword.types import BadSample, Source

IMAGES, CAPTIONS = 64, 1000  # rows of a source whose images, or captions, are compared with those of a store
Kept = TypeVar("Kept", bound=Store)


class Places(Generic[Kept]):
    """The places of a source's rows in stores, of which each data set takes the first that has all of its rows.

    A data set that a store was made from, by its fingerprint, is joined by row. Another one (a subset, other shards)
    is joined by key, if no two images of the store have one of its keys and differ.
    Raises: ValueError where no store has a data set, and where the images of some rows are others than the store's.
    """

    def __init__(self, stores: Sequence[Kept], source: Source) -> None:
        whole, self._of = every_row(source), dict[tuple[str, str], tuple[Kept, NDArray[np.int64]]]()
        used = base_rows(whole)
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


def base_rows(source: Source) -> dict[tuple[str, str], list[int]]:
    """Which rows of each data set a source uses, by its name and fingerprint, see `kiloword.data.edits.origin`."""
    used: dict[tuple[str, str], list[int]] = {(base.name, base.fingerprint): [] for base in origins(source)}
    for part in parts_of(source):
        if origins(part) == [part]:
            used[part.name, part.fingerprint] += range(len(part))
        else:
            for base, at in (origin(part, row) for row in range(len(part))):
                used[base.name, base.fingerprint].append(at)
    return used


def _places(store: Store, base: Source, used: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each row of a data set [N]; -1: it is bad. Args: used: rows that must be there. Raises: `Places`."""
    table = read_table(store.path / KEYS, ["source", "at", "key", "image", "reason"])
    good, images = table.column("reason").is_null().to_numpy(), table.column("image")
    places: NDArray[np.int64] = np.append(np.where(good, np.cumsum(good) - 1, -1), -1)  # the last is of no row

    def other(rows: NDArray[np.int64], drawn: bool) -> list[str]:
        digests = {row: images[rows[row]].as_py() for row in spread(len(base), IMAGES) if places[rows[row]] >= 0}
        return [key for key, same in same_images(base, digests, drawn).items() if not same]

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
    made = f"{store.path} was made from {store.file.data}"
    do = f"Make one from the same data by `kiloword embed {store.file.model} --data SRC --out DIR`."
    missing = used[(rows[used] < 0) & keys.is_valid().to_numpy(False)[used]]
    if len(missing):
        raise ValueError(
            f"{made}, and lacks {len(missing):,} images of {base.name} (fingerprint {base.fingerprint[:16]}), such as "
            f"{shown_key(keys[int(missing[0])])}. {do}"
        )
    by_key = pa.table({"key": names, "image": images}).filter(good).group_by("key")
    counts = by_key.aggregate([("image", "count_distinct")])
    differ = counts.column("key").filter(pc.greater(counts.column("image_count_distinct"), 1)).combine_chunks()
    if (twice := places_of(keys, differ)).max(initial=-1) >= 0:
        first = keys[int(np.flatnonzero(twice >= 0)[0])]
        raise ValueError(f"{made}, in which two images have the key {shown_key(first)} and differ. {do}")
    if others := other(rows, drawn=True):
        raise ValueError(
            f"{made}, whose image {shown(others[0][:100])!r} is another one than that of {base.name}, with the same "
            f"key. {do}"
        )
    return np.take(places, rows)


def caption_origins(source: Source) -> set[str]:
    """The origins of a source's captions, see `kiloword.data.edits.contents`."""
    return {one for one in contents(source) if not one.endswith(" images")}


def check_captions(stores: Sequence[Store], source: Source, has: Callable[[Source, int, Sequence[str]], bool]) -> None:
    """Raises: ValueError when stores were not made from all captions of a source.

    Data that is not theirs is known by rows that are spread over it. Args: has: whether they have a row's captions.
    """
    if not stores or caption_origins(source) <= {one for store in stores for one in store.file.captions}:
        return
    whole, row = every_row(source), ""
    for n in spread(len(whole), CAPTIONS):
        with suppress(BadSample):
            if not has(whole, n, captions_at(whole, n)):
                row = name_of(whole, n)
                break
    known = {one.fingerprint for store in stores for one in store.file.sources}
    if row or any(base.fingerprint in known for base in origins(whole)):
        made = ", ".join(f"{store.path} (of {store.file.data})" for store in stores)
        raise ValueError(
            f"{made} lacks captions of {source.name} ({source.fingerprint[:16]}), such as one of {row or 'some row'}: "
            f"make one from the same data and extra captions by `kiloword embed {stores[0].file.model} --data SRC`."
        )
