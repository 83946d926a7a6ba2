"""csv, tsv and parquet: one row names an image and a caption; rows of one image become one sample.

Columns: `image` (path relative to the table; in parquet also the bytes, or a struct with `bytes`) or open_clip's
`filepath`; and `caption`, `captions` (a list; in csv a JSON list, or one caption a line) or open_clip's `title`. Tables
of questions are read in `question_tables`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from kiloword.data.sources.embedded import Embedded, arrow_errors, check_expanded, check_rows, is_embedded
from kiloword.data.sources.sample import MAX_IMAGE, clean, decode_text, read_whole
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record

IMAGE_COLUMNS = ("image", "filepath")
CAPTION_COLUMNS = ("captions", "caption", "title")
_BLOCK = 1 << 26  # bytes that the csv reader looks at together; no row may be longer


@dataclass
class _Columns:
    """What a table holds, N rows."""

    images: pa.Array  # [N] paths, or digests of embedded images
    captions: pa.Array  # [N] bytes, or lists of text
    several: bool  # the caption column is `captions`
    embedded: Embedded | None = None  # the images, where the table holds them itself
    malformed: list[str] = field(default_factory=list)  # reasons of lines that are no rows


def fingerprint(path: Path) -> str:
    """A digest of a file's bytes, 32 hexadecimal digits. Errors: OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class TableSource:
    """Samples of one csv, tsv or parquet file, in order of first appearance; lines that are no rows come last, as bad.

    The fingerprint is of the table's own bytes; of images that it names by path, `stored` has the bytes.
    Errors: ValueError for missing columns, no rows, an unreadable table.
    """

    natural = True
    from_files = True
    classnames: list[str] | None = None
    templates: list[str] | None = None

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.fingerprint = fingerprint(path)
        parquet = path.suffix.lower() == ".parquet"
        with arrow_errors(path):
            self._columns = _read_parquet(path, self.fingerprint) if parquet else _read_csv(path)
        self._order, self._starts = _group(self._columns.images)
        if not len(self):
            raise ValueError(f"{path} has no rows. Expected an image and a caption a row.")

    def __len__(self) -> int:
        return len(self._starts) - 1 + len(self._columns.malformed)

    def key(self, row: int) -> str:
        """The image's path without suffix; the number of its first row where the table holds the images."""
        samples = len(self._starts) - 1
        if row >= samples:
            return f"malformed {row - samples}"
        if self._columns.embedded:
            return str(self._first(row))
        return os.path.splitext(os.fsdecode(self._image(row)))[0]

    def captions(self, row: int) -> list[str]:
        """Captions without the image. Raises BadSample."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        if row >= len(self._starts) - 1:
            raise BadSample(self._columns.malformed[row - len(self._starts) + 1])
        rows = self._order[self._starts[row] : self._starts[row + 1]]
        return clean([caption for r in rows for caption in self._cell(int(r))])

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        captions = self.captions(row)
        embedded = self._columns.embedded
        image = embedded.read(self._first(row)) if embedded else read_file(self.path, self._image(row))
        if not image:
            raise BadSample("the image has zero bytes")
        if not captions:
            raise NoCaption(Record(self.key(row), image, []))
        return Record(self.key(row), image, captions)

    def stored(self, row: int) -> list[bytes | None]:
        """The bytes of a row's image where the table names it by path. Raises BadSample."""
        named = self._columns.embedded is None and row < len(self._starts) - 1
        return [read_file(self.path, self._image(row))] if named else []

    def paths(self) -> pa.Array | None:
        """Of the images; None where the table holds them itself."""
        return None if self._columns.embedded else self._columns.images

    def _first(self, row: int) -> int:
        return int(self._order[self._starts[row]])

    def _image(self, row: int) -> bytes:
        return self._columns.images[self._first(row)].as_py() or b""

    def _cell(self, row: int) -> list[str]:
        try:
            cell = self._columns.captions[row].as_py()
        except UnicodeDecodeError:
            raise BadSample("caption is not UTF-8") from None
        if isinstance(cell, list):
            return [caption for caption in cell if caption is not None]
        text = decode_text(cell or b"")
        return _several(text) if self._columns.several else [text]


def _several(text: str) -> list[str]:
    """A JSON list of strings, or one caption a line."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, list) and all(isinstance(c, str) for c in found):
            return found
    return text.split("\n")


def _choose(path: Path, names: list[str]) -> tuple[str, str]:
    """The image's and the caption's column."""
    image = next((c for c in IMAGE_COLUMNS if c in names), None)
    caption = next((c for c in CAPTION_COLUMNS if c in names), None)
    if image is None or caption is None:
        raise ValueError(
            f"{path} has the columns {shown(', '.join(names)[:200]) or 'none'}. Expected `image` (or `filepath`) and "
            "`caption`, `captions` (or `title`) in its first line; or `image`, `question` and `answers` (or `answer`)."
        )
    check_once(path, names, image, caption)
    return image, caption


def check_once(path: Path, names: list[str], *columns: str) -> None:
    """Errors: ValueError when a table has two columns of one name, of which nobody can tell which one counts."""
    for column in columns:
        if names.count(column) > 1:
            raise ValueError(f"{path} has {names.count(column)} columns named {column}. Expected one.")


def column_names(path: Path) -> list[str]:
    """Errors: ValueError when the table cannot be read."""
    if path.suffix.lower() != ".parquet":
        return _header(path)[1]
    with arrow_errors(path):
        return list(pa.parquet.read_schema(path).names)


def _group(images: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows ordered by image [N], and where each image's rows start [G + 1]; images by first appearance."""
    groups = images.dictionary_encode(null_encoding="encode").indices.to_numpy(zero_copy_only=False)
    order = np.argsort(groups, kind="stable").astype(np.int64)
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1)).astype(np.int64)
    return order, np.append(starts, len(order))


def one_array(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    return pa.chunked_array(column.cast(kind), kind).combine_chunks()


def _read_csv(path: Path) -> _Columns:
    image, caption = _choose(path, _header(path)[1])
    table, malformed = read_csv(path, [image, caption])
    images, captions = (one_array(table.column(c), pa.large_binary()) for c in (image, caption))
    return _Columns(images, captions, caption == "captions", malformed=malformed)


def read_csv(path: Path, columns: list[str]) -> tuple[pa.Table, list[str]]:
    """Some columns, and why some lines are no rows.

    Cells stay bytes, so that one caption that is not UTF-8 costs one sample and not the table. Arrow cannot tell of a
    line that is neither: then every byte is read as a letter, and put back.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        return _parse_csv(path, path, columns)
    except pa.ArrowInvalid:
        letters = path.read_bytes().decode("latin-1")
        table, malformed = _parse_csv(path, pa.BufferReader(letters.encode()), columns)
        back = [pa.array([cell.as_py().decode().encode("latin-1") for cell in table[c]], pa.binary()) for c in columns]
        return pa.table(back, columns), malformed
    finally:
        sys.unraisablehook = hook


def _parse_csv(path: Path, source: Path | pa.BufferReader, columns: list[str]) -> tuple[pa.Table, list[str]]:
    malformed: list[str] = []

    def note(row: pyarrow.csv.InvalidRow) -> str:
        malformed.append(
            f"line has {row.actual_columns} columns, expected {row.expected_columns}: {shown(row.text[:60])}"
        )
        return "skip"

    table = pyarrow.csv.read_csv(
        source,
        pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
        pyarrow.csv.ParseOptions(delimiter=_header(path)[0], newlines_in_values=True, invalid_row_handler=note),
        pyarrow.csv.ConvertOptions(
            include_columns=columns,
            column_types={column: pa.binary() for column in columns},
            strings_can_be_null=False,
        ),
    )
    return table, malformed


def _header(path: Path) -> tuple[str, list[str]]:
    """Delimiter and column names. open_clip's .csv are tab-separated by default, so the first line decides."""
    with path.open("rb") as file:
        line = _decode_header(path, file.readline(1 << 20)).strip("\r\n")
    delimiter = "\t" if "\t" in line and ("," not in line or path.suffix.lower() == ".tsv") else ","
    return delimiter, [name.strip('"') for name in line.split(delimiter)]


def _decode_header(path: Path, raw: bytes) -> str:
    """Errors: ValueError when the table's first line is not UTF-8."""
    try:
        return decode_text(raw)
    except BadSample:
        raise ValueError(
            f"{path}: the first line is not UTF-8. Expected column names such as `image,caption`."
        ) from None


def _read_parquet(path: Path, fingerprint: str) -> _Columns:
    image, caption = _choose(path, column_names(path))
    check_expanded(path, [caption])
    column = pa.parquet.read_table(path, columns=[caption]).column(caption)
    listed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    captions = one_array(column, pa.large_list(pa.large_string()) if listed else pa.large_binary())
    if is_embedded(path, image) and len(captions):
        embedded = Embedded(path, image, fingerprint)
        check_rows(path, len(captions), embedded.rows)
        digests = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), len(captions), [None, pa.py_buffer(embedded.digests())]
        )
        return _Columns(digests, captions, caption == "captions", embedded)
    check_expanded(path, [image])
    images = one_array(pa.parquet.read_table(path, columns=[image]).column(image), pa.large_binary())
    check_rows(path, len(captions), len(images))
    return _Columns(images, captions, caption == "captions")


def read_file(table: Path, name: bytes) -> bytes:
    """An image named relative to its table. Raises BadSample."""
    if not name:
        raise BadSample("no image is named")
    try:
        return read_whole(table.parent / os.fsdecode(name), "the image", MAX_IMAGE)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        raise BadSample(f"image cannot be read: {shown(os.fsdecode(name)[:200])} ({reason})") from None
