"""csv, tsv and parquet of questions: a row names an image, a question and its answers; rows may share an image.

Columns: `image` or `filepath` as in `tables`; `question`; `answers` (a list of strings or, as in VQAv2, of objects with
`answer`; in csv a JSON list, or one answer per line) or `answer`; optionally `question_type` and `answer_type`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from kiloword.data.sources.embedded import Embedded, arrow_errors, check_expanded, check_rows, is_embedded
from kiloword.data.sources.questions import ANSWERS, QUESTION, parse_answers
from kiloword.data.sources.sample import clean, decode_text
from kiloword.data.sources.tables import (
    IMAGE_COLUMNS,
    TableSource,
    check_once,
    column_names,
    fingerprint,
    one_array,
    read_csv,
    read_file,
)
from kiloword.types import BadSample, Record

ANSWER_COLUMNS = (ANSWERS, "answer")
MORE = ("question_type", "answer_type")


def open_table(name: str, path: Path) -> TableSource | QuestionTable:
    """Open a table of questions if it has these columns, else of captions."""
    names = column_names(path)
    has_questions = QUESTION in names and any(column in names for column in ANSWER_COLUMNS)
    return QuestionTable(name, path) if has_questions else TableSource(name, path)


class QuestionTable:
    """The samples of one table, one per row; malformed lines come last, as bad samples.

    The fingerprint covers the bytes of the table; `stored` returns those of images that it names by path.
    Errors: ValueError for a missing column, no rows, an unreadable table.
    """

    natural = True
    from_files = True
    classnames: list[str] | None = None
    templates: list[str] | None = None

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.fingerprint = fingerprint(path)
        names = column_names(path)
        image = next((c for c in IMAGE_COLUMNS if c in names), None)
        if image is None:
            raise ValueError(f"{path} has questions but no images: expected a column `image` (or `filepath`).")
        self._answers = next(c for c in ANSWER_COLUMNS if c in names)
        columns = [QUESTION, self._answers, *(c for c in MORE if c in names)]
        check_once(path, names, image, *columns)
        with arrow_errors(path):
            self._read(image, columns)
        if not len(self):
            raise ValueError(f"{path} has no rows. Expected an image, a question and its answers in each row.")

    def _read(self, image: str, columns: list[str]) -> None:
        self._malformed: list[str] = []
        self._embedded: Embedded | None = None
        if self.path.suffix.lower() != ".parquet":
            table, self._malformed = read_csv(self.path, [image, *columns])
        elif is_embedded(self.path, image):
            check_expanded(self.path, columns)
            table = pa.parquet.read_table(self.path, columns=columns)
            self._embedded = Embedded(self.path, image, self.fingerprint) if len(table) else None
        else:
            check_expanded(self.path, [image, *columns])
            table = pa.parquet.read_table(self.path, columns=[image, *columns])
        self._rows = len(table)
        if self._embedded is not None:
            check_rows(self.path, self._rows, self._embedded.rows)
        self._images = one_array(table.column(image), pa.large_binary()) if image in table.column_names else None
        self._cells = {column: table.column(column).combine_chunks() for column in columns}

    def __len__(self) -> int:
        return self._rows + len(self._malformed)

    def key(self, row: int) -> str:
        """The image's path without suffix, and the row's number, as several rows may share an image."""
        if row >= self._rows:
            return f"malformed {row - self._rows}"
        return str(row) if self._images is None else f"{os.path.splitext(os.fsdecode(self._image(row)))[0]}#{row}"

    def captions(self, row: int) -> list[str]:
        """Answers without the image. Raises BadSample."""
        return clean(self._info(row)[ANSWERS])

    def question(self, row: int) -> str:
        """The question without the image. Raises BadSample."""
        text: str = self._info(row)[QUESTION]
        return text

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        info = self._info(row)
        image = self._embedded.read(row) if self._embedded else read_file(self.path, self._image(row))
        if not image:
            raise BadSample("the image has zero bytes")
        return Record(self.key(row), image, clean(info[ANSWERS]), info=info)

    def stored(self, row: int) -> list[bytes | None]:
        """The bytes of a row's image where the table names it by path. Raises BadSample."""
        named = self._images is not None and row < self._rows
        return [read_file(self.path, self._image(row))] if named else []

    def paths(self) -> pa.Array | None:
        """Paths of the images; None where the table contains the images."""
        return self._images

    def _image(self, row: int) -> bytes:
        assert self._images is not None
        return self._images[row].as_py() or b""

    def _info(self, row: int) -> dict[str, Any]:
        """Question, answers and types. Raises BadSample."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        if row >= self._rows:
            raise BadSample(self._malformed[row - self._rows])
        info = {column: self._cell(column, row) for column in self._cells if column != self._answers}
        cell = self._cell(self._answers, row)
        info[ANSWERS] = _listed(cell) if isinstance(cell, str) and self._answers == ANSWERS else cell
        info[QUESTION] = info[QUESTION] or ""  # an empty cell is bad, not a row without a question
        parse_answers(info)
        return {name: value for name, value in info.items() if value}

    def _cell(self, column: str, row: int) -> Any:
        try:
            cell = self._cells[column][row].as_py()
        except UnicodeDecodeError:
            raise BadSample(f"{column} is not UTF-8") from None
        return decode_text(cell) if isinstance(cell, bytes) else cell


def _listed(text: str) -> list[Any]:
    """Parse a JSON list, or one answer per line."""
    if text.lstrip().startswith("["):
        try:
            answers = json.loads(text)
        except (ValueError, RecursionError):
            answers = None
        if isinstance(answers, list):
            return answers
    return [line for line in text.split("\n") if line.strip()]
