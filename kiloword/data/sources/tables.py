"""csv, tsv and parquet tables of captions, or of questions and their answers.

Columns: `image` (path relative to the table; in parquet also the bytes, or a struct with `bytes`) or open_clip's
`filepath`; and `caption`, `captions` (a list; in csv a JSON list, or one caption per line) or open_clip's `title`. Or
`question`, with `answers` (as `captions`, or as VQAv2's objects with `answer`) or `answer`, and optional types.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from kiloword.data.sources.embedded import Embedded, arrow_errors, check_expanded, check_rows, is_embedded
from kiloword.data.sources.sample import (
    ANSWERS,
    MAX_IMAGE,
    QUESTION,
    clean,
    decode_text,
    parse_answers,
    question_in,
    read_whole,
)
from kiloword.terminal import shown
from kiloword.types import BadSample, NoCaption, Record

IMAGE_COLUMNS = ("image", "filepath")
CAPTION_COLUMNS = ("captions", "caption", "title")
ANSWER_COLUMNS = (ANSWERS, "answer")
TYPE_COLUMNS = ("question_type", "answer_type")
_BLOCK = 1 << 26  # bytes that the csv reader parses at once; no row may be longer


def fingerprint(path: Path) -> str:
    """A digest of a file's bytes, 32 hexadecimal digits. Errors: OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class TableSource:
    """The samples of one csv, tsv or parquet file; malformed lines come last, as bad samples.

    Of captions: one sample per image, in order of first appearance; of questions: one sample per row.
    The fingerprint covers the bytes of the table; `stored` returns those of images that it names by path.
    Errors: ValueError for missing columns, no rows, an unreadable table.
    """

    natural = True
    from_files = True

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.fingerprint = fingerprint(path)
        self._malformed: list[str] = []  # reasons
        self._embedded: Embedded | None = None  # the images, where the table contains them
        image, columns = _choose(path, _column_names(path))
        self._asks = columns[0] == QUESTION
        with arrow_errors(path):
            images = self._read(image, columns)
        self._images = None if self._embedded else images
        groups = (
            np.arange(len(images))
            if self._asks
            else images.dictionary_encode(null_encoding="encode").indices.to_numpy(False)
        )
        # rows by image [N], images by first appearance, and where the rows of each start [G + 1]
        self._order = np.argsort(groups, kind="stable").astype(np.int64)
        starts = np.flatnonzero(np.diff(groups[self._order], prepend=-1)).astype(np.int64)
        self._starts = np.append(starts, len(groups))
        if not len(self):
            raise ValueError(
                f"{path} has no rows. Expected an image and a caption, or a question and its answers, in each row."
            )

    def _read(self, image: str, columns: list[str]) -> pa.Array:
        """Read the texts. Returns: [N] paths of images, or digests of embedded images."""
        if self.path.suffix.lower() != ".parquet":
            table, self._malformed = _read_csv(self.path, [image, *columns])
            images = one_array(table.column(image), pa.large_binary())
        else:
            check_expanded(self.path, columns)
            table = pa.parquet.read_table(self.path, columns=columns)
            embedded = is_embedded(self.path, image)
            if embedded and len(table):
                self._embedded = Embedded(self.path, image, self.fingerprint)
                digests = pa.py_buffer(self._embedded.digests())
                images = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), self._embedded.rows, [None, digests])
            elif embedded:  # no rows, whose structs have no cast to paths
                images = pa.array([], pa.large_binary())
            else:
                check_expanded(self.path, [image])
                images = one_array(pa.parquet.read_table(self.path, columns=[image]).column(image), pa.large_binary())
            check_rows(self.path, len(table), len(images))
        combine = pa.ChunkedArray.combine_chunks if self._asks else _caption_array
        self._cells = {column: combine(table.column(column)) for column in columns}
        return images

    def __len__(self) -> int:
        return len(self._starts) - 1 + len(self._malformed)

    def key(self, row: int) -> str:
        """The image's path without suffix, or the number of its first row where the table contains the images.

        Of questions, which may share an image, the path is followed by the row's number.
        """
        samples = len(self._starts) - 1
        if row >= samples:
            return f"malformed {row - samples}"
        if self._embedded:
            return str(self._first(row))
        stem = os.path.splitext(os.fsdecode(self._path(row)))[0]
        return f"{stem}#{row}" if self._asks else stem

    def captions(self, row: int) -> list[str]:
        """Captions or answers, without reading the image. Raises BadSample."""
        return self._texts(row)[0]

    def question(self, row: int) -> str | None:
        """The question, without reading the image; None in a table of captions. Raises BadSample."""
        return question_in(self._texts(row)[1])

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        captions, info = self._texts(row)
        image = self._embedded.read(self._first(row)) if self._embedded else self._read_image(row)
        if not image:
            raise BadSample("the image has zero bytes")
        record = Record(self.key(row), image, captions, info=info)
        if not captions:
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
        """An image named relative to the table. Raises BadSample."""
        name = os.fsdecode(self._path(row))
        if not name:
            raise BadSample("no image is named")
        try:
            return read_whole(self.path.parent / name, "the image", MAX_IMAGE)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            reason = error.strerror if isinstance(error, OSError) else "not a file name"
            raise BadSample(f"image cannot be read: {shown(name[:200])} ({reason})") from None

    def _texts(self, row: int) -> tuple[list[str], dict[str, Any]]:
        """Captions or answers, and the information of the record. Raises BadSample."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        if row >= len(self._starts) - 1:
            raise BadSample(self._malformed[row - len(self._starts) + 1])
        rows = self._order[self._starts[row] : self._starts[row + 1]].tolist()
        cells = [{column: self._cell(column, n) for column in self._cells} for n in rows]
        if not self._asks:
            texts = [cell if isinstance(cell, list) else [cell or ""] for one in cells for cell in one.values()]
            return clean([text for several in texts for text in several if text is not None]), {}
        info = cells[0] | {QUESTION: cells[0][QUESTION] or ""}  # an empty cell is bad, not a row without a question
        answers: Any = parse_answers(info)
        return clean(answers), {name: value for name, value in info.items() if value}

    def _cell(self, column: str, row: int) -> Any:
        """Text, or a list. Raises BadSample."""
        try:
            cell = self._cells[column][row].as_py()
        except UnicodeDecodeError:
            raise BadSample("caption is not UTF-8") from None
        text = decode_text(cell) if isinstance(cell, bytes) else cell
        return _listed(text, column == ANSWERS) if isinstance(text, str) and column in (ANSWERS, "captions") else text


def _listed(text: str, objects: bool) -> list[Any]:
    """Parse a JSON list of strings (or also of objects), or one text per line."""
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, list) and (objects or all(isinstance(value, str) for value in values)):
            return values
    return [line for line in text.split("\n") if line.strip()]


def _choose(path: Path, names: list[str]) -> tuple[str, list[str]]:
    """The column of images; and that of captions, or those of questions, answers and types."""
    image, caption, answers = (
        next((column for column in columns if column in names), None)
        for columns in (IMAGE_COLUMNS, CAPTION_COLUMNS, ANSWER_COLUMNS)
    )
    if QUESTION in names and answers:
        texts = [QUESTION, answers, *(column for column in TYPE_COLUMNS if column in names)]
    else:
        texts = [caption] if caption else []
    if image is None or not texts:
        raise ValueError(
            f"{path} has the columns {shown(', '.join(names)[:200]) or 'none'}. Expected `image` (or `filepath`) and "
            "`caption`, `captions` (or `title`) in its first line; or `image`, `question` and `answers` (or `answer`)."
        )
    check_once(path, names, image, *texts)
    return image, texts


def check_once(path: Path, names: list[str], *columns: str) -> None:
    """Errors: ValueError when a table has two columns of one name."""
    for column in columns:
        if names.count(column) > 1:
            raise ValueError(f"{path} has {names.count(column)} columns named {column}. Expected one.")


def _column_names(path: Path) -> list[str]:
    """Errors: ValueError when the table cannot be read."""
    if path.suffix.lower() != ".parquet":
        return _header(path)[1]
    with arrow_errors(path):
        return list(pa.parquet.read_schema(path).names)


def one_array(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """A column as one array of a type."""
    return pa.chunked_array(column.cast(kind), kind).combine_chunks()


def _caption_array(column: pa.ChunkedArray) -> pa.Array:
    listed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return one_array(column, pa.large_list(pa.large_string()) if listed else pa.large_binary())


def _read_csv(path: Path, columns: list[str]) -> tuple[pa.Table, list[str]]:
    """Some columns, and the reasons of malformed lines.

    Cells stay bytes, so that a caption that is not UTF-8 is one bad sample. Where a malformed line is not UTF-8, Arrow
    fails to report it: then the file is decoded as Latin-1, and cells are encoded back to their bytes.
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
            include_columns=columns, column_types={column: pa.binary() for column in columns}, strings_can_be_null=False
        ),
    )
    return table, malformed


def _header(path: Path) -> tuple[str, list[str]]:
    """Delimiter and column names. open_clip writes .csv separated by tabs, so the first line decides.

    Errors: ValueError when the first line is not UTF-8.
    """
    with path.open("rb") as file:
        raw = file.readline(1 << 20)
    try:
        line = decode_text(raw).strip("\r\n")
    except BadSample:
        raise ValueError(
            f"{path}: the first line is not UTF-8. Expected column names such as `image,caption`."
        ) from None
    delimiter = "\t" if "\t" in line and ("," not in line or path.suffix.lower() == ".tsv") else ","
    return delimiter, [name.strip('"') for name in line.split(delimiter)]
