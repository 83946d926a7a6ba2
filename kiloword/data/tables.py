"""csv, tsv and parquet tables, json and token files: captions, questions and their answers, or class labels.

docs/data.md has the columns and the forms of their cells.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from kiloword.addresses import is_url
from kiloword.data.columns import (
    JSON,
    Cells,
    Label,
    arrow_errors,
    check_columns,
    class_data,
    class_label_names,
    column_names,
    columns_by_content,
    decoded,
    labels_of,
    read_table,
    texts,
    texts_in,
)
from kiloword.data.edits import digest
from kiloword.data.layouts import beside, images_folder, read_layout
from kiloword.data.query import TableOptions
from kiloword.data.reading import digest_of
from kiloword.data.rows import PLAIN, Rows, keeping, key_bytes, made_once, touched
from kiloword.data.sample import ANSWERS, QUESTION, clean, parse_answers
from kiloword.errors import LeftOut
from kiloword.files import cache_folder, replacing
from kiloword.terminal import shown
from kiloword.types import BadSample, LabelSet

DEFAULTS = TableOptions()
IMAGE_COLUMNS = ("image", "filepath", "img", "file_name", "jpg", "png", "webp")
LABEL_COLUMNS = ("label", "class", "cls", "fine_label")
CAPTION_COLUMNS = ("captions", "caption", "title")
ANSWER_COLUMNS = (ANSWERS, "answer")
INFO_COLUMNS = ("question_type", "answer_type", "image_id", "question_id", "domain")
SPLIT, STATUS = "split", "status"  # the second: of downloads, as img2dataset writes it
SCHEMA = pa.schema(
    {"key": pa.large_binary(), "captions": pa.large_list(pa.large_string()), "file": pa.large_binary(), **PLAIN}
)


def fingerprint(path: Path) -> str:
    """A digest of a file's bytes, 32 hexadecimal digits. Errors: OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class NoRows(ValueError):
    """A table has no rows."""


class TableColumns(NamedTuple):
    """Names of the columns that are read."""

    image: str
    texts: tuple[str, ...]  # of captions, or of answers to a question
    question: str = ""
    info: tuple[str, ...] = ()  # other values of `Record.info`
    label: str = ""
    note: str = ""  # says which columns were recognised by their cells


def choose(path: Path, names: Sequence[str], options: TableOptions, cells: Cells | None = None) -> TableColumns:
    """The columns that are read: by the options, else by usual names, else by what the cells hold.

    Args: cells: of a table that was read. Errors: ValueError for a missing column, and one that the table has twice.
    """

    def first(*known: str) -> str:
        return next((column for column in known if column in names), "")

    image, question = options.image or first(*IMAGE_COLUMNS), options.question or first(QUESTION)
    answers, label = options.answer or first(*ANSWER_COLUMNS), first(*LABEL_COLUMNS)
    question = question if (answers or options.question) and not options.caption else ""
    caption = first(*CAPTION_COLUMNS) or ("" if label else first("text"))  # as the library datasets names it
    columns = tuple(filter(None, [answers] if question else options.caption or [caption]))
    label = options.label or ("" if columns or question else label)
    images, sentences, note = list[str](), list[str](), ""
    if not image or not (columns or question or label):
        images, sentences = columns_by_content(path, cells)
        image = image or (images[0] if len(images) == 1 else "")
        columns = columns or (tuple(sentences) if len(sentences) == 1 and not (question or label) else ())
        note = f"images are in the column {image}, captions in {', '.join(columns)}, as the cells show"
    info = tuple(dict.fromkeys([*options.info, *(c for c in INFO_COLUMNS if names.count(c) == 1)]))
    chosen = TableColumns(image, columns, question, info, label, note)
    check_columns(path, names, *filter(None, [image, *columns, question, *info, label, options.split and SPLIT]))
    mixed = not question and (options.answer or options.question)
    if not image or not (columns or question or label) or mixed:
        raise ValueError(
            f"{path} has the columns {shown(', '.join(names)[:200]) or 'none'}. Expected `image` (or `filepath`) and "
            "`caption`, `captions` (or `title`) in its first line; or `image`, `question` and `answers` (or `answer`); "
            "or `image` and `label`. Name other columns: "
            f"'{path}?image={(images or ['COLUMN'])[0]}&caption={','.join(sentences) or 'COLUMN'}', or question= and "
            "answer= in place of caption=."
        )
    return chosen


def open_table(name: str, path: Path, options: TableOptions = DEFAULTS, prefix: str = "") -> Rows:
    """The samples of one file; malformed lines come last, as bad samples.

    Of captions: one sample per image, in order of first appearance; of questions or labels alone: one per row. A key is
    the image's path without suffix (of questions with the number of the sample), or the number of its first row where
    the table contains the images. Args: prefix: of keys that are numbers.
    Errors: ValueError for missing columns, an unreadable table; NoRows.
    """
    if not path.stat().st_size:
        raise NoRows(f"{path} is empty.")
    contents, other, (classnames, templates) = fingerprint(path), beside(path, options), class_data(path.parent)
    chosen = replace(options, images="", annotations="")
    of_rows = digest(contents, fingerprint(other) if other else "", repr(chosen), prefix, "None")
    place = cache_folder() / "rows" / f"{digest(contents, options.image)}.images"
    table, file = made_once(
        f"table 6 {of_rows} {path.name} {classnames} {cache_folder()}",
        lambda: _table(name, path, options, other, place, classnames, prefix),
    )
    told, folder = json.loads(table.schema.metadata[b"kiloword"]), path.parent
    if told["inside"]:
        if not place.is_file():
            _copied(path, told["inside"], place)
        touched(place)
    if options.images or not (told["inside"] or is_url(name)):
        files = table.column("file")[: 0 if told["inside"] else None]
        folder = images_folder(path, options.images, files, told["subset"])
    return Rows(
        name, table, folder, of_rows, classnames=told["classnames"], templates=templates if told["labels"] else None,
        notes=[f"{name}: {line}" for line in told["notes"]], path=file,
    )  # fmt: skip


def _table(
    name: str, path: Path, options: TableOptions, other: Path | None, place: Path, listed: list[str] | None, prefix: str
) -> pa.Table:
    """The rows of a file, and as metadata what is said of them all. Args: place: for images that it contains."""
    layout, left = read_layout(path, options, other), LeftOut("row")
    options = layout.options if layout else options
    columns = choose(path, list(layout.cells) if layout else column_names(path), options, layout and layout.cells)
    inside = not layout and _inside(path, columns.image)
    wanted = [columns.image * (not inside), *columns.texts, columns.question, *columns.info, columns.label]
    wanted += [SPLIT * bool(options.split), STATUS * (inside and STATUS in column_names(path))]
    with arrow_errors(path):
        cells, malformed = layout[:2] if layout else read_table(path, [*filter(None, wanted)])
        if columns.label and path.suffix.lower() == ".parquet":
            listed = class_label_names(path, columns.label) or listed
        labels, classnames = labels_of(name, cells[columns.label], listed) if columns.label else ([], None)
        paths = cells.get(columns.image, [])
        files = [None if cell is None else str(decoded(cell) if isinstance(cell, float) else cell) for cell in paths]
    if paths and all(isinstance(cell, list | dict | None) or is_url(str(cell)) for cell in paths):
        raise ValueError(
            f"{path}: the column {columns.image} holds no paths, but lists, objects or URLs. Expected paths of files; "
            "in a parquet also bytes, or a struct with `bytes` or `path`. Download URLs first, as by img2dataset."
        )
    lone = "surrogatepass" if path.suffix.lower() in JSON else "surrogateescape"
    where: Cells = {"file": [file.encode(errors=lone) if file else None for file in files], "group": files}
    where = _copied(path, columns.image, place) if inside else where
    groups = where.pop("group")
    kept = [n for n in range(len(groups)) if not options.split or str(cells[SPLIT][n]) == options.split]
    failed = {n for n in kept if STATUS in cells and cells[STATUS][n] != "success" and groups[n] is None}
    for n in sorted(failed):
        left.add(str(n), f"the download failed ({cells[STATUS][n]})")
    kept = [n for n in kept if n not in failed]
    if not kept and not malformed:
        there = shown(", ".join(dict.fromkeys(map(str, cells.get(SPLIT, []))))[:200])
        which = f" whose {SPLIT} is {shown(options.split[:60])!r}, but {there}" if options.split else ""
        raise NoRows(f"{path} has no rows{which}. Expected a text in each, and its image.")
    images = dict[Any, list[int]]()
    for n in kept:
        images.setdefault((columns.texts and not columns.question and groups[n]) or n, []).append(n)
    samples = list(images.values())
    made = {column: [values[rows[0]] for rows in samples] for column, values in where.items()}
    made["key"] = []
    for number, (n, *_) in enumerate(samples):
        key = os.path.splitext(files[n] or f"row {prefix}{n}")[0] if files else f"{prefix}{n}"
        made["key"].append(key_bytes(f"{key}#{number}" if columns.question and files else key))
    captions, known = _parsed(cells, columns, samples, made["key"], labels, left)
    arrays = {column: pa.array(values, SCHEMA.field(column).type) for column, values in (made | known).items()}
    bad = {"key": [key_bytes(line) for line, _ in malformed], "error": [reason for _, reason in malformed]}
    told = {
        "classnames": classnames, "labels": bool(columns.label), "inside": columns.image if inside else "",
        "notes": [*(layout.notes if layout else ()), *filter(None, [columns.note]), *left.lines()],
        "subset": layout.subset if layout else None,
    }  # fmt: skip
    tables = [pa.table(arrays | {"captions": captions}), pa.table(bad, pa.schema([SCHEMA.field(one) for one in bad]))]
    whole = pa.concat_tables(tables, promote_options="default")
    return whole.replace_schema_metadata({b"kiloword": json.dumps(told).encode()})


def _parsed(
    cells: Cells,
    columns: TableColumns,
    samples: Sequence[Sequence[int]],
    keys: Sequence[bytes],
    labels: Sequence[Label],
    left: LeftOut,
) -> tuple[pa.Array, Cells]:
    """Captions of samples, and the other columns that say what is known of their images.

    Args: left: gets rows whose caption is empty, where the image has others.
    """
    flat, ends, known = list[str](), [0], {name: list[Any]() for name in ("info", "error", "label", "labels")}
    for rows, key in zip(samples, keys, strict=True):
        info, error, label = dict[str, Any](), None, labels[rows[0]] if columns.label else None
        silent = 0
        try:
            values = {column: decoded(cells[column][rows[0]]) for column in columns.info}
            info |= {column: value for column, value in values.items() if value is not None and value != ""}
            for n in rows:
                before = len(flat)
                if columns.question:
                    flat += _answers(cells, columns, n, info)
                for column in () if columns.question else columns.texts:
                    flat += texts(cells[column][n], lines=column == "captions")
                silent += len(flat) == before
            for _ in range(silent if columns.texts and not columns.question and silent < len(rows) else 0):
                left.add(os.fsdecode(key), "empty caption, but the image has others")
            if isinstance(label, str):
                raise BadSample(label)
        except BadSample as bad:
            error = str(bad)
        ends.append(len(flat))
        known["info"].append(json.dumps(info, default=str) if info else None)
        known["error"].append(error)
        known["label"].append(label if isinstance(label, int) else None)
        known["labels"].append(label.indices if isinstance(label, LabelSet) else None)
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), pa.array(flat, pa.large_string())), known


def _answers(cells: Cells, columns: TableColumns, row: int, info: dict[str, Any]) -> list[str]:
    """The answers to a question, which `info` gets with it; none to a test question. Raises BadSample."""
    question = decoded(cells[columns.question][row])
    info[QUESTION] = "" if question is None else question  # an empty cell is bad, not a row without a question
    if not columns.texts and isinstance(question, str) and question.strip():
        return []
    answers = decoded(cells[columns.texts[0]][row]) if columns.texts else None
    answers = answers.get("answer") if isinstance(answers, dict) else answers
    if answers is not None:
        info[ANSWERS] = texts_in(answers, lines=True, objects=True) if isinstance(answers, str) else answers
    return clean(parse_answers(info) or [])


def _inside(path: Path, column: str) -> bool:
    """Whether a parquet contains images, not paths alone."""
    if path.suffix.lower() != ".parquet" or not column:
        return False
    kind, binary = pa.parquet.read_schema(path).field(column).type, (pa.binary(), pa.large_binary())
    if not pa.types.is_struct(kind):
        return kind in binary
    fields = {field.name: field.type for field in kind}
    return bool(fields.keys() & {"bytes", "path"}) and fields.get("bytes", pa.null()) in (*binary, pa.null())


def _copied(path: Path, column: str, place: Path) -> Cells:
    """Write the images of a parquet, whose single values cannot be read, end to end.

    Returns: `file`, `offset` and `size` of each row, and what is equal for equal images.
    """
    known, end, rows = dict[bytes, int](), 0, list[tuple[Any, ...]]()
    with arrow_errors(path), keeping(place), replacing(place) as file, pa.parquet.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(batch_size=256, columns=[column]):
            for cell in batch.column(0).to_pylist():
                image, name = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
                if image is None and name:
                    rows.append((os.fsencode(name), None, None, os.fsencode(name)))
                    continue
                same = digest_of(image := image or b"")
                if same not in known:
                    known[same], end = end, end + file.write(image)
                rows.append((os.fsencode(place), known[same], len(image), same if image else None))
    return {name: [row[n] for row in rows] for n, name in enumerate(("file", "offset", "size", "group"))}


def open_tables(name: str, paths: Sequence[Path], options: TableOptions = DEFAULTS) -> Rows:
    """Tables one after another, as of a brace pattern; those without rows are left out.

    Errors: as of `open_table`; ValueError for tables that name different classes.
    """
    parts, left, folder = list[Rows](), LeftOut("table"), os.path.commonpath([path.parent for path in paths])
    for path in paths:
        prefix = f"{os.path.relpath(path.with_suffix(''), folder)}/" if len(paths) > 1 else ""
        try:
            parts.append(open_table(name, path, options, prefix))
        except NoRows:
            if path is paths[-1] and not parts:
                raise
            left.add(path.name, "no rows in it")
    first, tables = parts[0], list[pa.Table]()
    if any(part.classnames != first.classnames for part in parts):
        raise ValueError(f"{name}: its tables name different classes. Put classnames.txt with all beside them.")
    for part in parts:
        below = os.path.abspath(part.folder).replace("\\", r"\\")
        files = pc.replace_substring_regex(part.table.column("file"), "^([^/])", rf"{below}/\1")
        tables.append(part.table.set_column(part.table.column_names.index("file"), "file", files))
    of_rows = digest(*(part.fingerprint for part in parts))
    identity = (
        f"tables 5 {of_rows} {[os.path.abspath(part.folder) for part in parts]} {first.classnames} {cache_folder()}"
    )
    table, file = made_once(identity, lambda: pa.concat_tables(tables, promote_options="default"))
    notes = [*(note for part in parts for note in part.notes), *(f"{name}: {line}" for line in left.lines())]
    return Rows(
        name, table, folder, of_rows, classnames=first.classnames, templates=first.templates, notes=notes, path=file
    )
