"""Reading of csv and tsv: separated by commas, tabs or "|"; a quoted cell may hold line breaks."""

from __future__ import annotations

import csv
import io
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.csv

from kiloword.data.sources.sample import IMAGE_SUFFIXES, decode_text
from kiloword.terminal import shown
from kiloword.types import BadSample

_BLOCK = 1 << 26  # bytes that the csv reader parses at once; no row may be longer


def read_csv(path: Path, columns: list[str]) -> tuple[pa.Table, list[tuple[str, str]]]:
    """Some columns, of which the first one names images; names and reasons of malformed lines.

    Cells stay bytes, so that a caption that is not UTF-8 is one bad sample. Where a malformed line is not UTF-8, Arrow
    fails to report it: then the file is decoded as Latin-1, and cells are encoded back to their bytes.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        table, malformed = _parse_csv(path, path, columns)
        with path.open("rb") as file:
            lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 24), b""))
        if lines > 1 + len(table) + len(malformed):  # cells hold line breaks, or lines are empty
            table, malformed = _parse_csv(path, pa.BufferReader(_with_closed_quotes(path, columns[0])), columns)
    except pa.ArrowInvalid:
        letters = path.read_bytes().decode("latin-1")
        table, malformed = _parse_csv(path, pa.BufferReader(letters.encode()), columns)
        back = [pa.array([cell.as_py().decode().encode("latin-1") for cell in table[c]], pa.binary()) for c in columns]
        table = pa.table(back, columns)
    finally:
        sys.unraisablehook = hook
    return table, [(f"line {shown(line[:60])}", reason) for text, reason in malformed for line in text.splitlines()]


def _with_closed_quotes(path: Path, image: str) -> bytes:
    """The bytes of a table in which each quote that swallows rows is closed at the end of its line.

    Swallowed lines have all columns, and name an image in its column.
    """
    delimiter, names = header(path)
    lines, place = path.read_bytes().split(b"\n"), names.index(image)
    kinds = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)

    def cells_of(line: bytes, quoting: Literal[0, 3] = csv.QUOTE_MINIMAL) -> list[str]:
        cells: list[str] = []
        with suppress(csv.Error):  # a cell of more than 131,072 bytes
            cells = next(csv.reader([line.decode("latin-1").rstrip("\r")], delimiter=delimiter, quoting=quoting), [])
        return cells if len(cells) == len(names) else []

    def is_row(line: bytes) -> bool:
        cells = cells_of(line)
        return bool(cells) and cells[place].lower().endswith(kinds)

    odd = deque(n for n, line in enumerate(lines) if line.count(b'"') % 2)
    while odd:
        first, end = odd.popleft(), odd[0] if odd else len(lines) - 1
        swallows = all(is_row(line) for line in lines[first + 1 : end + 1] if line.strip())
        if not swallows and odd:
            odd.popleft()  # closes the quoted cell
        if swallows and (cells := cells_of(lines[first]) or cells_of(lines[first], csv.QUOTE_NONE)):
            closed = io.StringIO()
            csv.writer(closed, delimiter=delimiter, lineterminator="").writerow(cells)
            lines[first] = closed.getvalue().encode("latin-1")
    return b"\n".join(lines)


def _parse_csv(
    path: Path, source: Path | pa.BufferReader, columns: list[str]
) -> tuple[pa.Table, list[tuple[str, str]]]:
    malformed: list[tuple[str, str]] = []  # texts and reasons

    def note(row: pyarrow.csv.InvalidRow) -> str:
        reason = f"line has {row.actual_columns} columns, expected {row.expected_columns}"
        malformed.append((row.text, reason))
        return "skip"

    delimiter, names = header(path)
    named = {"column_names": names, "skip_rows": 1} if delimiter == "|" else {}  # without their spaces
    table = pyarrow.csv.read_csv(
        source,
        pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK, **named),
        pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=note),
        pyarrow.csv.ConvertOptions(
            include_columns=columns, column_types={column: pa.binary() for column in columns}, strings_can_be_null=False
        ),
    )
    return table, malformed


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
