"""Which rows of a store belong to the rows of a source: by source and row, else by key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kiloword.data.edits import contents, every_row, origin, origins
from kiloword.data.reading import captions_at, digest_of, name_of
from kiloword.data.rows import key_bytes
from kiloword.data.source import key_of, keys
from kiloword.stores.store import Store, key_digest, row_codes
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Source

IMAGES, CAPTIONS = 64, 1000  # rows of a source whose images, or captions, are compared with those of a store
Kept = TypeVar("Kept", bound=Store)


class Places(Generic[Kept]):
    """The places of a source's rows in stores, of which each data set takes the first that has all of its rows.

    A data set that a store was made from, by its fingerprint, is joined by row. Another one (a subset, other shards)
    is joined by key, if no two images of the store have one of its keys and differ.
    Raises: ValueError where no store has a data set, and where the images of some rows are others than the store's.
    """

    def __init__(self, stores: Sequence[Kept], source: Source) -> None:
        whole, self._of = every_row(source), dict[tuple[str, str], tuple[Kept, int | None]]()
        for base in origins(whole):
            errors = list[ValueError]()
            for store in stores:
                try:
                    self._of[base.name, base.fingerprint] = store, _number(store, base, whole)
                    break
                except ValueError as error:
                    errors.append(error)
            else:
                raise errors[0]

    @property
    def stores(self) -> list[Kept]:
        """The stores that are read."""
        return list(dict.fromkeys(store for store, _ in self._of.values()))

    def find(self, source: Source, row: int, key: str | None = None) -> tuple[Kept, int] | None:
        """The store that has a row, and its place; None for a row that was bad. Args: key: where it is known."""
        base, at = origin(source, row)
        store, number = self._of[base.name, base.fingerprint]
        if number is not None:
            place = store.by_row(number, at)
        else:
            place = store.by_key(key_bytes(key_of(base, at) if key is None else key))
        return None if place is None else (store, place)


def _number(store: Store, base: Source, whole: Source) -> int | None:
    """The number of a data set among those of a store; None where it is joined by key. Raises: see `Places`."""
    same = [n for n, one in enumerate(store.file.sources) if one.fingerprint == base.fingerprint]
    for number in same:
        complete = store.file.sources[number].stored == store.file.sources[number].rows
        if _other_image(store, base, number) is None and (complete or not _missing(store, base, whole, number)):
            return number
    missing = _missing(store, base, whole, None)
    made = f"{store.path} was made from {store.file.data}"
    do = f"Make one from the same data by `kiloword embed {store.file.model} --data SRC --out DIR`."
    if missing:
        raise ValueError(
            f"{made}, and lacks {len(missing):,} images of {base.name} (fingerprint {base.fingerprint[:16]}), such as "
            f"{shown(missing[0][:100])!r}. {do}"
        )
    if twice := _ambiguous(store, base):
        raise ValueError(f"{made}, in which two images have the key {shown(twice[:100])!r} and differ. {do}")
    if other := _other_image(store, base, None):
        raise ValueError(
            f"{made}, whose image {shown(other[:100])!r} is another one than that of {base.name}, with the same key. "
            f"{do}"
        )
    return None


def _missing(store: Store, base: Source, whole: Source, number: int | None) -> list[str]:
    """Keys of the rows of a data set that are used, and that the store was not made from."""
    located = (origin(whole, row) for row in range(len(whole)))
    rows = [at for one, at in located if (one.name, one.fingerprint) == (base.name, base.fingerprint)]
    if number is not None:
        found = np.isin(row_codes(number, rows), store.column("rows")[0])
        return [f"row {rows[n]}" for n in np.flatnonzero(~found)]
    names = [name for at in rows if (name := _key(base, at)) is not None]
    found = np.isin(_digests(names), store.column("keys")[0])
    return [names[n] for n in np.flatnonzero(~found)]


def _key(source: Source, row: int) -> str | None:
    try:
        return key_of(source, row)
    except BadSample:
        return None


def _digests(names: Sequence[str]) -> NDArray[np.uint64]:
    return np.fromiter((key_digest(key_bytes(name)) for name in names), np.uint64, len(names))


def _ambiguous(store: Store, base: Source) -> str:
    """The first key of a data set that several images of a store have, and differ; "" where there is none."""
    digests = store.column("keys")[0]
    if not (digests[1:] == digests[:-1]).any():
        return ""
    counts = [("key", "count"), ("image", "count_distinct")]
    groups = store.cells("key", "image").group_by("key").aggregate(counts).to_pylist()
    differ = {group["key"] for group in groups if group["key_count"] > 1 and group["image_count_distinct"] > 1}
    return next((name for name in keys(base) if name is not None and key_bytes(name) in differ), "")


def _other_image(store: Store, base: Source, number: int | None) -> str | None:
    """The key of an image that is not the store's, among some that are spread over a data set.

    Images that are drawn or lie on a server are not compared where the fingerprint is that of the store's data.
    """
    if number is not None and (getattr(base, "remote", False)):
        return None
    images = store.cells("image").column("image")
    for row in range(0, len(base), -(-len(base) // IMAGES)):
        try:
            record = base.record(row)
        except NoCaption as error:
            record = error.record
        except BadSample:
            continue
        place = store.by_row(number, row) if number is not None else store.by_key(key_bytes(record.key))
        compared = place is not None and (number is None or isinstance(record.image, bytes))
        if compared and images[place].as_py() != digest_of(record.image):
            return record.key
    return None


def caption_origins(source: Source) -> set[str]:
    """The origins of a source's captions, see `kiloword.data.edits.contents`."""
    return {one for one in contents(source) if not one.endswith(" images")}


def lacking(stores: Sequence[Store], source: Source, has: Callable[[Source, int, list[str]], bool]) -> str:
    """Which row has a caption that the stores lack; "" where they were made from all captions of a source.

    Data that is not theirs is known by rows that are spread over it. Args: has: whether they have a row's captions.
    """
    if not stores or caption_origins(source) <= {one for store in stores for one in store.file.captions}:
        return ""
    whole = every_row(source)
    for row in range(0, len(whole), -(-len(whole) // CAPTIONS)):
        with suppress(BadSample):
            if not has(whole, row, captions_at(whole, row)):
                return name_of(whole, row)
    known = {one.fingerprint for store in stores for one in store.file.sources}
    return "some row" if any(base.fingerprint in known for base in origins(whole)) else ""
