"""Captions and questions in files as their authors distribute them: each layout becomes columns, as of a csv.

COCO's json (and NoCaps'), Karpathy's splits, VQAv2's questions with their annotations, lists of objects, and token
files of Flickr8k and Flickr30k. The keys of a file, or its first line, say which layout it has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from kiloword.data.columns import JSON, Cells, Malformed, load_json, load_objects
from kiloword.data.query import TableOptions
from kiloword.data.rows import image_file
from kiloword.terminal import shown

_TOKEN = re.compile(r"([^\t\r\n#]+)#\w+\t([^\r\n]*)")  # of Flickr: IMAGE#NUMBER, a tab, a caption
_SUBSET = re.compile(r"(?:train|val|test)\d{4}")  # of COCO, and its folder
_TRIED = 8  # images by which a folder is recognised
_EXPECTED = (
    "Expected captions of COCO or NoCaps (`images`, `annotations`), Karpathy's splits (`images` with `sentences`), "
    "questions of VQAv2 (`questions`; their annotations lie beside them, or are named by ?annotations=), or a list of "
    "objects with `image` and `caption`."
)


class Layout(NamedTuple):
    """A file as columns, before they are chosen."""

    cells: Cells
    malformed: Malformed
    options: TableOptions
    notes: Sequence[str] = ()
    subset: str = ""  # a folder that the images may be in


def beside(path: Path, options: TableOptions) -> Path | None:
    """Another file that is read: the answers to a json of questions, or the images of a split of a token file.

    Answers are in the file that `annotations` names, else in the one that VQAv2's convention does.
    Errors: ValueError for a missing one.
    """
    if options.annotations:
        return named(path, "annotations", options.annotations)
    if path.suffix.lower() in JSON:
        usual = path.with_name(path.name.replace("OpenEnded_", "").replace("questions", "annotations"))
        return usual if usual != path and usual.is_file() else None
    return named(path, "split", options.split) if options.split and _is_tokens(path) else None


def named(path: Path, option: str, name: str) -> Path:
    """What an option of a file names: absolute, beside the file, beside its folder, or in the current folder.

    Errors: ValueError where nothing is there.
    """
    places = [parent / Path(name).expanduser() for parent in (path.parent, path.absolute().parent.parent, Path())]
    kind, fits = ("folder", Path.is_dir) if option == "images" else ("file", Path.is_file)
    found = next(filter(fits, places), None)
    if found is None:
        listed = ", ".join(dict.fromkeys(map(str, places)))
        raise ValueError(f"{path}: no {kind} is named {option}={shown(name[:200])}. Looked for {listed}.")
    return found


def _is_tokens(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        return path.suffix.lower() in (".txt", ".token") and bool(_TOKEN.fullmatch(file.readline(1 << 20).rstrip("\n")))


def read_layout(path: Path, options: TableOptions, other: Path | None) -> Layout | None:
    """A file with a layout; None for other tables.

    Args: other: as of `beside`. Errors: ValueError for json without a layout, which names a missing key.
    """
    data: Any = load_json(path) if path.suffix.lower() in JSON else None
    if options.annotations and not (isinstance(data, dict) and "questions" in data):
        raise ValueError(f"{path}: annotations= is not read: only questions of VQAv2 have such a file.")
    if path.suffix.lower() not in JSON:
        return _tokens(path, options, other) if _is_tokens(path) else None
    if isinstance(data, list):
        return Layout(*load_objects(path, data), options)
    try:
        if "questions" in data:
            cells, subset = _vqa(data, other)
            return Layout(cells, [], replace(options, question=options.question or "question"), subset=subset)
        if any("sentences" in image for image in data["images"][:1]):
            return Layout(_karpathy(data["images"], options.split), [], options)
        cells, unknown = _coco(data["images"], data.get("annotations", []))
        note = f"{unknown:,} captions are of images that `images` does not list; they are not used."
        return Layout(cells, [], options, [note] if unknown else [], "".join(_SUBSET.findall(path.name)[:1]))
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"has no key {error} where one is" if isinstance(error, KeyError) else "has another form than"
        files = path if other is None else f"{path} or {other}"
        raise ValueError(f"{files} {shown(reason[:80])} expected. {_EXPECTED}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _coco(images: Any, rows: Any) -> tuple[Cells, int]:
    """Images in the order of the file, each with its captions; NoCaps' `domain` without "-domain".

    Returns: also the number of captions of other images.
    """
    captions: dict[Any, list[Any]] = {image["id"]: [] for image in images}
    if len(captions) < len(images):
        raise ValueError("two of its images have the same id.")
    unknown = [row["image_id"] for row in rows if row["image_id"] not in captions]
    for row in rows:
        captions.get(row["image_id"], []).append(row["caption"])
    cells: Cells = {"image": [image["file_name"] for image in images], "captions": [*captions.values()]}
    if any("domain" in image for image in images):
        cells["domain"] = [str(image["domain"]).removesuffix("-domain") for image in images]
    return cells | {"image_id": [*captions]}, len(unknown)


def _karpathy(images: Any, split: str) -> Cells:
    """Images in the order of the file, with `raw` sentences; for split=train those of `restval` too, as is usual."""
    name = "cocoid" if any("cocoid" in image for image in images) else "imgid"
    taken = {"restval": "train"} if split == "train" else {}
    return {
        "image": [os.path.join(image.get("filepath", ""), image["filename"]) for image in images],
        "captions": [[sentence["raw"] for sentence in image["sentences"]] for image in images],
        "split": [taken.get(image["split"], image["split"]) for image in images],
        "image_id": [image[name] for image in images],
    }


def _vqa(data: dict[str, Any], annotations: Path | None) -> tuple[Cells, str]:
    """Questions in the order of the file, with all answers where there are annotations.

    Returns: the columns, and the name of the subset of COCO (`val2014`), by which images are named.
    """
    rows = data["questions"]
    subset = str(data.get("data_subtype", "")).replace("-dev", "")  # test-dev2015 is a part of test2015
    cells: Cells = {key: [row[key] for row in rows] for key in ("question", "question_id", "image_id")}
    cells["image"] = [
        f"COCO_{subset}_{one:012d}.jpg" if isinstance(one, int) and subset else str(one) for one in cells["image_id"]
    ]
    if annotations is None:
        return cells, subset

    answers = load_json(annotations)["annotations"]
    by_id = {row["question_id"]: row for row in answers}
    missing = [str(one) for one in cells["question_id"] if one not in by_id]
    if missing:
        raise ValueError(f"{annotations.name} has no answers to the question {shown(missing[0])}. Is it of others?")
    of = [by_id[one] for one in cells["question_id"]]
    kinds = [kind for kind in ("question_type", "answer_type") if any(kind in row for row in answers)]
    return cells | {key: [row[key] for row in of] for key in ("answers", *kinds)}, subset


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8-sig", "surrogateescape").split("\n")


def _tokens(path: Path, options: TableOptions, split: Path | None) -> Layout:
    """Captions of Flickr8k or Flickr30k. Args: split: a file that lists images, as Flickr_8k.testImages.txt."""
    listed, lines = set(map(str.strip, _lines(split) if split else [])), _lines(path)
    found = [match.groups() for match in map(_TOKEN.fullmatch, lines) if match]
    cells: Cells = {"image": [image for image, _ in found], "caption": [caption for _, caption in found]}
    cells["split"] = [options.split * (image in listed) for image in cells["image"]]
    reason = "line is not IMAGE#NUMBER, a tab and a caption"
    wrong = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not _TOKEN.fullmatch(line)]
    return Layout(cells, [(f"line {n} ({shown(line[:60])})", reason) for n, line in wrong], options)


def images_folder(path: Path, option: str, names: pa.ChunkedArray, subset: str | None) -> Path:
    """The folder of a file's images: of `option`; else the file's, its parent, or one in them; else the current one.

    Args: names: of the images, [N] binary; subset: the folder that is taken where several hold some; None: of a table,
    which may serve for its captions alone. Errors: ValueError when several folders hold some images; when none does.
    """
    above, names = path.absolute().parent, names.drop_null()
    places = [[named(path, "images", option)]] if option else [
        level
        for parent in (above, above.parent)
        for level in ([parent], [*sorted(parent.glob("[!.]*")), parent / "images" / (subset or "")])
    ] + [[Path()]]  # fmt: skip

    def holds(place: Path, some: pa.ChunkedArray) -> bool:
        return any(os.path.exists(image_file(place, os.fsdecode(name.as_py()))) for name in some)

    tried = names[:: -(-len(names) // _TRIED) or 1]
    found = next(filter(None, ([one for one in dict.fromkeys(level) if holds(one, tried)] for level in places)), [])
    found = [place for place in found if place.name == subset] or found
    if len(found) > 1:
        listed = " and in ".join(map(str, found[:3]))
        raise ValueError(f"{path}: its images are in {listed}. Choose one: {path.name}?images=FOLDER.")
    if not found and len(names) and (option or subset is not None) and not holds(places[0][0], names):
        looked = places[0][0] if option else f"{above}, {above.parent}, their folders and the current one"
        raise ValueError(
            f"{path}: none of its images, such as {shown(os.fsdecode(names[0].as_py())[:200])}, is in {looked}. Name "
            f"their folder: {path.name}?images=FOLDER."
        )
    return (found or places[0])[0]
