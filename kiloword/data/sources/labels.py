"""Labels of classification data: columns of tables, names of classes beside the data."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from kiloword.data.classes.names import places_among, spaced, text_lines
from kiloword.data.sources.sample import decode_text, label_set, texts_in
from kiloword.errors import suggestion
from kiloword.terminal import shown
from kiloword.types import BadSample, LabelSet

_WHOLE = re.compile(r"-?\d{1,17}(\.0*)?", re.ASCII)  # also as pandas writes numbers beside empty cells: 3.0
_METADATA = b"huggingface"  # key of the metadata that the library datasets writes


def class_data(folder: Path) -> tuple[list[str] | None, list[str] | None]:
    """Class names and prompt templates of classification data, each None where there are none.

    Errors: ValueError for an empty file.
    """
    return _lines(folder, "classnames.txt"), _lines(folder, "zeroshot_classification_templates.txt")


def _lines(folder: Path, name: str) -> list[str] | None:
    """The lines of a file in the folder or its parent; None without one."""
    for path in (folder / name, folder.absolute().parent / name):
        if path.is_file():
            return text_lines(str(path), path.read_bytes())
    return None


class LabelColumn:
    """The labels of N rows: numbers, names, or lists of either.

    Without class names, the names in the column are the classes, in sorted order and with a space for "_".
    Empty cells and -1 are rows without label.

    Args: column: [N]; names: of the classes, None where nothing says them.
    Errors: ValueError for a column of another type, and when none of its names is a class name.
    """

    def __init__(self, name: str, column: pa.ChunkedArray, names: Sequence[str] | None) -> None:
        self._listed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        self.classnames = None if names is None else list(names)
        if self._listed and pa.types.is_large_binary(column.type.value_type):
            column = column.cast(pa.large_list(pa.large_string()))
        array = column.combine_chunks()
        if self._listed:
            self._cells, self._values = array, list[Any]()
            known = {text for cell in array for text in cell.as_py() or [] if isinstance(text, str)}
        else:
            coded = array.dictionary_encode()
            self._cells, self._values = coded.indices, [_parsed(name, value) for value in coded.dictionary.to_pylist()]
            known = {text for value in self._values for text in (value if isinstance(value, list) else [value])}
        named = sorted(value for value in known if isinstance(value, str))
        if self.classnames is None and named:
            self.classnames = spaced(named)
        self._place = {text: place for place, text in enumerate(named if names is None else names)}
        if names is not None:
            places = zip(named, places_among(named, names), strict=True)
            self._place = {text: place for text, place in places if place is not None} | self._place
        if named and not any(text in self._place for text in named):
            raise ValueError(
                f"{name}: none of its {len(named)} labels is a class name, such as {shown(named[0][:60])!r}; the first "
                f"of {len(self._place)} class names is {shown(str(next(iter(self._place), ''))[:60])!r}."
            )

    def of(self, row: int) -> int | LabelSet | None:
        """The label of a row. Raises: BadSample for a name that is no class, and for a number below -1."""
        cell = self._cells[row].as_py()
        value = cell if self._listed or cell is None else self._values[cell]
        if isinstance(value, list):
            return label_set([self._index(one) for one in value])
        index = None if value is None else self._index(value)
        return None if index == -1 else index

    def _index(self, value: Any) -> int:
        if isinstance(value, str) and value not in self._place:
            raise BadSample(f"label {shown(value[:60])!r} is no class name.{suggestion(value, self._place)}")
        index = self._place[value] if isinstance(value, str) else value
        if not isinstance(index, int) or index < -1:
            raise BadSample(f"label {shown(str(index)[:60])} is not a class index")
        return index


def _parsed(name: str, value: Any) -> Any:
    """A cell as a number, a name, or a list of them; None for an empty one."""
    if isinstance(value, bytes):
        try:
            value = decode_text(value)
        except BadSample:
            raise ValueError(f"{name}: a label is not UTF-8.") from None
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None if value != value else value
    if not isinstance(value, str):
        if value is None or isinstance(value, int):
            return value
        raise ValueError(f"{name}: a label is {shown(str(value)[:60])}. Expected numbers, names, or lists of them.")
    text = value.strip()
    with suppress(BadSample):
        if (listed := texts_in(text, objects=True)) != [text]:
            return listed
    return int(text.partition(".")[0]) if _WHOLE.fullmatch(text) else text or None


def class_label_names(table: Path, column: str) -> list[str] | None:
    """The names that a parquet file of the library datasets gives the classes of a column (`ClassLabel`)."""
    raw = (pa.parquet.read_schema(table).metadata or {}).get(_METADATA)
    try:
        feature = json.loads(raw or b"{}")["info"]["features"][column]
        while not isinstance(feature, dict) or "feature" in feature:  # a list of labels
            feature = feature["feature"] if isinstance(feature, dict) else feature[0]
        names = feature["names"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return names if isinstance(names, list) and names and all(isinstance(name, str) for name in names) else None
