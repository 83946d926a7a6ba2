"""Keep-lists: which captions of a data set a run trains on, as `kiloword audit` writes them and `train --keep` reads.

A parquet table with a row for each caption, and one with index -1 for an image that cannot be read or has no caption:
`key` (text or binary, where text cannot hold it), `index` (of the caption among those of its image), `caption`, `keep`
(bool), `reason` (why not; "") and `score` (null where there is none). Others than `key`, `caption` and `keep` are not
read. Captions are found by key and text, so that their order may change; where an image has a text several times, the
rows of that text hold for it in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from kiloword.data.feature_store import contents
from kiloword.data.files import find_key, key_bytes, key_text, lookup_table
from kiloword.data.sources.columns import check_once
from kiloword.data.sources.embedded import arrow_errors, check_expanded
from kiloword.data.sources.held_out import SomeRows
from kiloword.data.sources.joins import images_in, joined
from kiloword.data.sources.mixture import MixtureSource
from kiloword.data.sources.optional import key_of, keys, texts_of
from kiloword.data.sources.tables import one_array
from kiloword.errors import count
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record, Source

COLUMNS = ("key", "caption", "keep")
SAMPLED = 1000  # rows whose captions are compared with the list when it is opened; others when they are read
AGAIN = "Make one of this data by `kiloword audit SRC --model MODEL --out DIR`."
UNKNOWN = "a caption that the keep-list lacks"


class KeepList:
    """One or several keep-lists.

    Pickling it for a worker sends only the paths.
    Errors: ValueError for a file that cannot be read, or whose columns are missing or of another type.
    """

    def __init__(self, paths: Sequence[Path | str]) -> None:
        self.paths = [Path(path) for path in paths]
        self._open()

    @cached_property
    def images(self) -> dict[str, str]:
        """See `kiloword.data.sources.joins.Keyed`."""
        return {key: digest for path in self.paths for key, digest in images_in(path).items()}

    def __contains__(self, key: str) -> bool:
        return bool(self.verdicts(key))

    def _open(self) -> None:
        tables = [_read(path) for path in self.paths]
        self._keys, self._captions, keep = (pa.concat_arrays(column) for column in zip(*tables, strict=True))
        self._keep: NDArray[np.bool_] = keep.to_numpy(zero_copy_only=False)
        self._lookup = lookup_table((key.as_py() for key in self._keys), np.arange(len(self._keys), dtype=np.uint64))

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def verdicts(self, key: str) -> dict[bytes, list[bool]]:
        """The captions of an image, and whether each is kept, once for each row; {} for an unknown key."""
        raw, verdicts = key_bytes(key), dict[bytes, list[bool]]()
        for row in find_key(self._lookup, raw):
            if self._keys[row].as_py() == raw:
                verdicts.setdefault(self._captions[row].as_py(), []).append(bool(self._keep[row]))
        return verdicts

    @cached_property
    def digest(self) -> str:
        """A digest of the keys, the captions, and which are kept, whatever the order of the rows."""
        total = 0
        for key, caption, keep in zip(self._keys, self._captions, self._keep, strict=True):
            lengths = f"{len(key.as_py())} {len(caption.as_py())} {keep} ".encode()
            row = hashlib.blake2b(lengths + key.as_py() + caption.as_py(), digest_size=16).digest()
            total += int.from_bytes(row, "big")
        return f"{total % (1 << 128):032x}"

    def __str__(self) -> str:
        return " + ".join(map(str, self.paths))

    @property
    def first_key(self) -> str:
        """The first key, for messages."""
        return key_text(self._keys[0].as_py())


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


class Kept(SomeRows):
    """A source with the captions that a keep-list keeps, without the images that keep none.

    Feature stores of the source serve it. A caption that the list lacks makes a row bad. For a mixture use `kept`,
    which wraps its parts.
    Errors: ValueError for a list that lacks images or captions of the source, or keeps nothing of it.
    """

    def __init__(self, source: Source, chosen: KeepList) -> None:
        assert not isinstance(source, MixtureSource), "its rows change from epoch to epoch: wrap the parts"
        self.chosen, self.omitted = chosen, Omitted(all_images=len(source))
        rows, missing = list[int](), list[str]()
        for row, key in enumerate(keys(source)):
            verdicts = chosen.verdicts(key) if key is not None else {b"": [True]}
            if key is not None and not verdicts:
                missing.append(key)
            if self._count(verdicts):
                rows.append(row)
        _check(chosen, source, missing)
        if not rows:
            raise ValueError(f"{chosen} keeps no caption of {source.name}: there is nothing to train on.")
        super().__init__(source, np.array(rows), source.name, f"{source.fingerprint} kept {chosen.digest}")
        self._check_captions()

    @property
    def contents(self) -> frozenset[str]:
        """The origins of images and captions; see `kiloword.data.feature_store.contents`."""
        return contents(self.source)

    def _count(self, verdicts: Mapping[bytes, Sequence[bool]]) -> bool:
        """Count what is omitted of an image; whether anything is left."""
        flags = [flag for of_text in verdicts.values() for flag in of_text]
        captions = sum(len(of_text) for text, of_text in verdicts.items() if text)
        left = min(captions, len(flags) - sum(flags))
        self.omitted += Omitted(left, int(not any(flags)), captions)
        return any(flags)

    def _check_captions(self) -> None:
        """Raises: ValueError when the list lacks captions of rows that are spread over the source."""
        for row in range(0, len(self), max(1, len(self) // SAMPLED)):
            try:
                self.captions(row)
            except NoCaption:
                continue
            except BadSample as error:
                if str(error) == UNKNOWN:
                    raise ValueError(
                        f"{self.chosen} lacks captions that {self.source.name} has, such as one of "
                        f"{shown(self.key(row)[:100])}: it was made of other captions. {AGAIN}"
                    ) from error

    def key(self, row: int) -> str:
        """The key of the row in the source."""
        return key_of(self.source, int(self.rows[row]))

    def captions(self, row: int) -> list[str]:
        """The captions that are kept, without reading the image where the source supports that. Raises BadSample."""
        return self._kept(self.key(row), texts_of(self.source, int(self.rows[row])))

    def record(self, row: int) -> Record:
        """The stored sample with the captions that are kept. Raises BadSample with the reason."""
        record = super().record(row)
        return replace(record, captions=self._kept(record.key, record.captions))

    def _kept(self, key: str, captions: Sequence[str]) -> list[str]:
        verdicts, kept = self.chosen.verdicts(key), list[str]()
        for caption in captions:
            flags = verdicts.get(key_bytes(caption))
            if flags is None:
                raise BadSample(UNKNOWN)
            if flags.pop(0) if len(flags) > 1 else flags[0]:
                kept.append(caption)
        return kept


def kept(source: Source, paths: Sequence[Path | str]) -> Source:
    """The source, or each part of a mixture, with what keep-lists keep; the source itself without lists.

    Errors: as of `KeepList` and `Kept`.
    """
    lists = [KeepList([path]) for path in paths]
    return joined(source, lists, _wrap) if lists else source


def _wrap(source: Source, lists: list[KeepList]) -> Source:
    if not lists:
        raise ValueError(f"no keep-list is of {source.name}. {AGAIN}")
    return Kept(source, lists[0] if len(lists) == 1 else KeepList([path for one in lists for path in one.paths]))


def omitted(source: Source) -> Omitted | None:
    """What keep-lists omit of a source or of all parts of a mixture; None without lists."""
    parts = source.sources if isinstance(source, MixtureSource) else [source]
    counts = [part.omitted for part in parts if isinstance(part, Kept)]
    return sum(counts, Omitted()) if counts else None


def _check(chosen: KeepList, source: Source, missing: Sequence[str]) -> None:
    """Raises: ValueError for a list that lacks images of the source."""
    if not missing:
        return
    raise ValueError(
        f"{chosen} lacks {len(missing):,} of the {len(source):,} images of {source.name}, such as "
        f"{shown(missing[0][:100])!r}: the data has grown, or the list is of another part of it. {AGAIN}"
    )


def _read(path: Path) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Keys and captions as bytes, and which are kept, [N] each. Errors: ValueError."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file. Expected a keep-list. {AGAIN}")
    with arrow_errors(path):
        names = pa.parquet.read_schema(path).names
        if absent := [name for name in COLUMNS if name not in names]:
            raise ValueError(
                f"{path} is no keep-list: it lacks the column {absent[0]}, and has "
                f"{shown(', '.join(names)[:200]) or 'none'}. {AGAIN}"
            )
        check_once(path, names, *COLUMNS)
        check_expanded(path, list(COLUMNS))
        table = pa.parquet.read_table(path, columns=list(COLUMNS))
        for name in COLUMNS:
            _check_column(path, name, table.column(name))
        key, caption = (one_array(table.column(name), pa.large_binary()) for name in COLUMNS[:2])
        return key, caption, one_array(table.column("keep"), pa.bool_())


def _check_column(path: Path, name: str, column: pa.ChunkedArray) -> None:
    kinds = pa.types
    checks = (kinds.is_boolean,) if name == "keep" else (kinds.is_string, kinds.is_large_string, kinds.is_binary)
    checks += () if name == "keep" else (kinds.is_large_binary,)
    if not any(check(column.type) for check in checks):
        expected = "true or false" if name == "keep" else "text"
        raise ValueError(f"{path}: the column {name} holds {shown(str(column.type)[:100])}. Expected {expected}.")
    if column.null_count:
        raise ValueError(f"{path}: the column {name} has {count(column.null_count, 'empty cell')}. Expected none.")
    if not len(column):
        raise ValueError(f"{path} has no rows. Expected one for each caption.")
