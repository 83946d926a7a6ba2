"""Tables of users: reading csv, tsv, parquet and lists of JSON objects; cells that are texts, or labels."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from kiloword.data.classes.names import places_among, spaced, text_lines
from kiloword.data.rows import key_bytes
from kiloword.data.sample import IMAGE_SUFFIXES, clean, decode_text, label_set
from kiloword.errors import suggestion
from kiloword.terminal import shown
from kiloword.types import BadSample, LabelSet

JSON = (".json", ".jsonl")
_CSV = (".csv", ".tsv", ".txt", ".token")
_FIELDS = ("caption", "raw", "text", "answer")  # of an object that holds a text among others
_LOOKED_AT = 64  # first rows, whose cells tell what a column holds
_LONGEST = 1 << 30  # characters of a cell
_LONE = re.compile(r"[\ud800-\udfff]")  # surrogates, of bytes that are not UTF-8
_WHOLE = re.compile(r"-?\d{1,17}(\.0*)?", re.ASCII)  # also as pandas writes numbers beside empty cells: 3.0

Cells = dict[str, list[Any]]
"""The columns of a table by name; bytes that are not UTF-8 are lone surrogates of texts (surrogateescape)."""
Malformed = list[tuple[str, str]]
"""Names and reasons of lines that are no rows."""


@contextmanager
def arrow_errors(path: Path | str) -> Iterator[None]:
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
    if path.suffix.lower() in JSON:
        return list(load_objects(path, load_json(path))[0])
    with arrow_errors(path):
        return list(pa.parquet.read_schema(path).names)


def columns_by_content(path: Path, cells: Cells | None = None) -> tuple[list[str], list[str]]:
    """The columns of a table that name image files, and the columns of sentences, by the first rows; not of a parquet.

    Args: cells: of a table that was read. Errors: ValueError when the table cannot be read.
    """
    images, sentences = list[str](), list[str]()
    if cells is None and path.suffix.lower() in _CSV:
        cells = _read_csv(path, column_names(path), _LOOKED_AT)[0]
    for name, column in (cells or {}).items():
        values = [cell for cell in column[:_LOOKED_AT] if isinstance(cell, str) and cell.strip()]
        head, *named = (
            os.path.splitext(x)[1].lower()[1:] in IMAGE_SUFFIXES and "://" not in x for x in (name, *values)
        )
        if 2 * sum(named) > len(values):
            images += [name] * (not head)  # else the first line is a row
        elif name and 2 * sum(" " in value.strip() for value in values) > len(values) < 2 * len(set(values)):
            sentences.append(name)
    return images, sentences


def check_columns(path: Path, names: Sequence[str], *columns: str) -> None:
    """Errors: ValueError for a column that a table lacks, or has twice."""
    for column in columns:
        if names.count(column) != 1:
            found = f"{names.count(column)} columns named" if column in names else "no column"
            raise ValueError(
                f"{path} has {found} {shown(column[:60])!r}; it has {shown(', '.join(names)[:200]) or 'none'}."
                f"{'' if column in names else suggestion(column, names)}"
            )


def read_table(path: Path, columns: Sequence[str]) -> tuple[Cells, Malformed]:
    """Some columns of a csv, tsv or parquet; by the first, which names images, lines of a csv look like rows."""
    wanted = list(dict.fromkeys(columns))
    if path.suffix.lower() in _CSV:
        return _read_csv(path, wanted)
    table = pa.parquet.read_table(path, columns=wanted, partitioning=None)
    kinds = {field.name: field.type for field in table.schema}
    text = {name: pa.large_binary() for name, kind in kinds.items() if kind in (pa.string(), pa.large_string())}
    cells: Cells = table.cast(pa.schema(kinds | text)).to_pydict()
    for name, column in cells.items():
        cells[name] = [c.decode(errors="surrogateescape") if isinstance(c, bytes) else c for c in column]
    return cells, []


def read_columns(path: Path | str, *names: str) -> list[list[str]]:
    """Columns of a csv, tsv or parquet that names rows of data by texts, as they are written.

    Errors: ValueError for a table that cannot be read, for a column that is missing, for a row without text.
    """
    path = Path(path)
    check_columns(path, column_names(path), *names)
    with arrow_errors(path):
        columns = list(read_table(path, names)[0].values())
    for name, cells in zip(names, columns, strict=True):
        for n, cell in enumerate(cells):
            if not isinstance(cell, str):
                raise ValueError(f"{path}: row {n} has no {name}. Expected text in every row.")
    return columns


def _read_csv(path: Path, columns: list[str], most: int | None = None) -> tuple[Cells, Malformed]:
    """A row with a quoted cell of lines that look like rows, as many cells and a known suffix, is malformed lines.

    Args: most: rows that are read.
    """
    (mark, names), malformed, suffixes, end = _header(path), list[tuple[str, str]](), set[str | None](), 0
    cells: Cells = {name: [] for name in columns}
    first, places = names.index(columns[0]), [(names.index(name), column) for name, column in cells.items()]
    csv.field_size_limit(_LONGEST)
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=mark)
        for row in islice(reader, most):
            at, end, reason = end + 1, reader.line_num, f"line without {len(names)} columns"
            if at == 1 or not row:
                continue
            if len(row) == len(names):
                suffixes.add(os.path.splitext(row[first])[1] or None)
                inner = [line.split(mark) for cell in row if "\n" in cell for line in cell.split("\n")[1:]]
                like = any(len(one) == len(names) and os.path.splitext(one[first])[1] in suffixes for one in inner)
                reason = f"a quote that opens in line {at} encloses rows" if like else ""
            if reason:
                lines = mark.join(row).splitlines()
                malformed += [(f"line {n} ({shown(line[:60])})", reason) for n, line in enumerate(lines, at)]
            else:
                for place, column in places:
                    column.append(row[place])
    return cells, malformed


def _header(path: Path) -> tuple[str, list[str]]:
    """Delimiter and column names; open_clip separates .csv by tabs, Flickr30k by "| ", spreadsheets by ";".

    Errors: ValueError.
    """
    with path.open("rb") as file:
        raw = file.readline(1 << 20)
    try:
        line = decode_text(raw).strip("\r\n")
    except BadSample:
        raise ValueError(f"{path}: the first line is not UTF-8. Expected columns such as `image,caption`.") from None
    delimiter = "\t" if "\t" in line and ("," not in line or path.suffix.lower() == ".tsv") else ","
    delimiter = next((mark for mark in "|;" if mark in line and not {",", "\t"} & set(line)), delimiter)
    return delimiter, [name.strip(' "' if delimiter == "|" else '"') for name in line.split(delimiter)]


def load_json(path: Path) -> Any:
    """The value of a file. Errors: ValueError for what is no JSON."""
    raw = path.read_bytes()
    if path.suffix.lower() == ".jsonl":  # a value in each line
        return [_value(line) for line in raw.split(b"\n") if line.strip()]
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # the message has line and column, and nothing of the file
        raise ValueError(f"{path} is no JSON: {error}.") from None


def _value(line: bytes) -> Any:
    """The value of a line; None for what is no JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def load_objects(path: Path, listed: Any) -> tuple[Cells, Malformed]:
    """The columns of a json or jsonl that lists objects. Args: listed: its value. Errors: ValueError."""
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    if not rows:
        raise ValueError(f"{path} is no list of objects. Expected objects with `image` and `caption`.")
    malformed = [(f"row {n}", "no object") for n, row in enumerate(listed) if not isinstance(row, dict)]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}, malformed


def decoded(value: Any) -> Any:
    """A value whose texts are UTF-8, whose whole numbers are integers. Raises BadSample."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if isinstance(value, float) and value.is_integer():  # as pandas writes numbers beside empty cells
        return int(value)
    if isinstance(value, str):
        value = key_bytes(value)
    return decode_text(value) if isinstance(value, bytes) else value


def texts_in(cell: str, lines: bool = False, objects: bool = False) -> list[Any]:
    """The texts of a cell: of a list as JSON or Python write it, without its empty places; else the one text.

    Args: lines: other text has one a line; objects: a list may hold anything. Raises: BadSample for a list in another
    form, such as a printed NumPy array.
    """
    text = cell.strip()
    for parse in (json.loads, ast.literal_eval) if text.startswith("[") else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings(action="ignore"):
            values = parse(text)
            exact = parse is json.loads or repr(values) == text  # Python joins 'a' 'b', which is NumPy's list, to 'ab'
            if isinstance(values, list) and exact and (objects or all(isinstance(v, str | None) for v in values)):
                return [value for value in values if value is not None]
    if text.startswith(("['", '["')) and text.endswith("]"):
        raise BadSample("a cell that looks like a list is not one of texts, as JSON or Python write it")
    return [line for line in cell.split("\n") if line.strip()] if lines else [cell]


def texts(cell: Any, lines: bool = False) -> list[str]:
    """The texts of a cell: of a text or a number, of a list, or of an object that holds one of these.

    Args: lines: a text that is no list has one text a line. Raises BadSample.
    """
    if isinstance(cell, str) and "\n" not in cell and not cell.lstrip().startswith("["):  # nearly every cell
        return clean([cell.removeprefix("\ufeff")])
    if isinstance(cell, dict):
        named = [cell[name] for name in _FIELDS if name in cell]
        if not named and len(cell) != 1:
            raise BadSample("a caption is not text")
        return texts([*named, *cell.values()][0], lines)
    found = list[str]()
    for one in texts_in(cell, lines) if isinstance(cell, str) else cell if isinstance(cell, list) else [cell]:
        one = decoded(one)
        if isinstance(one, dict):
            found += texts(one)
        elif isinstance(one, str) or (isinstance(one, int | float) and not isinstance(one, bool) and one == one):
            found.append(str(one))
        elif one is not None:
            raise BadSample("a caption is not text")
    return clean(found)


def class_data(folder: Path) -> tuple[list[str] | None, list[str] | None]:
    """Class names and prompt templates of classification data, each None where there are none.

    They lie in the folder, or in its parent. Errors: ValueError for an empty file.
    """
    found: list[list[str] | None] = []
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        path = next(filter(Path.is_file, (folder / name, folder.absolute().parent / name)), None)
        found.append(text_lines(str(path), path.read_bytes()) if path else None)
    return found[0], found[1]


Label = int | LabelSet | str
"""A label, -1 for none, or why there is none that can be used (a text)."""


def labels_of(
    name: str, values: Sequence[Any], classnames: Sequence[str] | None
) -> tuple[list[Label], list[str] | None]:
    """The labels of a column, numbers, names, or lists of either; and the class names.

    Empty cells and -1 are rows without label. Without class names, the names in the column are the classes, in sorted
    order and with a space for "_". Errors: ValueError when none of the names in the column is a class name.
    """
    given = [_label_cell(value) for value in values]
    every = (one for value in given for one in (value if isinstance(value, list) else [value]))
    named = sorted({one for one in every if isinstance(one, str) and not _LONE.search(one)})
    listed = (spaced(named) if named else None) if classnames is None else list(classnames)
    places = range(len(named)) if classnames is None else places_among(named, classnames)
    known = {text: place for text, place in zip(named, places, strict=True) if place is not None}
    if named and not known:
        raise ValueError(
            f"{name}: none of its {len(named)} labels is a class name, such as {shown(named[0][:60])!r}; the first of "
            f"{len(listed or [])} class names is {shown((listed or [''])[0][:60])!r}."
        )

    def label(value: Any) -> Label:
        if value is None or value == -1:
            return -1
        several = value if isinstance(value, list) else [value]
        unknown = [one for one in several if isinstance(one, str) and one not in known]
        if unknown:
            return f"label {shown(unknown[0][:60])!r} is no class name.{suggestion(unknown[0], listed or [])}"
        try:
            found = label_set([known[one] if isinstance(one, str) else one for one in several])
        except BadSample as error:
            return str(error)
        return found if isinstance(value, list) else found.indices[0]

    return [label(value) for value in given], listed


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
