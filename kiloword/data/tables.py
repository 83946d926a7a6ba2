"""csv, tsv and parquet tables, json and token files: captions, questions and their answers, class labels, or texts.

Columns: `image` (path relative to the table; in parquet also the bytes, or a struct with `bytes` or `path`) or
open_clip's `filepath`; and `caption`, `captions` or open_clip's `title`. Or `question`, with `answers` or `answer`, and
optional types. Or `label` (`class`, `cls`, `fine_label`), a class index, a class name or a list of them; their names
are those of a `ClassLabel` (Hugging Face) or of classnames.txt. Other columns are named by options (`TableOptions`).

Any of these cells is a text, or a list: of parquet, or as JSON or Python write it. `captions` and `answers` may have a
text per line, and answers may be VQAv2's objects. A quote that is not closed where rows follow ends with its line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from kiloword.data.columns import (
    Label,
    arrow_errors,
    check_columns,
    class_data,
    class_label_names,
    column_names,
    decoded,
    labels_of,
    read_table,
    rows_in,
    texts,
)
from kiloword.data.layouts import Annotations, beside, check_images, images_folder, nearby, read_annotations
from kiloword.data.query import FORM, TableOptions, parse_query, split_query
from kiloword.data.rows import Rows, keeping, key_bytes, made_once, mapped, touched, write
from kiloword.data.sample import ANSWERS, QUESTION, clean, parse_answers, texts_in
from kiloword.errors import LeftOut, article
from kiloword.files import cache_folder, replacing
from kiloword.terminal import shown
from kiloword.types import BadSample, LabelSet, Source

DEFAULTS = TableOptions()
IMAGE_COLUMNS = ("image", "filepath", "img", "file_name", "jpg", "png", "webp")
LABEL_COLUMNS = ("label", "class", "cls", "fine_label")
CAPTION_COLUMNS = ("captions", "caption", "title")
ANSWER_COLUMNS = (ANSWERS, "answer")
INFO_COLUMNS = ("question_type", "answer_type", "image_id", "question_id", "domain")
SPLIT, STATUS = "split", "status"  # the second: of downloads, as img2dataset writes it
SCHEMA = pa.schema(
    {
        "key": pa.large_binary(), "captions": pa.large_list(pa.large_string()), "label": pa.int64(),
        "labels": pa.list_(pa.int64()), "info": pa.string(), "error": pa.string(), "file": pa.large_binary(),
        "offset": pa.int64(), "size": pa.int64(),
    }
)  # fmt: skip


def fingerprint(path: Path) -> str:
    """A digest of a file's bytes, 32 hexadecimal digits. Errors: OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest(*lines: str) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


class NoRows(ValueError):
    """A table has no rows."""


@dataclass(frozen=True)
class TableColumns:
    """Names of the columns that are read."""

    image: str
    texts: dict[str, str]  # column by key: of questions their key in `Record.info`, of captions the column itself
    info: tuple[str, ...] = ()  # columns of other values of `Record.info`
    label: str = ""  # column of labels; "": none


def choose(path: Path, names: Sequence[str], options: TableOptions) -> TableColumns:
    """The columns that are read. Errors: ValueError for a missing column, and one that the table has twice."""

    def first(*known: str) -> str:
        return next((column for column in known if column in names), "")

    named = [options.image, *options.caption, options.question, options.answer, options.label, *options.info]
    check_columns(path, [*dict.fromkeys(names)], *filter(None, [*named, SPLIT if options.split else ""]))
    image, question = options.image or first(*IMAGE_COLUMNS), options.question or first(QUESTION)
    answers, caption, label = options.answer or first(*ANSWER_COLUMNS), first(*CAPTION_COLUMNS), first(*LABEL_COLUMNS)
    listed = shown(", ".join(names)[:200]) or "none"
    if (options.caption and (options.question or options.answer)) or (options.answer and not question):
        raise ValueError(
            f"{path}: questions need question=COLUMN, and answer=COLUMN where they have answers, without caption=. It "
            f"has the columns {listed}."
        )
    if question and (answers or options.question) and not options.caption:
        columns = {QUESTION: question, **({ANSWERS if options.answer else answers: answers} if answers else {})}
    else:
        caption = caption or ("" if label else first("text"))  # as the library datasets names it
        columns = {c: c for c in options.caption or ((caption,) if caption else ())}
    info = tuple(dict.fromkeys([*options.info, *(c for c in INFO_COLUMNS if names.count(c) == 1)]))
    label = options.label or ("" if columns else label)
    if not image or not (columns or label):
        raise ValueError(
            f"{path} has the columns {listed}. Expected `image` (or `filepath`) and `caption`, `captions` (or "
            "`title`) in its first line; or `image`, `question` and `answers` (or `answer`); or `image` and `label`. "
            f"Other columns are named by {FORM}."
        )
    check_columns(path, names, image, *columns.values(), *info, *filter(None, [label]))
    return TableColumns(image, columns, info, label)


def open_table(name: str, path: Path, options: TableOptions = DEFAULTS, prefix: str = "") -> Rows:
    """The samples of one file; malformed lines come last, as bad samples.

    Of captions: one sample per image, in order of first appearance; of questions or labels alone: one per row. A key is
    the image's path without suffix, or the number of its first row where the table contains the images. Of questions,
    which may share an image, the path is followed by the number of the sample. The fingerprint covers the bytes of the
    table and the options that select rows and texts. Args: prefix: of keys that are numbers.

    Errors: ValueError for missing columns, an unreadable table; NoRows.
    """
    if not path.stat().st_size:
        raise NoRows(f"{path} is empty.")
    contents, other = fingerprint(path), beside(path, options)
    chosen, defaults = ({**asdict(one), "images": "", "annotations": ""} for one in (options, DEFAULTS))
    digest = _digest(contents, fingerprint(other)) if other else contents
    digest = _digest(digest, repr(chosen), prefix) if chosen != defaults or prefix else digest
    folder, (classnames, templates) = images_folder(path, options.images), class_data(path.parent)
    table, file = made_once(
        f"table 2 {digest} {path.name} {classnames} {cache_folder()}",
        lambda: _table(name, path, options, other, contents, classnames, prefix),
    )
    told = json.loads(table.schema.metadata[b"kiloword"])
    if told["inside"]:
        _copied(path, told["inside"], contents)
    elif options.images or told["subset"] is not None:
        names = (os.fsdecode(one.as_py()) for one in table.column("file") if one.is_valid)
        if options.images:
            check_images(path, folder, names)
        else:
            folder = nearby(path, list(names), told["subset"])
    notes = [f"{name}: {line}" for line in told["notes"]]
    return Rows(
        name, table, folder, digest, classnames=told["classnames"], templates=templates if told["labels"] else None,
        notes=notes, path=file,
    )  # fmt: skip


def _table(
    name: str,
    path: Path,
    options: TableOptions,
    other: Path | None,
    contents: str,
    listed: list[str] | None,
    prefix: str,
) -> pa.Table:
    """The rows of a file, and as metadata what is said of them all."""
    file, place = read_annotations(path, options, other), None
    columns = choose(path, file.names if file else column_names(path), file.options if file else options)
    with arrow_errors(path):
        if file is None:
            place = _copied(path, columns.image, contents) if _inside(path, columns.image) else None
            file = _read(path, columns, options, place)
        if columns.label and path.suffix.lower() == ".parquet":
            listed = class_label_names(path, columns.label) or listed
        labels, classnames = labels_of(name, file.cells(columns.label), listed) if columns.label else ([], None)
        left, splits, split = LeftOut("row"), dict[Any, None](), file.options.split
        made, tables, kept = list[dict[str, Any]](), list[pa.Table](), 0
        for n, row in enumerate(file):
            part, status = _text(row.get(SPLIT)), _text(row.get(STATUS, "success"))
            if split and part != split:
                splits[str(part)] = None
                continue
            where = _place(path, row.get(columns.image), place, f"{prefix}{n}")
            if place and status != "success" and not where["group"]:
                left.add(str(n), f"the download failed ({status})")
                continue
            if QUESTION in columns.texts and not place:
                where["key"] += b"#%d" % kept
            made.append(where | _parsed(row, columns, labels[n] if labels else None))
            kept += 1
            made[-1]["group"] = made[-1]["group"] or b"\0%d" % n  # without an image: a sample of its own
            if len(made) == _CHUNK:
                tables.append(pa.Table.from_pylist(made, _GROUPED))
                made.clear()
        tables.append(pa.Table.from_pylist(made, _GROUPED))
    if not kept and not file.malformed:
        which = f"rows whose {SPLIT} is {shown(split[:60])!r}" if split else "rows"
        raise NoRows(
            f"{path} has no {which}. Expected an image and a caption, or a question and its answers, in each row."
            + f" It has {shown(', '.join(splits)[:200])}." * bool(splits)
        )
    table = pa.concat_tables(tables).combine_chunks()
    table = table.select(SCHEMA.names) if QUESTION in columns.texts or not columns.texts else _merged(table)
    bad = [{"key": key_bytes(line), "error": reason} for line, reason in file.malformed]
    told = {
        "classnames": classnames, "labels": bool(columns.label), "notes": [*file.notes, *left.lines()],
        "inside": columns.image if place else "", "subset": file.subset,
    }  # fmt: skip
    whole = pa.concat_tables([table, pa.Table.from_pylist(bad, SCHEMA)])
    return whole.replace_schema_metadata({b"kiloword": json.dumps(told).encode()})


_CHUNK = 1 << 16
_GROUPED = SCHEMA.append(pa.field("group", pa.large_binary()))  # equal for rows of one image


def _text(cell: Any) -> Any:
    return os.fsdecode(cell) if isinstance(cell, bytes) else cell


def _place(path: Path, image: Any, place: Path | None, number: str) -> dict[str, Any]:
    """The columns of a row that say where its image is, and its key."""
    if place:
        if image["path"]:
            return {"key": number.encode(), "file": image["path"], "group": image["path"]}
        group = b"%d" % image["offset"] if image["size"] else None
        return {**image, "key": number.encode(), "file": os.fsencode(place), "group": group}
    if isinstance(image, list | dict):
        raise ValueError(f"{path}: an image is {article(type(image).__name__)}. Expected the name of one in each row.")
    name = b"" if image is None else image if isinstance(image, bytes) else key_bytes(str(decoded(image)))
    stem = os.path.splitext(os.fsdecode(name))[0] if name else f"row {number}"
    return {"key": key_bytes(stem), "file": name or None, "group": name or None}


def _parsed(cells: Mapping[str, Any], columns: TableColumns, label: Label) -> dict[str, Any]:
    """The columns of a row that say what is known of its image."""
    try:
        info = {column: decoded(cells.get(column)) for column in columns.info}
        info = {column: value for column, value in info.items() if value is not None and value != ""}
        if QUESTION in columns.texts:
            captions = _answers(cells, columns.texts, info)
        else:
            captions = [text for c in columns.texts for text in texts(cells.get(c), lines=c == "captions")]
        if isinstance(label, str):
            raise BadSample(label)
    except BadSample as error:
        return {"error": str(error)}
    several = label.indices if isinstance(label, LabelSet) else None
    return {
        "captions": captions, "info": json.dumps(info, default=str) if info else None, "labels": several,
        "label": -1 if label is None and columns.label else label if several is None else None,
    }  # fmt: skip


def _answers(cells: Mapping[str, Any], columns: Mapping[str, str], info: dict[str, Any]) -> list[str]:
    """The answers to a question, which `info` gets with it; none to a test question. Raises BadSample."""
    question, key = decoded(cells.get(columns[QUESTION])), next((key for key in columns if key != QUESTION), "")
    info[QUESTION] = "" if question is None else question  # an empty cell is bad, not a row without a question
    if not key and isinstance(question, str) and question.strip():
        return []
    answers = decoded(cells.get(columns.get(key, "")))
    answers = answers.get("answer") if isinstance(answers, dict) else answers
    if isinstance(answers, str):
        listed = texts_in(answers, objects=key == ANSWERS)
        answers = [a for a in answers.split("\n") if a.strip()] if key == ANSWERS and listed == [answers] else listed
    if key and answers is not None:
        info[key] = answers
    return clean(parse_answers(info) or [])


def _merged(table: pa.Table) -> pa.Table:
    """Samples from rows: those of one image are one, at the place of the first, with the captions of all."""
    numbered = table.append_column("row", pa.array(np.arange(len(table))))
    of_image = numbered.group_by("group", use_threads=False).aggregate([("row", "list"), ("error", "first")])
    rows = of_image.column("row_list").combine_chunks()
    several = table.column("captions").combine_chunks().take(rows.values)
    captions = pa.LargeListArray.from_arrays(several.offsets.take(rows.offsets), several.values)
    merged = table.select(SCHEMA.names).take(rows.values.take(rows.offsets[:-1]))
    for name, column in (("captions", captions), ("error", of_image.column("error_first"))):
        merged = merged.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), column)
    return merged


def _read(path: Path, columns: TableColumns, options: TableOptions, place: Path | None) -> Annotations:
    """A csv, tsv or parquet. Args: place: of the images that it contains, which take the place of their column."""
    names = [*columns.texts.values(), *columns.info, *filter(None, [columns.label, options.split and SPLIT])]
    if place is None:
        table, malformed = read_table(path, [columns.image, *names])
    else:
        table, malformed = read_table(path, [*names, *[STATUS] * (STATUS in column_names(path))])
        table = table.append_column(columns.image, mapped(place.with_suffix(".arrow")).to_struct_array())
    return Annotations(table, table.column_names, options, malformed=malformed)


def _inside(path: Path, column: str) -> bool:
    """Whether a parquet contains images, not paths alone. Errors: ValueError for a struct of neither."""
    if path.suffix.lower() != ".parquet":
        return False
    kind = pa.parquet.read_schema(path).field(column).type
    if not pa.types.is_struct(kind):
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
    fields = {field.name: field.type for field in kind}
    if not fields.keys() & {"bytes", "path"} or fields.get("bytes", pa.binary()) not in _BYTES:
        raise ValueError(
            f"{path}: the column {column} is {shown(str(kind)[:100])}. Expected paths, bytes, or a struct with `bytes` "
            "or `path`."
        )
    return True


_BYTES = (pa.binary(), pa.large_binary(), pa.null())


def _copied(path: Path, column: str, contents: str) -> Path:
    """A file in the cache folder with the images of a parquet, whose single values cannot be read, end to end.

    Beside it is an Arrow file: `offset` and `size` of each image, equal for equal images; `path` of one without bytes.
    """
    place = cache_folder() / "rows" / f"{_digest(contents, column)}.images"
    if not (place.is_file() and place.with_suffix(".arrow").is_file()):
        known, rows, end = dict[bytes, int](), list[tuple[int, int, bytes | None]](), 0
        with arrow_errors(path), keeping(place), replacing(place) as file, pa.parquet.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches(batch_size=256, columns=[column]):
                for cell in batch.column(0).to_pylist():
                    one = cell if isinstance(cell, dict) else {"bytes": cell}
                    image = one.get("bytes") or b""
                    digest = hashlib.blake2b(image, digest_size=16).digest()
                    if digest not in known:
                        known[digest], end = end, end + file.write(image)
                    name = one.get("path") if one.get("bytes") is None else None
                    rows.append((known[digest], len(image), name and os.fsencode(name)))
            kinds = {"offset": pa.int64(), "size": pa.int64(), "path": pa.large_binary()}
            columns = zip(*rows, strict=True) if rows else ((), (), ())
            write(place.with_suffix(".arrow"), pa.table(dict(zip(kinds, columns, strict=True)), pa.schema(kinds)))
    touched(place.with_suffix(".arrow"))
    return touched(place)


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
    first = parts[0]
    if any(part.classnames != first.classnames for part in parts):
        raise ValueError(f"{name}: its tables name different classes. Put classnames.txt with all beside them.")
    notes = [note for part in parts for note in part.notes] + [f"{name}: {line}" for line in left.lines()]
    digest, tables = _digest(*(f"{part.fingerprint} {os.path.abspath(part.folder)}" for part in parts)), []
    for part in parts:
        files = part.table.column("file")
        slash, inner = (pa.scalar(os.fsencode(one), files.type) for one in ("/", os.path.abspath(part.folder)))
        below = pc.binary_join_element_wise(inner, files, slash)
        absolute = pc.if_else(pc.starts_with(files, "/"), files, below)
        tables.append(part.table.set_column(SCHEMA.get_field_index("file"), "file", absolute))
    table, file = made_once(f"tables 2 {digest} {first.classnames} {cache_folder()}", lambda: pa.concat_tables(tables))
    digest = _digest(*(part.fingerprint for part in parts))
    return Rows(
        name, table, folder, digest, classnames=first.classnames, templates=first.templates, notes=notes, path=file
    )


def open_texts(src: str) -> Rows | None:
    """The texts without images that `src` names: a table without a column of images, or a .txt with one in every line.

    Returns: rows without `file`; None for data that has images, or where nothing is.
    Errors: ValueError for a table that cannot be read, has no rows or no column of captions.
    """
    name, query = split_query(src)
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    if not path.is_file() or suffix not in (".csv", ".tsv", ".parquet", ".txt"):
        return None
    if suffix == ".txt":
        if query:
            raise ValueError(f"{name} takes no options: it has a text in every line.")
        columns: tuple[str, ...] = ("text",)
        rows: Iterable[dict[str, Any]] = [{"text": [line]} for line in path.read_bytes().splitlines() if line.strip()]
    else:
        options, names = parse_query(name, query, TableOptions), column_names(path)
        if options.image or options.question or options.answer or set(IMAGE_COLUMNS) & set(names):
            return None
        columns = options.caption or tuple(c for c in (*CAPTION_COLUMNS, "text") if c in names)[:1]
        if not columns or not set(columns) <= set(names) or options.split or options.images:
            return None  # whose message names the columns
        check_columns(path, names, *columns)
        with arrow_errors(path):
            rows = rows_in(read_table(path, columns)[0])
    chosen = TableColumns("", {column: column for column in columns})
    made = [{"key": b"%d" % n, **_parsed(row, chosen, None)} for n, row in enumerate(rows)]
    if not made:
        raise ValueError(f"{name} has no rows. Expected a text in each, as in {FORM} without image.")
    for row in made:
        if not row.get("captions"):
            row.setdefault("error", "no text")
    table = pa.Table.from_pylist(made, pa.schema([SCHEMA.field(one) for one in ("key", "captions", "error")]))
    return Rows(src, table, path.parent, fingerprint(path))


def has_images(source: Source) -> bool:
    """Whether a source is data with images, not texts alone (`open_texts`)."""
    return not isinstance(source, Rows) or "file" in source.table.column_names
