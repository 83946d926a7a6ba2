"""csv, tsv and parquet tables of captions, of questions and their answers, or of class labels.

Columns: `image` (path relative to the table; in parquet also the bytes, or a struct with `bytes`) or open_clip's
`filepath`; and `caption`, `captions` or open_clip's `title`. Or `question`, with `answers` or `answer`, and optional
types. Or `label` (`class`, `cls`, `fine_label`), a class index, a class name or a list of them; their names are those
of a `ClassLabel` (Hugging Face) or of classnames.txt. Other columns are named by parameters (`query.TableOptions`).

Any of these cells is a text, or a list: of parquet, or as JSON or Python write it. `captions` and `answers` may have a
text per line, and answers may be VQAv2's objects. A quote that is not closed where rows follow ends with its line.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray

from kiloword.data.sources.columns import IMAGE_COLUMNS, SPLIT, choose, header, read_csv
from kiloword.data.sources.embedded import Embedded, arrow_errors, check_expanded, check_rows, is_embedded
from kiloword.data.sources.labels import LabelColumn, class_data, class_label_names
from kiloword.data.sources.layouts.read import AnnotationTable
from kiloword.data.sources.query import TableOptions, hold_images, image_file, images_folder, no_images
from kiloword.data.sources.sample import (
    ANSWERS,
    MAX_IMAGE,
    QUESTION,
    clean,
    decode_text,
    parse_answers,
    question_in,
    read_whole,
    texts_in,
)
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record

DEFAULTS = TableOptions()


def fingerprint(path: Path) -> str:
    """A digest of a file's bytes, 32 hexadecimal digits. Errors: OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class NoRows(ValueError):
    """A table has no rows."""


class TableSource:
    """The samples of one csv, tsv or parquet file, or of a `layout`; malformed lines come last, as bad samples.

    Of captions: one sample per image, in order of first appearance; of questions or labels alone: one per row.
    `classnames`, `templates`: of a table with labels, else None.
    The fingerprint covers the bytes of the table; `stored` returns those of images that it names by path.
    Errors: ValueError for missing columns, an unreadable table; NoRows.
    """

    natural = True

    def __init__(
        self, name: str, path: Path, options: TableOptions = DEFAULTS, layout: AnnotationTable | None = None
    ) -> None:
        self.name, self.path = name, path
        if not path.stat().st_size:
            raise NoRows(f"{path} is empty.")
        self._folder = layout.folder if layout else images_folder(path, options.images)
        self._contents = fingerprint(path)
        if layout is not None and layout.beside is not None:
            self._contents = _digest(self._contents, fingerprint(layout.beside))
        options = layout.options if layout else options
        self.fingerprint = _with_options(self._contents, options)
        self.notes = layout.notes if layout else []
        self._malformed = layout.malformed if layout else []  # names and reasons
        self._embedded: Embedded | None = None  # the images, where the table contains them
        self._prefix = ""  # of keys that are numbers of rows
        self._columns = choose(path, layout.table.column_names if layout else column_names(path), options)
        self._asks = QUESTION in self._columns.texts
        self.classnames, self.templates = class_data(path.parent) if self._columns.label else (None, None)
        self._labels: LabelColumn | None = None
        with arrow_errors(path):
            images, splits = self._read(options, layout.table if layout else None)
        self._images = None if self._embedded else images
        by_row = self._asks or not self._columns.texts
        self._order, self._starts = _rows_by_image(images, by_row, splits, options.split)
        if not len(self):
            rows = f"rows whose {SPLIT} is {shown(options.split[:60])!r}" if options.split else "rows"
            raise NoRows(
                f"{path} has no {rows}. Expected an image and a caption, or a question and its answers, in each row."
                f"{_splits(splits)}"
            )
        named = self._images if options.images and layout is None and self._images is not None else []
        names = (os.fsdecode(name.as_py() or b"") for name in named)
        if len(named) and not hold_images(self._folder, names):
            raise no_images(path, os.fsdecode(named[0].as_py() or b""), str(self._folder))

    def _read(self, options: TableOptions, table: pa.Table | None) -> tuple[pa.Array, pa.Array | None]:
        """Read the texts. Returns: [N] paths of images, or digests of embedded images; [N] splits, if one is chosen."""
        image, columns = self._columns.image, [*self._columns.names, *([SPLIT] if options.split else [])]
        if table is not None:
            images = _paths(table.column(image))
        elif self.path.suffix.lower() != ".parquet":
            table, self._malformed = read_csv(self.path, [image, *columns])
            images = one_array(table.column(image), pa.large_binary())
        else:
            check_expanded(self.path, columns)
            table = pa.parquet.read_table(self.path, columns=columns)
            images = self._parquet_images(image, len(table))
            check_rows(self.path, len(table), len(images))
        combine = pa.ChunkedArray.combine_chunks if self._asks else _caption_array
        self._cells = {key: combine(table.column(column)) for key, column in self._columns.texts.items()}
        self._info = {column: table.column(column).combine_chunks() for column in self._columns.info}
        if self._columns.label:
            self._read_labels(table.column(self._columns.label))
        return images, one_array(table.column(SPLIT), pa.large_binary()) if options.split else None

    def _read_labels(self, column: pa.ChunkedArray) -> None:
        of_table = class_label_names(self.path, self._columns.label) if self.path.suffix.lower() == ".parquet" else None
        self._labels = LabelColumn(self.name, column, of_table or self.classnames)
        self.classnames = self._labels.classnames

    def _parquet_images(self, column: str, rows: int) -> pa.Array:
        embedded = is_embedded(self.path, column)
        if embedded and rows:
            default = column in IMAGE_COLUMNS  # copies of these that exist stay valid
            name = self._contents if default else _digest(self._contents, column)
            self._embedded = Embedded(self.path, column, name)
            return self._embedded.digests()
        if embedded:  # no rows, whose structs have no cast to paths
            return pa.array([], pa.large_binary())
        check_expanded(self.path, [column])
        return _paths(pa.parquet.read_table(self.path, columns=[column]).column(column))

    def __len__(self) -> int:
        return len(self._starts) - 1 + len(self._malformed)

    def key(self, row: int) -> str:
        """The image's path without suffix, or the number of its first row where the table contains the images.

        Of questions, which may share an image, the path is followed by the row's number.
        """
        samples = len(self._starts) - 1
        if row >= samples:
            return self._malformed[row - samples][0]
        if self._embedded:
            return f"{self._prefix}{self._first(row)}"
        path = os.fsdecode(self._path(row))
        stem = os.path.splitext(path)[0] if path else f"row {self._first(row)}"
        return f"{stem}#{row}" if self._asks else stem

    def number_below(self, prefix: str) -> None:
        """Let keys that are numbers of rows begin with `prefix`, where several tables are one source."""
        if self._embedded:
            self._prefix, self.fingerprint = prefix, _digest(self.fingerprint, prefix)

    def captions(self, row: int) -> list[str]:
        """Captions or answers, without reading the image. Raises BadSample."""
        return self._texts(row)[0]

    def question(self, row: int) -> str | None:
        """The question, without reading the image; None in a table of captions. Raises BadSample."""
        return question_in(self._texts(row)[1])

    def info(self, row: int) -> dict[str, Any]:
        """Other values of the row, without reading the image. Raises BadSample."""
        return self._texts(row)[1]

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        captions, info = self._texts(row)
        image = self._embedded.read(self._first(row)) if self._embedded else self._read_image(row)
        if not image:
            raise BadSample("the image has zero bytes")
        label = self._labels.of(self._first(row)) if self._labels else None
        record = Record(self.key(row), image, captions, label, info)
        if not captions and self._labels is None:
            raise NoCaption(record)
        return record

    def stored(self, row: int) -> list[bytes | None]:
        """The bytes of a row's image where the table names it by path. Raises BadSample."""
        return [] if self._embedded or row >= len(self._starts) - 1 else [self._read_image(row)]

    def paths(self) -> pa.Array | None:
        """Paths of the images; None where the table contains the images."""
        return self._images

    def _first(self, row: int) -> int:
        return int(self._order[self._starts[row]])

    def _path(self, row: int) -> bytes:
        assert self._images is not None
        return self._images[self._first(row)].as_py() or b""

    def _read_image(self, row: int) -> bytes:
        """An image named relative to the folder of images. Raises BadSample."""
        name = os.fsdecode(self._path(row))
        if not name:
            raise BadSample("no image is named")
        try:
            return read_whole(image_file(self._folder / name), "the image", MAX_IMAGE)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            reason = error.strerror if isinstance(error, OSError) else "not a file name"
            raise BadSample(f"image cannot be read ({reason})") from None

    def _texts(self, row: int) -> tuple[list[str], dict[str, Any]]:
        """Captions or answers, and the information of the record. Raises BadSample."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        if row >= len(self._starts) - 1:
            raise BadSample(self._malformed[row - len(self._starts) + 1][1])
        rows = self._order[self._starts[row] : self._starts[row + 1]].tolist()
        cells = [{column: self._cell(column, n) for column in self._cells} for n in rows]
        info = {column: _value(values, rows[0]) for column, values in self._info.items()}
        info = {column: value for column, value in info.items() if value not in (None, "")}
        if not self._asks:
            texts = [cell if isinstance(cell, list) else [cell or ""] for one in cells for cell in one.values()]
            return clean([text for several in texts for text in several if text is not None]), info
        info |= cells[0] | {QUESTION: cells[0][QUESTION] or ""}  # an empty cell is bad, not a row without a question
        if len(cells[0]) == 1 and info[QUESTION].strip():
            return [], info  # a test question, to be answered
        answers: Any = parse_answers(info)
        return clean(answers), {name: value for name, value in info.items() if value is not None}

    def _cell(self, key: str, row: int) -> Any:
        """Text, or a list. Raises BadSample."""
        value = _value(self._cells[key], row)
        if key == QUESTION or not isinstance(value, str):
            return value
        texts = texts_in(value, objects=key == ANSWERS)
        by_line = key in ("captions", ANSWERS) and texts == [value]
        return [line for line in value.split("\n") if line.strip()] if by_line else texts


def _value(cells: pa.Array, row: int) -> Any:
    """The value of a cell, of which bytes are text. Raises BadSample."""
    try:
        value = cells[row].as_py()
    except UnicodeDecodeError:
        raise BadSample("caption is not UTF-8") from None
    if isinstance(value, list):
        return [decode_text(text) if isinstance(text, bytes) else text for text in value]
    return decode_text(value) if isinstance(value, bytes) else value


def _paths(column: pa.ChunkedArray) -> pa.Array:
    """Paths, or numbers, of images as bytes."""
    return one_array(column.cast(pa.string()) if pa.types.is_integer(column.type) else column, pa.large_binary())


def _rows_by_image(
    images: pa.Array, asks: bool, splits: pa.Array | None, split: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows by image, images by first appearance, [N]; and where the rows of each start, [G + 1].

    Args: asks: every row is on its own; split: only rows with this split.
    """
    rows = np.arange(len(images), dtype=np.int64)
    if splits is not None:
        of_split = pa.compute.fill_null(pa.compute.equal(splits, split.encode()), False)
        rows = np.flatnonzero(of_split.to_numpy(zero_copy_only=False))
        images = images.take(pa.array(rows))
    first = rows  # row where the image of each row appears first; a row without an image is a sample of its own
    if not asks:
        groups = images.dictionary_encode(null_encoding="encode").indices.to_numpy(zero_copy_only=False)
        absent = pa.compute.fill_null(pa.compute.equal(pa.compute.binary_length(images), 0), True)
        first = np.unique(groups, return_index=True)[1][groups]
        first = np.where(absent.to_numpy(zero_copy_only=False), np.arange(len(images)), first)
    order = np.argsort(first, kind="stable").astype(np.int64)
    starts = np.flatnonzero(np.diff(first[order], prepend=-1)).astype(np.int64)
    return rows[order], np.append(starts, len(rows))


def _splits(splits: pa.Array | None) -> str:
    """The splits of a table, for a message."""
    if splits is None or not len(splits):
        return ""
    names = [os.fsdecode(name or b"") for name in pa.compute.unique(splits).to_pylist()]
    return f" It has {shown(', '.join(names)[:200])}."


def _with_options(contents: str, options: TableOptions) -> str:
    """The fingerprint of a table: of its contents and of the options that select, not of where other files are."""
    chosen, defaults = ({**asdict(one), "images": "", "annotations": ""} for one in (options, DEFAULTS))
    return contents if chosen == defaults else _digest(contents, repr(chosen))


def _digest(contents: str, more: str) -> str:
    return hashlib.blake2b(f"{contents} {more}".encode(), digest_size=16).hexdigest()


def column_names(path: Path) -> list[str]:
    """Errors: ValueError when the table cannot be read."""
    if path.suffix.lower() != ".parquet":
        return header(path)[1]
    with arrow_errors(path):
        return list(pa.parquet.read_schema(path).names)


def one_array(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """A column as one array of a type."""
    return pa.chunked_array(column.cast(kind), kind).combine_chunks()


def _caption_array(column: pa.ChunkedArray) -> pa.Array:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        of_bytes = pa.types.is_large_binary(column.type.value_type)
        return one_array(column, column.type if of_bytes else pa.large_list(pa.large_string()))
    return one_array(column, pa.large_binary())
