"""Which columns of a table are read, by their usual names or by the parameters of the source; reading of csv."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from kiloword.data.sources.query import FORM, TableOptions
from kiloword.data.sources.sample import ANSWERS, QUESTION, decode_text
from kiloword.errors import suggestion
from kiloword.terminal import shown
from kiloword.types import BadSample

IMAGE_COLUMNS = ("image", "filepath", "img", "file_name")
LABEL_COLUMNS = ("label", "class", "cls", "fine_label")
CAPTION_COLUMNS = ("captions", "caption", "title")
ANSWER_COLUMNS = (ANSWERS, "answer")
INFO_COLUMNS = ("question_type", "answer_type", "image_id", "question_id", "domain")
SPLIT = "split"
_BLOCK = 1 << 26  # bytes that the csv reader parses at once; no row may be longer


@dataclass(frozen=True)
class TableColumns:
    """Names of the columns that are read."""

    image: str
    texts: dict[str, str]  # column by key: of questions their key in `Record.info`, of captions the column itself
    info: tuple[str, ...] = ()  # columns of other values of `Record.info`
    label: str = ""  # column of labels; "": none

    @property
    def names(self) -> list[str]:
        """The columns of texts and of other values."""
        return list(dict.fromkeys([*self.texts.values(), *self.info, *filter(None, [self.label])]))


def choose(path: Path, names: Sequence[str], options: TableOptions) -> TableColumns:
    """The columns that are read. Errors: ValueError for a missing column, and one that the table has twice."""
    named = [options.image, *options.caption, options.question, options.answer, options.label, *options.info]
    for column in filter(None, [*named, SPLIT if options.split else ""]):
        if column not in names:
            raise ValueError(
                f"{path} has no column {shown(column[:60])!r}; it has {_listed(names)}."
                f"{suggestion(column, names)} Columns are named by {FORM}."
            )
    image, question = options.image or _first(IMAGE_COLUMNS, names), options.question or _first((QUESTION,), names)
    answers, caption = options.answer or _first(ANSWER_COLUMNS, names), _first(CAPTION_COLUMNS, names)
    if (options.caption and (options.question or options.answer)) or (options.answer and not question):
        raise ValueError(
            f"{path}: questions need question=COLUMN, and answer=COLUMN where they have answers, without caption=. It "
            f"has the columns {_listed(names)}."
        )
    info = tuple(dict.fromkeys([*options.info, *(c for c in INFO_COLUMNS if names.count(c) == 1)]))
    if question and (answers or options.question) and not options.caption:
        key = ANSWERS if options.answer else answers
        texts = {QUESTION: question, **({key: answers} if answers else {})}
        columns = TableColumns(image, texts, info)
    else:
        captions = options.caption or ((caption,) if caption else ())
        columns = TableColumns(image, {c: c for c in captions}, info)
    columns = replace(columns, label=options.label or ("" if columns.texts else _first(LABEL_COLUMNS, names)))
    if not image or not (columns.texts or columns.label):
        raise ValueError(
            f"{path} has the columns {_listed(names)}. Expected `image` (or `filepath`) and `caption`, `captions` (or "
            "`title`) in its first line; or `image`, `question` and `answers` (or `answer`); or `image` and `label`. "
            f"Other columns are named by {FORM}."
        )
    check_once(path, names, image, *columns.names)
    return columns


def check_once(path: Path, names: Sequence[str], *columns: str) -> None:
    """Errors: ValueError when a table has two columns of one name."""
    for column in columns:
        if names.count(column) > 1:
            raise ValueError(f"{path} has {names.count(column)} columns named {column}. Expected one.")


def _first(columns: Sequence[str], names: Sequence[str]) -> str:
    """The first of the columns that the table has; "" if it has none."""
    return next((column for column in columns if column in names), "")


def _listed(names: Sequence[str]) -> str:
    return shown(", ".join(names)[:200]) or "none"


def read_csv(path: Path, columns: list[str]) -> tuple[pa.Table, list[tuple[str, str]]]:
    """Some columns, of which the first one names images; names and reasons of malformed lines.

    Rows inside a quoted cell, whose quote is not closed, are malformed lines. Cells stay bytes, so that a caption that
    is not UTF-8 is one bad sample. Where a malformed line is not UTF-8, Arrow fails to report it: then the file is
    decoded as Latin-1, and cells are encoded back to their bytes.
    """
    delimiter, names = header(path)
    named = {"column_names": names, "skip_rows": 1} if delimiter == "|" else {}  # without their spaces
    bad: list[tuple[str, str]] = []  # texts of malformed lines, and reasons

    def note(row: pyarrow.csv.InvalidRow) -> str:
        bad.append((row.text, f"line without {row.expected_columns} columns"))
        return "skip"

    def parsed(source: Path | pa.BufferReader, columns: list[str]) -> pa.Table:
        bad.clear()
        binary = {column: pa.binary() for column in columns}
        return pyarrow.csv.read_csv(
            source,
            pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK, **named),
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=note),
            pyarrow.csv.ConvertOptions(include_columns=columns, column_types=binary, strings_can_be_null=False),
        )

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    swallowed: list[bytes] = []
    try:
        table = parsed(path, columns)
        if path.read_bytes().count(b"\n") > 1 + len(table) + len(bad):  # line breaks in cells, or empty lines
            swallowed = list(_swallowed(parsed(path, names), delimiter.encode(), names.index(columns[0])))
    except pa.ArrowInvalid:
        table = parsed(pa.BufferReader(path.read_bytes().decode("latin-1").encode()), columns)
        back = [pa.array([cell.as_py().decode().encode("latin-1") for cell in table[c]], pa.binary()) for c in columns]
        table = pa.table(back, columns)
    finally:
        sys.unraisablehook = hook
    malformed = [(line, reason) for text, reason in bad for line in text.splitlines()]
    malformed += [
        (os.fsdecode(line), "the line is inside a quoted cell that begins in an earlier one") for line in swallowed
    ]
    return table, [(f"line {shown(line[:60])}", reason) for line, reason in malformed]


def _swallowed(table: pa.Table, mark: bytes, image: int) -> Iterator[bytes]:
    """Lines inside cells that look like rows: as many cells, and in the column `image` a name like others."""
    names = (name.as_py().partition(b"\n")[0] for name in table.column(image))
    suffixes = {os.path.splitext(name)[1] for name in names}
    for column in table.columns:
        for cell in column.filter(pyarrow.compute.match_substring(column, "\n")):
            for line in cell.as_py().split(b"\n")[1:]:
                cells = line.split(mark)
                suffix = os.path.splitext(cells[image])[1] if len(cells) == table.num_columns else b""
                if suffix and suffix in suffixes:
                    yield line


def header(path: Path) -> tuple[str, list[str]]:
    """Delimiter and column names. open_clip writes .csv separated by tabs, and Flickr30k has one separated by "| ", so
    the first line decides.

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
    delimiter = "|" if "|" in line and not {",", "\t"} & set(line) else delimiter
    return delimiter, [name.strip(' "' if delimiter == "|" else '"') for name in line.split(delimiter)]
