"""Extra captions: parquet tables that add captions to images by key (arXiv:2405.10286, section 4.4)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from kiloword.data.files import find_key, key_bytes, key_text, lookup_table
from kiloword.data.sources.columns import check_once
from kiloword.data.sources.embedded import arrow_errors, check_expanded
from kiloword.data.sources.joins import images_in, joined
from kiloword.data.sources.mixture import MixtureSource
from kiloword.data.sources.optional import key_of, texts_of
from kiloword.data.sources.sample import clean
from kiloword.data.sources.tables import fingerprint, one_array
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record, Source

CAPTION_COLUMNS = ("captions", "caption")


class CaptionTable:
    """A parquet table with a column `key` and a column `captions` (list of strings) or `caption` (string).

    Rows of one key are merged in their order. Pickling it for a worker sends only the path.
    Errors: ValueError when the file cannot be read, or its columns are missing or of another type.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file. Expected a parquet table with the columns `key` and `captions`.")
        self.fingerprint = fingerprint(self.path)
        self._open()
        self.images = images_in(self.path)

    def _open(self) -> None:
        keys, self._captions = _read(self.path)
        self._keys = keys.cast(pa.large_binary())
        places = np.arange(len(keys), dtype=np.uint64)
        self._lookup = lookup_table((key.as_py() or b"" for key in self._keys), places)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "fingerprint": self.fingerprint, "images": self.images}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def captions(self, key: str) -> list[str]:
        """The captions of a key; [] for an unknown key."""
        return clean([c for cell in self._cells(key) for c in cell if c is not None])

    def first(self, key: str) -> str | None:
        """The first caption of a key, "" where it is empty; None for an unknown key."""
        cells = self._cells(key)
        if not cells:
            return None
        return next((c.strip() for cell in cells for c in cell if c is not None), "")

    def _cells(self, key: str) -> list[list[str | None]]:
        """The captions in each row of a key."""
        raw = key_bytes(key)
        cells = [self._captions[row].as_py() for row in find_key(self._lookup, raw) if self._keys[row].as_py() == raw]
        return [[cell] if isinstance(cell, str) else cell or [] for cell in cells]

    def __str__(self) -> str:
        return str(self.path)

    def __contains__(self, key: str) -> bool:
        return bool(self.captions(key))

    @property
    def first_key(self) -> str:
        """The first key, for messages."""
        return key_text(self._keys[0].as_py() or b"")


class WithCaptions:
    """A source with the captions of tables in addition to, or in place of, its own captions.

    Class names, ground truth and labels of the source stay. A row that the tables lack keeps its own captions; with
    `raw_captions` False it is bad: "no caption". A row that is bad only because it has no caption gets those of the
    tables; other bad rows stay bad. For a mixture use `with_captions`, which wraps its parts.
    """

    def __init__(self, source: Source, tables: Sequence[CaptionTable], raw_captions: bool = True) -> None:
        assert not isinstance(source, MixtureSource), "its rows change from epoch to epoch: wrap the parts"
        self.source, self.tables, self.raw_captions = source, list(tables), raw_captions
        self.name = " + ".join([source.name, *(str(table.path) for table in tables)])
        lines = "\n".join(sorted(self.contents))
        self.fingerprint = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    @cached_property
    def contents(self) -> frozenset[str]:
        """The origin of images and captions; see `kiloword.data.feature_store.contents`."""
        base = self.source.fingerprint
        raw = {f"{base} captions"} if self.raw_captions else set()
        return frozenset({f"{base} images", *raw, *(f"{base} + {table.fingerprint}" for table in self.tables)})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":  # during unpickling there is no source yet
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def key(self, row: int) -> str:
        """The key of the row in the source."""
        return key_of(self.source, row)

    def captions(self, row: int) -> list[str]:
        """Captions, without reading the image where the source supports that. Raises BadSample."""
        captions = self._all(self.key(row), texts_of(self.source, row) if self.raw_captions else [])
        if not captions:
            raise BadSample("no caption")
        return captions

    def record(self, row: int) -> Record:
        """The stored sample with its captions. Raises BadSample with the reason."""
        try:
            record = self.source.record(row)
        except NoCaption as error:
            record = error.record
        captions = self._all(record.key, record.captions if self.raw_captions else [])
        if not captions:
            raise NoCaption(replace(record, captions=[]))
        return replace(record, captions=captions)

    def _all(self, key: str, captions: list[str]) -> list[str]:
        """The given captions, then captions of the tables that are not among them."""
        extra = dict.fromkeys(caption for table in self.tables for caption in table.captions(key))
        return [*captions, *(caption for caption in extra if caption not in captions)]


def with_captions(source: Source, paths: Sequence[Path | str], raw_captions: bool = True) -> Source:
    """The source, or each part of a mixture, with the captions of parquet tables.

    Args: raw_captions: keep the captions of the source.
    Errors: ValueError for a table that cannot be read, has no key of the source or was made from other images;
    raw_captions False without tables.
    """
    if not paths:
        if not raw_captions:
            raise ValueError("no image has a caption without raw captions and extra ones: name --extra-captions.")
        return source
    tables = [CaptionTable(path) for path in paths]
    return joined(source, tables, lambda part, of_part: WithCaptions(part, of_part, raw_captions))


def _read(path: Path) -> tuple[pa.Array, pa.Array]:
    """Keys and captions [N], strings in large arrays. Errors: ValueError."""
    with arrow_errors(path):
        names = pa.parquet.read_schema(path).names
        column = next((c for c in CAPTION_COLUMNS if c in names), None)
        if "key" not in names or column is None:
            raise ValueError(
                f"{path} has the columns {shown(', '.join(names)[:200]) or 'none'}. Expected `key`, and `captions` "
                "(lists of text) or `caption`."
            )
        check_once(path, names, "key", column)
        check_expanded(path, ["key", column])
        table = pa.parquet.read_table(path, columns=["key", column], memory_map=True)
        keys, captions = _strings(path, table, "key", False), _strings(path, table, column, True)
    if not len(keys):
        raise ValueError(f"{path} has no rows. Expected a key and its captions in each row.")
    return keys, captions


def _strings(path: Path, table: pa.Table, name: str, lists: bool) -> pa.Array:
    """A column of text, or of lists of text, as one array."""
    column = table.column(name)
    kind, inner = column.type, column.type
    if pa.types.is_dictionary(kind):
        kind = inner = kind.value_type
    nested = lists and (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
    if nested:
        inner = kind.value_type
    if not (pa.types.is_string(inner) or pa.types.is_large_string(inner)):
        expected = "text or lists of text" if lists else "text, as the images are named (not numbers)"
        raise ValueError(f"{path}: the column `{name}` holds {shown(str(column.type)[:100])}. Expected {expected}.")
    array = one_array(column, pa.large_list(pa.large_string()) if nested else pa.large_string())
    array.validate(full=True)  # raises for text that is not UTF-8
    return array
