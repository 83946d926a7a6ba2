"""Tables of users: reading csv, tsv, parquet and lists of JSON objects; cells that are texts, or labels."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from kiloword.data.classes.names import places_among, spaced, text_lines
from kiloword.data.sample import MAX_CAPTION, clean, decode_text, label_set, texts_in
from kiloword.errors import suggestion
from kiloword.terminal import shown
from kiloword.types import BadSample, LabelSet

JSON = (".json", ".jsonl")
_CSV = (".csv", ".tsv", ".txt", ".token")
_FIELDS = ("caption", "raw", "text", "answer")  # of an object that holds a text among others
_LONGEST = 1 << 30  # characters of a cell
_ROWS = 1 << 16  # rows that are Python's at once
_WHOLE = re.compile(r"-?\d{1,17}(\.0*)?", re.ASCII)  # also as pandas writes numbers beside empty cells: 3.0


@contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Turn Arrow's errors of a damaged table into a ValueError. Errors of the disk are raised unchanged."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as a table: {shown(reason[:200])}") from None


def column_names(path: Path) -> list[str]:
    """Errors: ValueError when the table cannot be read."""
    if path.suffix.lower() in _CSV:
        return _header(path)[1]
    with arrow_errors(path):
        return list(pa.parquet.read_schema(path).names)


def check_columns(path: Path, names: Sequence[str], *columns: str) -> None:
    """Errors: ValueError for a column that a table lacks, or has twice."""
    for column in columns:
        if column not in names:
            listed = shown(", ".join(names)[:200]) or "none"
            raise ValueError(
                f"{path} has no column {shown(column[:60])!r}; it has {listed}.{suggestion(column, names)}"
            )
        if names.count(column) > 1:
            raise ValueError(f"{path} has {names.count(column)} columns named {column}. Expected one.")


def read_table(path: Path, columns: Sequence[str]) -> tuple[pa.Table, list[tuple[str, str]]]:
    """Some columns of a csv, tsv or parquet, with texts as bytes; names and reasons of malformed lines."""
    wanted = list(dict.fromkeys(columns))
    if path.suffix.lower() in _CSV:
        return _read_csv(path, wanted)
    table = pa.parquet.read_table(path, columns=wanted, partitioning=None)
    text = (pa.string(), pa.large_string())
    return table.cast(pa.schema([(f.name, pa.large_binary() if f.type in text else f.type) for f in table.schema])), []


def rows_in(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table; few are in memory at once."""
    for batch in table.to_batches(_ROWS):
        yield from batch.to_pylist()


def read_columns(path: Path | str, *names: str) -> list[list[str]]:
    """Columns of a csv, tsv, parquet, json or jsonl that names rows of data by texts, as they are written.

    Errors: ValueError for a table that cannot be read, for a column that is missing, for a row without text.
    """
    path, rows = Path(path), list[dict[str, Any]]()
    if path.suffix.lower() in JSON:
        rows = load_objects(path)
    else:
        check_columns(path, column_names(path), *names)
        with arrow_errors(path):
            rows = read_table(path, names)[0].to_pylist()
    columns: list[list[str]] = []
    for name in names:
        cells: list[Any] = [row.get(name) for row in rows]
        cells = [cell.decode(errors="replace") if isinstance(cell, bytes) else cell for cell in cells]
        wrong = next((n for n, cell in enumerate(cells) if not isinstance(cell, str)), None)
        if wrong is not None:
            raise ValueError(f"{path}: row {wrong} has no {name}. Expected text in every row.")
        columns.append(cells)
    return columns


def _read_csv(path: Path, columns: list[str]) -> tuple[pa.Table, list[tuple[str, str]]]:
    """Some columns, the first of which names images; names and reasons of malformed lines.

    Rows inside a quoted cell, whose quote is not closed, are malformed lines: they have as many cells, and a name like
    others. Every byte is read as a letter, so that a caption that is not UTF-8 is one bad sample.
    """
    (mark, names), malformed, inside = _header(path), list[tuple[str, str]](), list[tuple[str, str]]()
    places, suffixes = {name: names.index(name) for name in columns}, set[str]()
    image, blocks, cells = places[columns[0]], list[pa.Table](), {name: list[bytes]() for name in columns}
    csv.field_size_limit(_LONGEST)

    with path.open(encoding="latin-1", newline="") as file:
        for n, row in enumerate(csv.reader(file, delimiter=mark)):
            if len(row) == len(names) and n:
                suffixes.add(os.path.splitext(row[image].partition("\n")[0])[1])
                inside += [
                    (os.path.splitext(line.split(mark)[image])[1], line)
                    for cell in row if "\n" in cell
                    for line in cell.split("\n")[1:] if line.count(mark) == len(names) - 1
                ]  # fmt: skip
                for name, place in places.items():
                    cells[name].append(row[place].encode("latin-1"))
            elif n and row:
                reason = f"line without {len(names)} columns"
                malformed += [(line, reason) for line in mark.join(row).splitlines() or [""]]
            if len(cells[columns[0]]) == _ROWS:
                blocks.append(pa.table(cells))
                cells = {name: [] for name in columns}
    reason = "the line is inside a quoted cell that begins in an earlier one"
    malformed += [(line, reason) for suffix, line in inside if suffix and suffix in suffixes]
    blocks.append(pa.table(cells, pa.schema([(name, pa.binary()) for name in columns])))
    texts = ((line.encode("latin-1").decode(errors="replace"), reason) for line, reason in malformed)
    return pa.concat_tables(blocks), [(f"line {shown(line[:60])}", reason) for line, reason in texts]


def _header(path: Path) -> tuple[str, list[str]]:
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


def load_json(path: Path, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value of a file. Args: hook: `object_hook` of `json.loads`. Errors: ValueError for what is no JSON."""
    raw = path.read_bytes()
    if path.suffix.lower() == ".jsonl":  # an object in each line
        raw = b"[" + b",\n".join(line for line in raw.splitlines() if line.strip()) + b"]"
    try:
        return json.loads(raw, object_hook=hook)
    except (ValueError, RecursionError) as error:  # the message has line and column, and nothing of the file
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"{path} is no JSON: {reason}.") from None


def load_objects(path: Path, data: Any = None) -> list[dict[str, Any]]:
    """The objects of a json or jsonl. Args: data: its value, if it is known. Errors: ValueError for anything else."""
    rows = load_json(path) if data is None else data
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is no list of objects. Expected objects with `image` and `caption`.")
    return rows


def decoded(value: Any) -> Any:
    """A value whose bytes are texts, whose whole numbers are integers. Raises BadSample."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if isinstance(value, float) and value.is_integer():  # as pandas writes numbers beside empty cells
        return int(value)
    return decode_text(value) if isinstance(value, bytes) else value


def texts(cell: Any, lines: bool = False) -> list[str]:
    """The texts of a cell: of a text, of a list, or of an object that holds one of these.

    Args: lines: a text that is no list has one text a line. Raises BadSample.
    """
    if isinstance(cell, bytes):  # nearly every cell is one text
        cell = decode_text(cell).strip()
        if cell and cell[0] != "[" and "\n" not in cell and len(cell) <= MAX_CAPTION:
            return [cell]
    if isinstance(cell, dict):
        named = next((name for name in _FIELDS if name in cell), None)
        if not named and len(cell) != 1:
            raise BadSample("a caption is not text")
        return texts(cell[named] if named else next(iter(cell.values())), lines)
    listed: list[Any]
    if isinstance(cell, list):
        listed = [text for one in cell for text in (texts(one) if isinstance(one, dict) else [decoded(one)])]
    else:
        listed = [decoded(cell)]
        if isinstance(listed[0], str):
            text, listed = listed[0], texts_in(listed[0])
            listed = text.split("\n") if lines and listed == [text] else listed
    if not all(isinstance(one, str | None) for one in listed):
        raise BadSample("a caption is not text")
    return clean([one for one in listed if one is not None])


def class_data(folder: Path) -> tuple[list[str] | None, list[str] | None]:
    """Class names and prompt templates of classification data, each None where there are none.

    They lie in the folder, or in its parent. Errors: ValueError for an empty file.
    """
    found: list[list[str] | None] = []
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        places = (folder / name, folder.absolute().parent / name)
        path = next((place for place in places if place.is_file()), None)
        found.append(text_lines(str(path), path.read_bytes()) if path else None)
    return found[0], found[1]


Label = int | LabelSet | str | None
"""A label, or why there is none that can be used (a text)."""


def labels_of(
    name: str, values: Sequence[Any], classnames: Sequence[str] | None
) -> tuple[list[Label], list[str] | None]:
    """The labels of a column, numbers, names, or lists of either; and the class names.

    Empty cells and -1 are rows without label. Without class names, the names in the column are the classes, in sorted
    order and with a space for "_". Errors: ValueError when none of the names in the column is a class name.
    """
    given = [_label_cell(value) for value in values]
    every = (one for value in given for one in (value if isinstance(value, list) else [value]))
    named = sorted({one for one in every if isinstance(one, str)})
    if classnames is None:
        known, classnames = {text: place for place, text in enumerate(named)}, spaced(named) if named else None
    else:
        places = zip(named, places_among(named, classnames), strict=True)
        known = {text: place for text, place in places if place is not None}
        known |= {text: place for place, text in enumerate(classnames)}
    if named and not any(text in known for text in named):
        raise ValueError(
            f"{name}: none of its {len(named)} labels is a class name, such as {shown(named[0][:60])!r}; the first of "
            f"{len(known)} class names is {shown(str(next(iter(known), ''))[:60])!r}."
        )
    return [_label(value, known) for value in given], None if classnames is None else list(classnames)


def _label(value: Any, known: Mapping[str, int]) -> Label:
    if value is None or value == -1:
        return None
    try:
        several = value if isinstance(value, list) else [value]
        for one in several:
            if isinstance(one, str) and one not in known:
                raise BadSample(f"label {shown(one[:60])!r} is no class name.{suggestion(one, known)}")
        found = label_set([known[one] if isinstance(one, str) else one for one in several])
    except BadSample as error:
        return str(error)
    return found if isinstance(value, list) else found.indices[0]


def _label_cell(value: Any) -> Any:
    """A cell as a number, a name, or a list of them; None for an empty one."""
    with suppress(BadSample):
        value = decoded(value)
        if isinstance(value, str) and (listed := texts_in(value, objects=True)) != [value]:
            return listed
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        text = value.strip()
        return int(text.partition(".")[0]) if _WHOLE.fullmatch(text) else text or None
    return None if value != value else value


def class_label_names(table: Path, column: str) -> list[str] | None:
    """The names that a parquet file of the library datasets gives the classes of a column (`ClassLabel`)."""
    raw = (pa.parquet.read_schema(table).metadata or {}).get(b"huggingface")
    try:
        feature = json.loads(raw or b"{}")["info"]["features"][column]
        while not isinstance(feature, dict) or "feature" in feature:  # a list of labels
            feature = feature["feature"] if isinstance(feature, dict) else feature[0]
        names = feature["names"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return names if isinstance(names, list) and names and all(isinstance(name, str) for name in names) else None
