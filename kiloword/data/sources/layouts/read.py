"""Which layout a file has, by its keys or its first line, and where its images are."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from kiloword.data.sources.layouts import captions, questions
from kiloword.data.sources.layouts.objects import column, keys_of, load_json
from kiloword.data.sources.query import TableOptions, hold_images, images_folder, no_images
from kiloword.terminal import shown

_SUBSET = re.compile(r"(?:train|val|test)\d{4}")  # of COCO, and its folder
_TRIED = 3  # images by which a folder is recognised
_FOLDERS, _FEW = 1000, 10  # folders of one folder that are looked into, for these and for all images
_EXPECTED = (
    "Expected captions of COCO or NoCaps (`images`, `annotations`), Karpathy's splits (`images` with `sentences`), "
    "questions of VQAv2 (`questions`), or a list of objects with `image` and `caption`"
)


@dataclass(frozen=True, kw_only=True)
class JsonOptions(TableOptions):
    """Parameters of a json."""

    annotations: str = ""  # file of the answers to a json of questions


@dataclass(frozen=True)
class AnnotationTable:
    """A file as a table."""

    table: pa.Table
    folder: Path  # of the images
    options: TableOptions
    notes: list[str] = field(default_factory=list)
    beside: Path | None = None  # another file that was read
    malformed: list[tuple[str, str]] = field(default_factory=list)  # names and reasons of lines that are no rows


def read_json(path: Path, options: JsonOptions) -> AnnotationTable:
    """A json of captions or questions. Errors: ValueError, which names a key, when it has no known layout."""
    data = load_json(path)
    if isinstance(data, list):
        return _located(path, options, _rows(path, data), "")
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds neither an object nor a list. {_EXPECTED}.")
    if "questions" in data:
        answers = _answers_file(path, options.annotations)
        table, subset = questions.vqa(path, data, answers)
        layout = _located(path, replace(options, question=options.question or "question"), table, subset)
        return replace(layout, beside=answers)
    if options.annotations:
        raise ValueError(f"{path}: annotations= is not read: only questions of VQAv2 have such a file.")
    if "images" not in data:
        hint = " Name the file of questions, with ?annotations=." if _answers(data) else ""
        raise ValueError(f"{path} has the keys {keys_of(data)}. {_EXPECTED}.{hint}")
    images = data["images"]
    if isinstance(images, list) and any(isinstance(image, dict) and "sentences" in image for image in images[:1]):
        return _located(path, options, captions.karpathy(path, data, options), "")
    table, notes = captions.coco(path, data)
    year = _SUBSET.search(path.name)
    return replace(_located(path, options, table, year[0] if year else ""), notes=notes)


def is_tokens(path: Path) -> bool:
    """Whether the first line is one of Flickr's token files."""
    with path.open("rb") as file:
        return captions.TOKEN.fullmatch(file.readline(1 << 20).rstrip(b"\r\n")) is not None


def read_tokens(path: Path, options: TableOptions) -> AnnotationTable:
    """Captions of Flickr8k or Flickr30k. A split is a file that lists images, as Flickr_8k.testImages.txt."""
    split = beside(path, "split", options.split) if options.split else None
    table, other = captions.tokens(path, split)
    layout = _located(path, replace(options, split=split.name if split else ""), table, "")
    reason = "line is not IMAGE#NUMBER, a tab and a caption"
    return replace(layout, beside=split, malformed=[(f"line {shown(line[:60])}", reason) for line in other])


def _answers(data: dict[str, Any]) -> bool:
    rows = data.get("annotations")
    return isinstance(rows, list) and any(isinstance(row, dict) and "question_id" in row for row in rows[:1])


def _rows(path: Path, rows: list[Any]) -> pa.Table:
    """A list of objects as a table; a key that some lack is empty there, and values of other types are omitted."""
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is a list of something other than objects. {_EXPECTED}.")
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: column([_cell(row.get(name)) for row in rows]) for name in names})


def _cell(value: Any) -> Any:
    if isinstance(value, list):  # of texts, of VizWiz' answers, or of class indices
        if value and all(type(one) is int for one in value):
            return value
        texts = [one.get("answer") if isinstance(one, dict) else one for one in value if one is not None]
        return texts if all(isinstance(text, str) for text in texts) else None
    if isinstance(value, float) and value.is_integer():  # as pandas writes numbers beside empty cells
        return int(value)
    return None if isinstance(value, dict | float | bool) else value


def _answers_file(path: Path, named: str) -> Path | None:
    """The file of answers: as named, else by VQAv2's convention beside the questions; None: the questions have none."""
    if named:
        return beside(path, "annotations", named)
    usual = path.with_name(path.name.replace("OpenEnded_", "").replace("questions", "annotations"))
    return usual if usual != path and usual.is_file() else None


def beside(path: Path, parameter: str, named: str) -> Path:
    """A file that a parameter names: absolute, beside the file, or in the current folder. Errors: ValueError."""
    places = [path.parent / Path(named).expanduser(), Path(named)]
    existing = next((place for place in places if place.is_file()), None)
    if existing is None:
        listed = ", ".join(dict.fromkeys(map(str, places)))
        raise ValueError(f"{path}: there is no file {parameter}={shown(named[:200])}. Looked for {listed}.")
    return existing


def _located(path: Path, options: TableOptions, table: pa.Table, subset: str) -> AnnotationTable:
    """The table with the folder of its images. Errors: ValueError when not one image exists there."""
    names = _names(path, table, options.image or "image")
    if options.images:
        tiers = [[images_folder(path, options.images)]]
        looked = str(tiers[0][0])
    else:
        tiers = _nearby(path.absolute(), subset)
        looked = f"{path.parent}, {path.absolute().parent.parent} and their folders"
    first = ([folder for folder in folders if hold_images(folder, names[:_TRIED])] for folders in tiers)
    every = ([f for f in folders[:_FEW] if hold_images(f, names)] for folders in tiers)  # the first ones are missing
    places = next(filter(None, chain(first, every)), [])
    places = [folder for folder in places if subset and folder.name == subset] or places
    if names and not places:
        raise no_images(path, names[0], looked)
    if len(places) > 1:
        listed = " and in ".join(map(str, places[:3]))
        raise ValueError(f"{path}: its images are in {listed}. Choose one: {path.name}?images=FOLDER.")
    return AnnotationTable(table, places[0] if places else path.parent, options)


def _names(path: Path, table: pa.Table, column: str) -> list[str]:
    """The names of the images; none in a table without the column. Errors: ValueError for lists."""
    cells = table.column(column) if column in table.column_names else pa.chunked_array([], pa.large_binary())
    if pa.types.is_large_list(cells.type):
        raise ValueError(f"{path}: `{shown(column[:60])}` holds a list. Expected the name of one image in each object.")
    return [os.fsdecode(name) if isinstance(name, bytes) else str(name or "") for name in cells.to_pylist()]


def _nearby(path: Path, subset: str) -> list[list[Path]]:
    """Folders where images may be, the first choice first: that of the file, those in it, and the same one higher."""
    tiers: list[list[Path]] = []
    for parent in (path.parent, path.parent.parent):
        inner = [parent / "images" / subset] if subset else []
        with suppress(OSError), os.scandir(parent) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
            names = sorted(names, key=lambda name: name != subset)
            inner += [parent / name for name in names[:_FOLDERS]]
        tiers += [[parent], inner]
    return tiers
