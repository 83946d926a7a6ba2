"""Captions and questions in files as their authors distribute them: each layout becomes a table, as of a csv.

COCO's json (and NoCaps'), Karpathy's splits, VQAv2's questions with their annotations, lists of objects, and token
files of Flickr8k and Flickr30k. The keys of a file, or its first line, say which layout it has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from sys import intern
from typing import Any

import pyarrow as pa

from kiloword.data.columns import JSON, load_json, load_objects, rows_in
from kiloword.data.query import TableOptions
from kiloword.data.rows import image_file
from kiloword.errors import article
from kiloword.terminal import shown

Id = int | str
Columns = dict[str, list[Any]]
_TOKEN = re.compile(rb"([^\t\r\n#]+)#\w+\t([^\r\n]*)")  # of Flickr: IMAGE#NUMBER, a tab, a caption
_SUBSET = re.compile(r"(?:train|val|test)\d{4}")  # of COCO, and its folder
_DOMAIN = re.compile("^(in|near|out)-domain$")
_TRIED = 8  # images by which a folder is recognised
_FILE = "the file"
_EXPECTED = (
    "Expected captions of COCO or NoCaps (`images`, `annotations`), Karpathy's splits (`images` with `sentences`), "
    "questions of VQAv2 (`questions`), or a list of objects with `image` and `caption`"
)


@dataclass
class Annotations:
    """A file as rows, before its columns are chosen."""

    rows: pa.Table | Sequence[dict[str, Any]]
    names: Sequence[str]  # of the columns
    options: TableOptions
    notes: list[str] = field(default_factory=list)
    subset: str | None = None  # the folder that the images may be in, see `nearby`; None: the folder is known
    malformed: list[tuple[str, str]] = field(default_factory=list)  # names and reasons of lines that are no rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return rows_in(self.rows) if isinstance(self.rows, pa.Table) else iter(self.rows)

    def cells(self, column: str) -> list[Any]:
        """The cells of a column."""
        if isinstance(self.rows, pa.Table):
            return list(self.rows.column(column).to_pylist())
        return [row.get(column) for row in self.rows]


def beside(path: Path, options: TableOptions) -> Path | None:
    """Another file that is read: the answers to a json of questions, or the images of a split of a token file.

    Answers are in the file that `annotations` names, else in the one that VQAv2's convention does.
    Errors: ValueError for a missing one.
    """
    if path.suffix.lower() in JSON and not options.annotations:
        usual = path.with_name(path.name.replace("OpenEnded_", "").replace("questions", "annotations"))
        return usual if usual != path and usual.is_file() else None
    if options.annotations:
        option, named = "annotations", options.annotations
    elif options.split and _is_tokens(path):
        option, named = "split", options.split
    else:
        return None
    places = [path.parent / Path(named).expanduser(), Path(named)]
    return _existing(path, "file", f"{option}={named}", [place for place in places if place.is_file()], places)


def _is_tokens(path: Path) -> bool:
    with path.open("rb") as file:
        line = file.readline(1 << 20).rstrip(b"\r\n")
    return path.suffix.lower() in (".txt", ".token") and _TOKEN.fullmatch(line) is not None


def read_annotations(path: Path, options: TableOptions, other: Path | None) -> Annotations | None:
    """A file with a layout; None for other tables.

    Args: other: as of `beside`. Errors: ValueError for json without a layout, which names a key.
    """
    data = load_json(path) if path.suffix.lower() in JSON else None
    if options.annotations and not (isinstance(data, dict) and "questions" in data):
        raise ValueError(f"{path}: annotations= is not read: only questions of VQAv2 have such a file.")
    if path.suffix.lower() not in JSON:
        return _tokens(path, options, other) if _is_tokens(path) else None
    if isinstance(data, list):
        rows = load_objects(path, data)
        return Annotations(rows, list(dict.fromkeys(name for row in rows for name in row)), options, subset="")
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds neither an object nor a list. {_EXPECTED}.")
    notes: list[str] = []
    year = _SUBSET.search(path.name)
    subset = year[0] if year else ""
    if "questions" in data:
        columns, subset = _vqa(path, data, other)
        options = replace(options, question=options.question or "question")
    elif "images" not in data:
        hint = " Name the file of questions, with ?annotations=." if "annotations" in data else ""
        raise ValueError(f"{path} has the keys {_keys(data)}. {_EXPECTED}.{hint}")
    elif isinstance(data["images"], list) and any("sentences" in _keys(image) for image in data["images"][:1]):
        columns, subset = _karpathy(path, data, options), ""
    else:
        columns, notes = _coco(path, data)
    return Annotations(_rows(columns), list(columns), options, notes, subset)


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _coco(path: Path, data: dict[str, Any]) -> tuple[Columns, list[str]]:
    """Images in the order of the file, each with its captions; NoCaps' `domain` without "-domain". And notes."""
    images = values(path, [data], _FILE, "images", list)[0]
    ids, files = values(path, images, "images", "id"), values(path, images, "images", "file_name")
    captions: dict[Id, list[str]] = {one: [] for one in ids}
    if len(captions) < len(ids):
        raise ValueError(f"{path}: two of its images have the same id.")
    rows = values(path, [data], _FILE, "annotations", list)[0] if "annotations" in data else []
    of = values(path, rows, "annotations", "image_id")
    for image, text in zip(of, values(path, rows, "annotations", "caption"), strict=True):
        captions.get(image, []).append(text)
    columns: Columns = {"image": files, "captions": list(captions.values()), "image_id": ids}
    if any("domain" in image for image in images):
        domains = values(path, images, "images", "domain")
        columns["domain"] = [_DOMAIN.sub(r"\1", str(domain)) for domain in domains]
    unknown = sum(image not in captions for image in of)
    note = f"{unknown:,} captions are of images that `images` does not list; they are not used."
    return columns, [note] if unknown else []


def _karpathy(path: Path, data: dict[str, Any], options: TableOptions) -> Columns:
    """Images in the order of the file, with `raw` sentences; for split=train those of `restval` too, as is usual."""
    images = data["images"]
    files, splits, sentences = (
        values(path, images, "images", key, *kinds) for key, *kinds in (("filename",), ("split",), ("sentences", list))
    )
    folders = [str(image["filepath"]) + "/" if "filepath" in image else "" for image in images]
    if options.split == "train":
        splits = ["train" if split == "restval" else split for split in splits]
    named = "cocoid" if any("cocoid" in image for image in images) else "imgid"
    raw = [values(path, of, f"images[{n}].sentences", "raw") for n, of in enumerate(sentences)]
    return {
        "image": [f"{folder}{file}" for folder, file in zip(folders, files, strict=True)],
        "captions": raw,
        "split": splits,
        "image_id": values(path, images, "images", named),
    }


def _vqa(path: Path, data: dict[str, Any], annotations: Path | None) -> tuple[Columns, str]:
    """Questions in the order of the file, with all answers where there are annotations.

    Returns: the table, and the name of the subset of COCO (`val2014`), by which images are named.
    """
    rows = values(path, [data], _FILE, "questions", list)[0]
    ids = values(path, rows, "questions", "question_id")
    images = values(path, rows, "questions", "image_id")
    subset = str(data.get("data_subtype", "")).replace("-dev", "")  # test-dev2015 is a part of test2015
    columns: Columns = {
        "image": [f"COCO_{subset}_{i:012d}.jpg" if isinstance(i, int) and subset else str(i) for i in images],
        "question": values(path, rows, "questions", "question"),
        "question_id": ids,
        "image_id": images,
    }
    if annotations is not None:
        columns |= _answers(annotations, ids)
    return columns, subset


def _answers(path: Path, ids: list[Id]) -> Columns:
    """The columns of answers to the questions with these ids."""

    def short(row: dict[str, Any]) -> Any:
        """An answer as its text alone: the file of VQAv2's training questions has 4.4 million, few different ones."""
        answer = row.get("answer")
        return intern(answer) if isinstance(answer, str) and "question_id" not in row else row

    rows = values(path, [load_json(path, short)], _FILE, "annotations", list)[0]
    by_id = dict(zip(values(path, rows, "annotations", "question_id"), range(len(rows)), strict=True))
    missing = next((one for one in ids if one not in by_id), None)
    if missing is not None:
        raise ValueError(f"{path} has no answers to the question {shown(str(missing)[:60])}: is it of other questions?")
    ordered = [rows[by_id[one]] for one in ids]
    answers = values(path, ordered, "annotations", "answers", list)
    for n, several in enumerate(answers):
        if not all(isinstance(answer, str) for answer in several):
            raise ValueError(f"{path}: annotations[{n}].answers holds an object without the key `answer`.")
    kinds = [kind for kind in ("question_type", "answer_type") if any(kind in row for row in rows)]
    return {"answers": answers, **{kind: values(path, ordered, "annotations", kind) for kind in kinds}}


def _tokens(path: Path, options: TableOptions, split: Path | None) -> Annotations:
    """Captions of Flickr8k or Flickr30k. Args: split: a file that lists images, as Flickr_8k.testImages.txt."""
    listed = {line.strip() for line in split.read_bytes().splitlines()} if split else set()
    rows, malformed = list[dict[str, Any]](), list[tuple[str, str]]()
    for line in filter(bytes.strip, path.read_bytes().splitlines()):
        if match := _TOKEN.fullmatch(line):
            rows.append({"image": match[1], "caption": match[2], "split": options.split * (match[1] in listed)})
        else:
            text = shown(line.decode(errors="replace")[:60])
            malformed.append((f"line {text}", "line is not IMAGE#NUMBER, a tab and a caption"))
    return Annotations(rows, ["image", "caption", "split"], options, subset="", malformed=malformed)


def values(path: Path, rows: Any, where: str, key: str, *kinds: type) -> list[Any]:
    """The value of a key in each object of a list. Errors: ValueError, which names the place and the key."""
    for n, row in enumerate(rows):
        place = where if where == _FILE else f"{where}[{n}]"
        if not isinstance(row, dict) or key not in row:
            raise ValueError(f"{path}: {place} has no key `{key}`; it has {_keys(row)}.")
        if kinds and not isinstance(row[key], kinds):
            found, expected = article(type(row[key]).__name__), " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{path}: `{key}` of {place} is {found}. Expected {expected}.")
    return [row[key] for row in rows]


def _keys(row: Any) -> str:
    return (shown(", ".join(row)[:200]) if isinstance(row, dict) else "") or "none"


def images_folder(path: Path, named: str) -> Path:
    """The folder of a file's images: absolute, beside the file, beside its folder, or in the current folder.

    Args: named: by the option `images`; "": the folder of the file. Errors: ValueError when there is none of this name.
    """
    folder = Path(named).expanduser()
    places = [parent / folder for parent in (path.parent, path.absolute().parent.parent, Path())] if named else [path]
    found = [place for place in places if place.is_dir()] if named else [path.parent]
    return _existing(path, "folder", f"images={named}", found, places)


def _existing(path: Path, kind: str, option: str, found: list[Path], places: list[Path]) -> Path:
    if not found:
        listed = ", ".join(dict.fromkeys(map(str, places)))
        raise ValueError(f"{path}: there is no {kind} {shown(option[:200])}. Looked for {listed}.")
    return found[0]


def check_images(path: Path, folder: Path, names: Iterable[str], looked: str = "") -> None:
    """Errors: ValueError when a folder holds none of the images that a file names."""
    first = ""
    for name in names:
        if _holds(folder, [name]):
            return
        first = first or name
    if first:
        raise ValueError(
            f"{path}: none of its images, such as {shown(first[:200])}, is in {looked or folder}. Name their folder: "
            f"{path.name}?images=FOLDER."
        )


def _holds(folder: Path, names: Iterable[str]) -> bool:
    with suppress(ValueError):  # a zero byte in a name
        return any(name and os.path.exists(image_file(os.path.join(folder, name))) for name in names)
    return False


def nearby(path: Path, names: Sequence[str], subset: str) -> Path:
    """The folder of the images of a file: that of the file or a folder in it, or the same one folder higher.

    Args: subset: the folder that is taken where several hold some. Errors: ValueError when not one image is there, or
    several folders hold some.
    """
    tried, above = names[:: -(-len(names) // _TRIED) or 1], path.absolute().parent
    for parent in (above, above.parent):
        with suppress(OSError):
            inner = sorted(Path(entry) for entry in os.scandir(parent) if entry.is_dir() and entry.name[0] != ".")
            for places in ([parent], dict.fromkeys([*inner, parent / "images" / subset])):
                found = [place for place in places if _holds(place, tried)]
                found = [place for place in found if place.name == subset] or found
                if len(found) > 1:
                    listed = " and in ".join(map(str, found[:3]))
                    raise ValueError(f"{path}: its images are in {listed}. Choose one: {path.name}?images=FOLDER.")
                if found:
                    return found[0]
    check_images(path, path.parent, names, f"{above}, {above.parent} and their folders")
    return path.parent
