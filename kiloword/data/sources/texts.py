"""Texts without images: a csv, tsv or parquet whose table has no image column, or a .txt with a text in every line."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from kiloword.data.sources.columns import CAPTION_COLUMNS, IMAGE_COLUMNS, check_once, read_csv
from kiloword.data.sources.embedded import arrow_errors, check_expanded
from kiloword.data.sources.query import FORM, TableOptions, parse_query, split_query
from kiloword.data.sources.sample import check_regular, clean, decode_text, texts_in
from kiloword.data.sources.tables import column_names, fingerprint
from kiloword.types import BadSample, Record

TABLES = (".csv", ".tsv", ".parquet")


class TextsSource:
    """Texts of one file, a row a line of it; no row has an image."""

    def __init__(self, name: str, path: Path, columns: tuple[str, ...]) -> None:
        self.name, self.fingerprint = name, fingerprint(path)
        self._is_table = path.suffix.lower() != ".txt"
        self._cells = _columns(path, columns) if self._is_table else _lines(path)

    def __len__(self) -> int:
        return len(self._cells)

    def key(self, row: int) -> str:
        """The number of the row."""
        return str(row)

    def captions(self, row: int) -> list[str]:
        """The texts of a row. Raises BadSample."""
        texts = [decode_text(cell) if isinstance(cell, bytes) else cell for cell in self._cells[row]]
        texts = [text for cell in texts for text in texts_in(cell)] if self._is_table else texts
        if not (usable := clean(texts)):
            raise BadSample("no text")
        return usable

    def record(self, row: int) -> Record:
        """Raises BadSample: there is no image."""
        raise BadSample("a text without an image")


def open_texts(src: str) -> TextsSource | None:
    """The texts that `src` names as `open_source` takes it; None for data that has images, or where nothing is.

    Errors: ValueError for a table that cannot be read, has no rows or no column of captions.
    """
    name, query = split_query(src)
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    if not path.is_file() or suffix not in (*TABLES, ".txt"):
        return None
    check_regular(path)
    columns: tuple[str, ...] = ()
    if suffix == ".txt":
        if query:
            raise ValueError(f"{name} takes no parameters: it has a text in every line.")
    else:
        options, names = parse_query(name, query, TableOptions), column_names(path)
        if options.image or options.question or options.answer or set(IMAGE_COLUMNS) & set(names):
            return None
        columns = options.caption or tuple(column for column in CAPTION_COLUMNS if column in names)[:1]
        missing = next((column for column in columns if column not in names), None)
        if missing is not None or not columns or options.split or options.images:
            return None  # whose message names the columns
        check_once(path, names, *columns)
    source = TextsSource(src, path, columns)
    if not len(source):
        raise ValueError(f"{name} has no rows. Expected a text in each, as in {FORM} without image.")
    return source


def _lines(path: Path) -> list[list[str | bytes]]:
    return [[line] for line in path.read_bytes().splitlines() if line.strip()]


def _columns(path: Path, columns: tuple[str, ...]) -> list[list[str | bytes]]:
    """Cells of each row: bytes of a csv, texts of a parquet; of a column of lists all its texts."""
    with arrow_errors(path):
        if path.suffix.lower() != ".parquet":
            table = read_csv(path, list(columns))[0]
        else:
            check_expanded(path, list(columns))
            table = pa.parquet.read_table(path, columns=list(columns))
        for column in columns:
            _check_text(path, column, table.schema.field(column).type)
        cells = [column.to_pylist() for column in table.select(list(columns)).columns]
    flat = [[one if isinstance(one, list) else [one] for one in row] for row in zip(*cells, strict=True)]
    return [[text for several in row for text in several if text is not None] for row in flat]


def _check_text(path: Path, column: str, kind: pa.DataType) -> None:
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    inner = inner.value_type if pa.types.is_dictionary(inner) else inner
    if not any(check(inner) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)):
        raise ValueError(f"{path}: the column {column!r} holds {str(kind)[:60]}. Expected text, or lists of text.")
