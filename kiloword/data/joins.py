"""Tables that are joined to images by key: extra captions, and keep-lists of captions.

Extra captions (arXiv:2405.10286, section 4.4) are parquet tables with the columns `key`, and `captions` (lists of text)
or `caption`; rows of one key are merged in their order. A keep-list, as `kiloword audit` writes it, has a row for each
caption, and one for an image that cannot be read or has no caption: `key`, `caption` and `keep` (bool). Captions are
found by key and text; rows of a text that an image has several times hold for it in their order.

Data sets number their images alike (000000000, ...), so a table names the data set of its images, and joins no other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kiloword.data.columns import arrow_errors, check_columns
from kiloword.data.edits import MixtureSource, Selection, digest, every_row, mix, origin, parts_of
from kiloword.data.reading import digest_of, read_image
from kiloword.data.rows import Rows, key_bytes, key_text
from kiloword.data.sample import clean
from kiloword.data.source import keys
from kiloword.errors import count
from kiloword.terminal import shown
from kiloword.types import BadSample, Source

SAMPLED = 64  # images of each source by which a file recognises it
KEEP_COLUMNS = ("key", "caption", "keep")
AGAIN = "Make one of this data by `kiloword audit SRC --model MODEL --out DIR`."
UNKNOWN = "a caption that the keep-list lacks"


class Keyed:
    """Lists of the cells of a parquet table for each image.

    Args: table: `key`, large_binary, and other columns. Attributes: keys: K different ones; lists: [K] of each other
    column, in the order of the rows; images: see `sampled_images`.
    """

    def __init__(self, path: Path | str, table: pa.Table) -> None:
        grouped = table.group_by("key", use_threads=False)
        by_key = grouped.aggregate([(name, "list") for name in table.column_names[1:]]).combine_chunks()
        self.keys, *self.lists = (column.combine_chunks() for column in by_key.columns)
        self.path, self.images = Path(path), dict[str, str]()
        self.fingerprint = hashlib.blake2b(by_key.to_batches()[0].serialize(), digest_size=16).hexdigest()
        with suppress(KeyError, TypeError, ValueError):  # the table does not say
            self.images = json.loads(pq.read_schema(path).metadata[b"kiloword"])["images"]

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def place_of(self) -> dict[str, int]:
        """The place of each key among `keys`."""
        return {key_text(key): place for place, key in enumerate(self.keys.to_pylist())}


class CaptionTable(Keyed):
    """Captions by key. Errors: ValueError for a file that cannot be read or has other columns."""

    def __init__(self, path: Path | str) -> None:
        keys, cells = _read(path, ("key",), ("captions", "caption"))
        keys = pc.fill_null(keys, b"")
        if pa.types.is_large_list(cells.type):  # a key without captions has an empty one
            of_cell, cells = keys.take(pc.list_parent_indices(cells)), cells.flatten()
            keys, cells = pa.concat_arrays([of_cell, keys]), pa.concat_arrays([cells, pa.nulls(len(keys), cells.type)])
        with arrow_errors(path):  # text that is not UTF-8
            super().__init__(path, pa.table({"key": keys, "caption": cells.cast(pa.large_string())}))

    def at(self, place: int) -> list[str]:
        """The captions of the key at a place among `keys`; [] for -1. Raises: BadSample as `sample.clean`."""
        return [] if place < 0 else clean([text for text in self.lists[0][place].as_py() if text is not None])

    def captions(self, key: str) -> list[str]:
        """The captions of a key; [] for an unknown key."""
        return self.at(self.place_of.get(key, -1))

    def first(self, key: str) -> str | None:
        """The first caption of a key, "" where it is empty; None for an unknown key."""
        if key not in self.place_of:
            return None
        texts = self.lists[0][self.place_of[key]].as_py()
        return next((text.strip() for text in texts if text is not None), "")


@dataclass(frozen=True)
class _Extra:
    """Adds captions of tables to the captions of an image, without repeating one."""

    tables: Joined[CaptionTable]
    raw: bool

    def __call__(self, row: int, captions: list[str]) -> list[str]:
        own = captions if self.raw else []
        extra = dict.fromkeys(caption for table, places in self.tables for caption in table.at(int(places[row])))
        return [*own, *(caption for caption in extra if caption not in own)]


def with_captions(source: Source, paths: Sequence[Path | str], raw_captions: bool = True) -> Source:
    """The source, or each part of a mixture, with the captions of parquet tables.

    Args: raw_captions: keep the captions of the source; otherwise a row that the tables lack has none, and is bad.
    Errors: ValueError for a table that cannot be read, has no key of the source, or was made from other images; and
    for raw_captions=False without tables.
    """
    if not paths:
        if not raw_captions:
            raise ValueError("no image has a caption without raw captions and extra ones: name --extra-captions.")
        return source

    def wrap(part: Source, tables: Joined[CaptionTable]) -> Source:
        name = " + ".join([part.name, *(str(table) for table, _ in tables)])
        prints = sorted(f"{part.fingerprint} + {table.fingerprint}" for table, _ in tables)
        edit = _Extra(tables, raw_captions)
        return Selection(part, name, digest(*prints, f"{part.fingerprint} {raw_captions}"), edit=edit)

    return joined(source, [CaptionTable(path) for path in paths], wrap)


class KeepList(Keyed):
    """Which captions are kept. Errors: ValueError for a file that cannot be read, or has other columns."""

    def __init__(self, path: Path | str) -> None:
        table = pa.table(_read(path, *((name,) for name in KEEP_COLUMNS)), KEEP_COLUMNS)
        if empty := [name for name in KEEP_COLUMNS if table.column(name).null_count]:
            raise ValueError(f"{path}: the column {empty[0]} has an empty cell. Expected none.")
        super().__init__(path, table.sort_by([(name, "ascending") for name in KEEP_COLUMNS[:2]]))

    def numbers(self) -> NDArray[np.int64]:
        """[3, K + 1]: rows, kept rows, and rows with a caption of each key; the last is of no key."""
        captions, keep = self.lists
        owner, has_text = np.asarray(pc.list_parent_indices(keep)), np.asarray(pc.binary_length(captions.flatten())) > 0
        chosen = owner, owner[np.asarray(keep.flatten())], owner[has_text]
        return np.stack([np.bincount(one, minlength=len(self.keys) + 1) for one in chosen])


@dataclass(frozen=True)
class _Keep:
    """Keeps what lists keep."""

    lists: Joined[KeepList]
    omitted: tuple[int, ...]  # captions; images with all their captions; and what there is of both

    def __call__(self, row: int, captions: list[str]) -> list[str]:
        verdicts, kept = dict[bytes, list[bool]](), list[str]()
        for chosen, places in self.lists:
            if places[row] >= 0:
                texts, keeps = (column[int(places[row])].as_py() for column in chosen.lists)
                for text, keep in zip(texts, keeps, strict=True):
                    verdicts.setdefault(text, []).append(keep)
        for caption in captions:
            flags = verdicts.get(key_bytes(caption))
            if flags is None:
                raise BadSample(UNKNOWN)
            if flags.pop(0) if len(flags) > 1 else flags[0]:
                kept.append(caption)
        return kept


def kept(source: Source, paths: Sequence[Path | str]) -> Source:
    """The source, or each part of a mixture, with what keep-lists keep, without the images that keep no caption.

    A caption that the list lacks makes a row bad.
    Errors: ValueError for a list that cannot be read, lacks images or captions of the source, or keeps nothing of it.
    """
    return joined(source, [KeepList(path) for path in paths], _kept) if paths else source


def _kept(source: Source, lists: Joined[KeepList]) -> Source:
    if not lists:
        raise ValueError(f"no keep-list is of {source.name}. {AGAIN}")
    named, keys = " + ".join(str(one) for one, _ in lists), key_column(source)
    all_rows, kept_rows, texts = np.sum([one.numbers()[:, places] for one, places in lists], 0)
    known = keys.is_valid().to_numpy(False)
    if (missing := np.flatnonzero(known & (all_rows == 0))).size:
        raise ValueError(
            f"{named} lacks {len(missing):,} of the {len(source):,} images of {source.name}, such as "
            f"{shown_key(keys[int(missing[0])])}: the data has grown, or the list is of another part of it. {AGAIN}"
        )
    rows = np.flatnonzero((kept_rows > 0) | ~known)
    if not len(rows):
        raise ValueError(f"{named} keeps no caption of {source.name}: there is nothing to train on.")
    left = np.minimum(texts, all_rows - kept_rows)
    edit = _Keep(lists, (int(left.sum()), len(source) - len(rows), int(texts.sum()), len(source)))
    prints = sorted(f"{source.fingerprint} kept {one.fingerprint}" for one, _ in lists)
    return Selection(source, source.name, digest(*prints), rows, edit)


def omitted(source: Source) -> str:
    """What keep-lists omit of a source or of all parts of a mixture; "" without lists."""
    edits = [part.edit for part in parts_of(source) if isinstance(part, Selection)]
    counts = [edit.omitted for edit in edits if isinstance(edit, _Keep)]
    if not counts:
        return ""
    captions, images, all_captions, all_images = map(sum, zip(*counts, strict=True))
    return (
        f"omits {captions:,} of {count(all_captions, 'caption')} (pairs), and with them {images:,} of "
        f"{count(all_images, 'image')} that keep none"
    )


def spread(rows: int, most: int) -> range:
    """At most `most` of the rows of a data set, evenly spread."""
    return range(0, rows, max(1, -(-rows // most)))


def key_column(source: Source) -> pa.Array:
    """The key of every row [N], large_binary; null where only the record has it and cannot be read."""
    if isinstance(source, Rows):
        return pa.chunked_array(source.table.column("key").cast(pa.large_binary())).combine_chunks()
    return pa.array([None if key is None else key_bytes(key) for key in keys(source)], pa.large_binary())


def places_of(keys: pa.Array, among: pa.Array) -> NDArray[np.int64]:
    """The first place of each key [N] among others; -1 for a null, and for a key that they lack."""
    return np.asarray(pc.fill_null(pc.index_in(keys, value_set=among, skip_nulls=True), -1), np.int64)


def image_digests(source: Source, rows: Iterable[int], drawn: bool = False) -> dict[int, tuple[str, str]]:
    """Key and digest of the images of rows, also without captions; none of bad rows.

    Args: drawn: also of images that are no encoded files.
    """
    found = dict[int, tuple[str, str]]()
    for row in rows:
        with suppress(BadSample):
            record = read_image(source, row)
            if drawn or isinstance(record.image, bytes):
                found[row] = record.key, digest_of(record.image).hex()
    return found


def sampled_images(source: Source, most: int = SAMPLED) -> dict[str, str]:
    """Digests of up to `most` encoded images of each source of a mixture, by key; none of images that are drawn."""
    return dict(one for part in parts_of(source) for one in image_digests(part, spread(len(part), most)).values())


def sampled(source: Source) -> str:
    """A digest of some images of each source, for fingerprints that do not cover pixels; "" for drawn images."""
    images = sampled_images(source, 512)
    return digest(json.dumps(sorted(images.items()))) if images else ""


Made = TypeVar("Made", CaptionTable, KeepList)
Joined = Sequence[tuple[Made, NDArray[np.int64]]]
"""Tables of a source, each with the place of each row of it among its keys [N], see `places_of`."""


def joined(source: Source, made: Sequence[Made], wrap: Callable[[Source, Joined[Made]], Source]) -> Source:
    """The source, or each source of a mixture, wrapped with the files that were made from its images.

    A file that does not say what it was made from is of every source, whose keys must then differ.
    Raises: ValueError for a file of other images, and for keys by which a file fits two images.
    """
    parts = [(part, key_column(part)) for part in parts_of(every_row(source))]
    of: dict[tuple[str, str], list[tuple[Made, NDArray[np.int64]]]] = {(p.name, p.fingerprint): [] for p, _ in parts}
    for one in made:
        fits = [(part, keys, _is_of(one.images, part, keys)) for part, keys in parts]
        chosen = [(part, places_of(keys, one.keys)) for part, keys, fit in fits if fit is not False]
        if not chosen:
            raise ValueError(
                f"{one} was made from other images than those of {source.name}, which have the same keys: name the "
                "data that it was made from, or make it again from this data."
            )
        if not any((at >= 0).any() for _, at in chosen):
            other = next(iter(parts[0][1].drop_null()), one.keys[0])
            raise ValueError(
                f"{one} is of another data set: it has none of the {len(source):,} images of {source.name}. Its keys "
                f"are such as {shown_key(one.keys[0])}, the images' such as {shown_key(other)}."
            )
        if len(chosen) > 1 or not any(fit for *_, fit in fits):
            check_keys(mix([part for part, _ in chosen]), str(one), one.keys)
        for part, at in chosen:
            of[part.name, part.fingerprint].append((one, at))
    changed = [wrap(part, of[part.name, part.fingerprint]) for part in parts_of(source)]
    if isinstance(source, MixtureSource):
        return MixtureSource(changed, source.weights, source.epoch)
    return changed[0]


def check_keys(source: Source, what: str, among: pa.Array | None = None) -> None:
    """Raises: ValueError where two images of a source, or of the sources of a mixture, have one key and differ.

    Args: what: is joined by key, for the message; among: keys that matter, all by default.
    """
    whole = every_row(source)
    keys = key_column(whole)
    first = places_of(keys, keys)
    again = (first >= 0) & (first != np.arange(len(first)))
    if among is not None:
        again &= places_of(keys, among) >= 0
    for row in np.flatnonzero(again).tolist():
        rows = int(first[row]), row
        if len({image for _, image in image_digests(whole, rows, drawn=True).values()}) > 1:
            names = dict.fromkeys(origin(whole, n)[0].name for n in rows)
            raise ValueError(
                f"two images of {' and '.join(names)} have the key {shown_key(keys[row])} and differ, but {what} is "
                "joined by key: give each image a unique key, or use one source at a time."
            )


def _is_of(images: Mapping[str, str], source: Source, keys: pa.Array) -> bool | None:
    """Whether a source has most of `images` under their keys; None where it has none of the keys."""
    rows = places_of(pa.array(map(key_bytes, images), pa.large_binary()), keys)
    same = [images[key] == image for key, image in image_digests(source, rows[rows >= 0].tolist()).values()]
    return 2 * sum(same) > len(same) if same else None


def shown_key(key: pa.Scalar) -> str:
    """A key for messages."""
    return repr(shown(key_text(key.as_py())[:100]))


def _read(path: Path | str, *wanted: tuple[str, ...]) -> list[pa.Array]:
    """The first of the wanted columns each: texts or lists of them, large_binary; or `keep`, bool."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file. Expected a parquet table.")
    with arrow_errors(path):
        names = pq.read_schema(path).names
        chosen = [next((name for name in some if name in names), some[0]) for some in wanted]
        check_columns(path, names, *chosen)
        table = pq.read_table(path, columns=chosen)
        if not len(table):
            raise ValueError(f"{path} has no rows. Expected a key in each row.")
    columns = []
    for name in chosen:
        column, kind = table.column(name), pa.bool_() if name == "keep" else pa.large_binary()
        if name == "captions" and pa.types.is_nested(column.type):
            kind = pa.large_list(kind)
        with arrow_errors(f"{path}: the column `{name}`"):
            columns.append(pa.chunked_array(column.cast(kind)).combine_chunks())
    return columns
