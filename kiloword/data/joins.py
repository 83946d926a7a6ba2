"""Tables that are joined to images by key: extra captions, and keep-lists of captions.

Extra captions (arXiv:2405.10286, section 4.4) are parquet tables with the columns `key`, and `captions` (lists of text)
or `caption`; rows of one key are merged in their order.

A keep-list, as `kiloword audit` writes it and `train --keep` reads it, has a row for each caption, and one for an image
that cannot be read or has no caption: `key`, `caption` and `keep` (bool); other columns are not read. Captions are
found by key and text, so that their order may change; where an image has a text several times, the rows of that text
hold for it in their order.

Data sets number their images alike (000000000, ...), so both say which images they were made from, and are joined to no
other ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kiloword.data.columns import arrow_errors, check_columns
from kiloword.data.edits import MixtureSource, Selection, digest, each_part, every_row, mix, parts_of
from kiloword.data.reading import digest_of
from kiloword.data.rows import key_bytes, key_text
from kiloword.data.sample import clean
from kiloword.data.source import keys
from kiloword.errors import count
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record, Source

SAMPLED = 64  # images of each source by which a file recognises it
COMPARED = 1000  # rows whose captions are compared with a keep-list when it is opened; others when they are read
KEEP_COLUMNS = ("key", "caption", "keep")
_KINDS = pa.large_binary(), pa.bool_()
AGAIN = "Make one of this data by `kiloword audit SRC --model MODEL --out DIR`."
UNKNOWN = "a caption that the keep-list lacks"


class Keyed:
    """A parquet table of images by key. Attributes: keys: K different ones, binary; images: see `sampled_images`."""

    def __init__(self, path: Path, keys: pa.Array) -> None:
        self.path, self.keys, self.images = path, keys, images_in(path)

    def __str__(self) -> str:
        return str(self.path)

    def __contains__(self, key: str) -> bool:
        return key_bytes(key) in self.place_of

    @property
    def first_key(self) -> str:
        """The first key, for messages."""
        return key_text(self.keys[0].as_py())

    @cached_property
    def place_of(self) -> dict[bytes, int]:
        """The place of each key among `keys`."""
        return {key: place for place, key in enumerate(self.keys.to_pylist())}

    def places(self, source: Source) -> NDArray[np.int64]:
        """The places of the keys of all rows of a source [N]; -1 for a key that the table lacks."""
        raw = pa.array([None if key is None else key_bytes(key) for key in keys(source)], pa.large_binary())
        return np.asarray(pc.fill_null(pc.index_in(raw, value_set=self.keys, skip_nulls=True), -1), np.int64)


class CaptionTable(Keyed):
    """Captions by key. Errors: ValueError for a file that cannot be read or has other columns."""

    def __init__(self, path: Path | str) -> None:
        of_row, cells = _read(path, "table of captions", ("key",), ("captions", "caption"))
        owner = np.arange(len(of_row))
        if pa.types.is_large_list(cells.type):
            owner, cells = np.asarray(pc.list_parent_indices(cells)), cells.flatten()
        unique, (self._captions,) = _grouped(pc.fill_null(of_row.cast(pa.large_binary()), b""), owner, cells)
        super().__init__(Path(path), unique)
        self.fingerprint = digest(*map(str, (len(of_row), *map(_checksum, (unique, self._captions)))))

    def at(self, place: int) -> list[str]:
        """The captions of the key at a place among `keys`; [] for -1. Raises: BadSample as `sample.clean`."""
        return [] if place < 0 else clean([text for text in self._captions[place].as_py() if text is not None])

    def captions(self, key: str) -> list[str]:
        """The captions of a key; [] for an unknown key."""
        return self.at(self.place_of.get(key_bytes(key), -1))

    def first(self, key: str) -> str | None:
        """The first caption of a key, "" where it is empty; None for an unknown key."""
        place = self.place_of.get(key_bytes(key))
        texts = [] if place is None else self._captions[place].as_py()
        return None if place is None else next((text.strip() for text in texts if text is not None), "")


@dataclass(frozen=True)
class _Extra:
    """Adds captions of tables that are not among those of the image. `places` [N] of each: see `Keyed.places`."""

    tables: Sequence[tuple[CaptionTable, NDArray[np.int64]]]
    raw: bool

    def contents(self, of_source: frozenset[str]) -> frozenset[str]:
        """See `kiloword.data.edits.contents`."""
        kept = {one for one in of_source if self.raw or not one.endswith(" captions")}
        return frozenset(kept | {f"{sorted(of_source)[0]} + {table.fingerprint}" for table, _ in self.tables})

    def __call__(self, row: int, captions: list[str]) -> list[str]:
        own = captions if self.raw else []
        extra = dict.fromkeys(caption for table, places in self.tables for caption in table.at(int(places[row])))
        return [*own, *(caption for caption in extra if caption not in own)]


def with_captions(source: Source, paths: Sequence[Path | str], raw_captions: bool = True) -> Source:
    """The source, or each part of a mixture, with the captions of parquet tables.

    Args: raw_captions: keep the captions of the source; otherwise a row that the tables lack has none, and is bad.
    Errors: ValueError for a table that cannot be read, has no key of the source or was made from other images;
    raw_captions False without tables.
    """
    if not paths:
        if not raw_captions:
            raise ValueError("no image has a caption without raw captions and extra ones: name --extra-captions.")
        return source

    def wrap(part: Source, tables: list[CaptionTable]) -> Source:
        name = " + ".join([part.name, *map(str, tables)])
        prints = sorted(f"{part.fingerprint} + {table.fingerprint}" for table in tables)
        edit = _Extra([(table, table.places(part)) for table in tables], raw_captions)
        return Selection(part, name, digest(*prints, f"{part.fingerprint} {raw_captions}"), edit=edit)

    return joined(source, [CaptionTable(path) for path in paths], wrap)


class KeepList(Keyed):
    """Which captions are kept. Errors: ValueError for a file that cannot be read, or has other columns."""

    def __init__(self, path: Path | str) -> None:
        columns = _read(path, "keep-list (`kiloword audit` makes one)", ("key",), ("caption",), ("keep",))
        for name, column in zip(KEEP_COLUMNS, columns, strict=True):
            if column.null_count:
                raise ValueError(
                    f"{path}: the column {name} has {count(column.null_count, 'empty cell')}. Expected none."
                )
        self._by_key(Path(path), pa.table([one.cast(_KINDS[n > 1]) for n, one in enumerate(columns)], KEEP_COLUMNS))

    def _by_key(self, path: Path, table: pa.Table) -> None:
        table = table.sort_by([(name, "ascending") for name in KEEP_COLUMNS[:2]]).combine_chunks()
        key, caption, keep = (column.combine_chunks() for column in table.columns)
        unique, (self.captions, self.keep) = _grouped(key, np.arange(len(key)), caption, keep)
        super().__init__(path, unique)

    @classmethod
    def of(cls, lists: Sequence[Self]) -> Self:
        """Several lists as one."""
        whole = cls.__new__(cls)
        rows = ([k.keys.take(pc.list_parent_indices(k.keep)), k.captions.flatten(), k.keep.flatten()] for k in lists)
        whole._by_key(lists[0].path, pa.concat_tables(pa.table(columns, KEEP_COLUMNS) for columns in rows))
        whole.images = {key: image for one in lists for key, image in one.images.items()}
        return whole

    def numbers(self) -> tuple[NDArray[np.int64], ...]:
        """Rows, kept rows, and rows with a caption of each key, [K] each."""
        owner, size = np.asarray(pc.list_parent_indices(self.keep)), len(self.keys)
        has_text = np.asarray(pc.binary_length(self.captions.flatten())) > 0
        chosen = owner[np.asarray(self.keep.flatten())], owner[has_text]
        return tuple(np.bincount(one, minlength=size) for one in (owner, *chosen))


@dataclass
class Omitted:
    """What keep-lists omit of a source, and what it has."""

    captions: int = 0
    images: int = 0  # with all their captions
    all_captions: int = 0
    all_images: int = 0

    def __add__(self, other: Omitted) -> Omitted:
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return Omitted(*(a + b for a, b in both))

    def __str__(self) -> str:
        return (
            f"omits {self.captions:,} of {count(self.all_captions, 'caption')} (pairs), and with them "
            f"{self.images:,} of {count(self.all_images, 'image')} that keep none"
        )


@dataclass(frozen=True)
class _Keep:
    """Keeps what a list keeps. `places` [N]: see `Keyed.places`."""

    chosen: KeepList
    places: NDArray[np.int64]
    omitted: Omitted

    def contents(self, of_source: frozenset[str]) -> frozenset[str]:
        """Those of the source: what a list omits needs no other features."""
        return of_source

    def __call__(self, row: int, captions: list[str]) -> list[str]:
        place, verdicts, kept = int(self.places[row]), dict[bytes, list[bool]](), list[str]()
        if place >= 0:
            for text, keep in zip(self.chosen.captions[place].as_py(), self.chosen.keep[place].as_py(), strict=True):
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


def _kept(source: Source, lists: list[KeepList]) -> Source:
    if not lists:
        raise ValueError(f"no keep-list is of {source.name}. {AGAIN}")
    chosen, named = lists[0] if len(lists) == 1 else KeepList.of(lists), " + ".join(map(str, lists))
    places = chosen.places(source)
    known = np.array([key is not None for key in keys(source)])
    if (missing := np.flatnonzero(known & (places < 0))).size:
        first = keys(source)[int(missing[0])] or ""
        raise ValueError(
            f"{named} lacks {len(missing):,} of the {len(source):,} images of {source.name}, such as "
            f"{shown(first[:100])!r}: the data has grown, or the list is of another part of it. {AGAIN}"
        )
    all_rows, kept_rows, texts = (np.append(one, 0)[places] for one in chosen.numbers())  # the last is of place -1
    rows = np.flatnonzero((kept_rows > 0) | ~known)
    if not len(rows):
        raise ValueError(f"{named} keeps no caption of {source.name}: there is nothing to train on.")
    left = np.minimum(texts, all_rows - kept_rows)
    omitted = Omitted(int(left.sum()), len(source) - len(rows), int(texts.sum()), len(source))
    checksum = digest(*map(_checksum, (chosen.keys, chosen.captions, chosen.keep)))
    edit = _Keep(chosen, places, omitted)
    selection = Selection(source, source.name, digest(f"{source.fingerprint} kept {checksum}"), rows, edit)
    for row in range(0, len(selection), max(1, len(selection) // COMPARED)):
        try:
            selection.captions(row)
        except NoCaption:
            continue
        except BadSample as error:
            if str(error) == UNKNOWN:
                raise ValueError(
                    f"{named} lacks captions that {source.name} has, such as one of "
                    f"{shown(selection.key(row)[:100])}: it was made of other captions. {AGAIN}"
                ) from error
    return selection


def omitted(source: Source) -> Omitted | None:
    """What keep-lists omit of a source or of all parts of a mixture; None without lists."""
    edits = [part.edit for part in parts_of(source) if isinstance(part, Selection)]
    counts = [edit.omitted for edit in edits if isinstance(edit, _Keep)]
    return sum(counts, Omitted()) if counts else None


Made = TypeVar("Made", CaptionTable, KeepList)


def sampled_images(source: Source, most: int = SAMPLED) -> dict[str, str]:
    """Digests of up to `most` encoded images of each source of a mixture, by key; none of images that are drawn."""
    digests = {}
    for part in parts_of(source):
        for row in range(0, len(part), -(-len(part) // most)):
            record = _record(part, row)
            if record is not None and isinstance(record.image, bytes):
                digests[record.key] = digest_of(record.image).hex()
    return digests


def sampled(source: Source) -> str:
    """A digest of some images of each source, for fingerprints that do not cover pixels; "" for drawn images."""
    images = sampled_images(source, 512)
    return digest(json.dumps(sorted(images.items()))) if images else ""


def images_in(path: Path) -> dict[str, str]:
    """`sampled_images` of the data that a parquet table was made from, by its metadata; {} where it does not say."""
    try:
        images = json.loads(pq.read_schema(path).metadata[b"kiloword"])["images"]
    except (KeyError, TypeError, ValueError):
        return {}
    return images if isinstance(images, dict) else {}


def joined(source: Source, made: Sequence[Made], wrap: Callable[[Source, list[Made]], Source]) -> Source:
    """The source, or each source of a mixture, wrapped with the files that were made from its images.

    A file that does not say what it was made from is of every source, whose keys must then differ.
    Raises: ValueError for a file of other images, and for keys by which a file fits two images.
    """
    parts = parts_of(every_row(source))
    of: dict[tuple[str, str], list[Made]] = {(part.name, part.fingerprint): [] for part in parts}
    for one in made:
        fits = [is_of(one.images, part) for part in parts]
        chosen = [part for part, fit in zip(parts, fits, strict=True) if fit is not False]
        if not chosen:
            raise ValueError(
                f"{one} was made from other images than those of {source.name}, which have the same keys: name the "
                "data that it was made from, or make it again from this data."
            )
        if not any((one.places(part) >= 0).any() for part in chosen):
            other = next((key for part in chosen for key in keys(part) if key is not None), "")
            raise ValueError(
                f"{one} is of another data set: it has none of the {len(source):,} images of {source.name}. Its keys "
                f"are such as {shown(one.first_key[:100])!r}, the images' such as {shown(other[:100])!r}."
            )
        if len(chosen) > 1 or True not in fits:
            check_keys(mix(chosen), str(one), one.__contains__)
        for part in chosen:
            of[part.name, part.fingerprint].append(one)
    return each_part(source, lambda part: wrap(part, of[part.name, part.fingerprint]))


def check_keys(source: Source, what: str, known: Callable[[str], bool] | None = None, texts: bool = False) -> None:
    """Raises: ValueError where two images of a source, or of the sources of a mixture, have one key and differ.

    Args: what: is joined by key, for the message; known: whether a key matters; texts: compare captions too.
    """
    whole, first = every_row(source), dict[str, int]()
    for row, key in enumerate(keys(whole)):
        earlier = row if key is None else first.setdefault(key, row)
        if key is None or earlier == row or (known is not None and not known(key)):
            continue
        if _compared(whole, earlier, texts) != _compared(whole, row, texts):
            names = [(whole.locate(n)[0] if isinstance(whole, MixtureSource) else whole).name for n in (earlier, row)]
            raise ValueError(
                f"two images of {' and '.join(dict.fromkeys(names))} have the key {shown(key[:100])!r} and differ"
                f"{' (or their captions)' * texts}, but {what} is joined by key: give each image a unique key, or use "
                "one source at a time."
            )


def is_of(images: Mapping[str, str], source: Source) -> bool | None:
    """Whether most of the `sampled_images` are those of a source; None where the source has none of their keys."""
    rows = [row for row, key in enumerate(keys(source)) if key in images] if images else []
    records = (_record(source, row) for row in rows)
    same = [digest_of(r.image).hex() == images[r.key] for r in records if r is not None and isinstance(r.image, bytes)]
    return 2 * sum(same) > len(same) if same else None


def _compared(source: Source, row: int, texts: bool) -> tuple[bytes, list[str]] | None:
    record = _record(source, row)
    return None if record is None else (digest_of(record.image), record.captions if texts else [])


def _record(source: Source, row: int) -> Record | None:
    """The record of a row, with or without captions; None for a bad row."""
    try:
        return source.record(row)
    except NoCaption as error:
        return error.record
    except BadSample:
        return None


def _grouped(keys: pa.Array, owner: NDArray[Any], *values: pa.Array) -> tuple[pa.Array, list[pa.Array]]:
    """Values by key. Args: keys [n]; owner [m]: the place in `keys` of each value; values [m].

    Returns: different keys [K], in order of first appearance; lists of values [K], in their order.
    """
    coded = keys.dictionary_encode()
    groups = np.asarray(coded.indices)[owner]
    order = pa.array(np.argsort(groups, kind="stable"))
    ends = np.cumsum(np.bincount(groups, minlength=len(coded.dictionary)))
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int64))
    return coded.dictionary, [pa.LargeListArray.from_arrays(offsets, column.take(order)) for column in values]


def _checksum(column: pa.Array) -> str:
    """A digest of the values of a column."""
    return hashlib.blake2b(pa.record_batch([column], ["values"]).serialize(), digest_size=16).hexdigest()


def _read(path: Path | str, what: str, *wanted: tuple[str, ...]) -> list[pa.Array]:
    """The first of the wanted columns each: texts, lists of texts, or `keep`, bool. Errors: ValueError."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file. Expected a {what}, a parquet.")
    with arrow_errors(path):
        names = pq.read_schema(path).names
        chosen = [next((name for name in some if name in names), "") for some in wanted]
        if not all(chosen):
            raise ValueError(
                f"{path} is no {what}: it has the columns {shown(', '.join(names)[:200]) or 'none'}. Expected "
                f"{', '.join(' or '.join(some) for some in wanted)}."
            )
        check_columns(path, names, *chosen)
        table = pq.read_table(path, columns=chosen)
        if not len(table):
            raise ValueError(f"{path} has no rows. Expected a key in each row.")
        return [_as_texts(path, name, table.column(name), name in wanted[1]) for name in chosen]


def _as_texts(path: Path, name: str, column: pa.ChunkedArray, lists: bool) -> pa.Array:
    kinds = pa.types
    kind = column.type.value_type if kinds.is_dictionary(column.type) else column.type
    nested = lists and (kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))
    inner = kind.value_type if nested else kind
    text = kinds.is_string(inner) or kinds.is_large_string(inner) or (name == "key" and kinds.is_binary(inner))
    if not (kinds.is_boolean(inner) if name == "keep" else text or kinds.is_large_binary(inner)):
        expected = "true or false" if name == "keep" else "texts, as the images are named" if name == "key" else "texts"
        raise ValueError(f"{path}: the column `{name}` holds {shown(str(column.type)[:100])}. Expected {expected}.")
    inner = inner if not text or kinds.is_binary(inner) else pa.large_string()
    array = pa.chunked_array(column.cast(pa.large_list(inner) if nested else inner)).combine_chunks()
    array.validate(full=True)  # raises for text that is not UTF-8
    return array
