"""Folders of images: with a .txt, .json or .cls of the same name beside each, class folders, and img2dataset's shards.

A folder with `metadata.csv`, `metadata.jsonl` or `metadata.parquet`, as the library datasets writes it, is a table.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from kiloword.data.classes.names import IMAGENET, names_of_wnids, places_among, spaced, templates
from kiloword.data.columns import class_data, column_names
from kiloword.data.edits import digest
from kiloword.data.images.decode import missing_package
from kiloword.data.query import TableOptions
from kiloword.data.rows import Rows, image_file, key_bytes
from kiloword.data.sample import IMAGE_SUFFIXES, MAX_TEXT, parse_beside, read_whole
from kiloword.data.tables import SCHEMA, choose, open_table
from kiloword.errors import LeftOut
from kiloword.terminal import shown
from kiloword.types import BadSample

LEAST = 2  # classes
OF_DATA = ("classnames.txt", "zeroshot_classification_templates.txt", "tree.json")  # files about all images
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FILE_NAME = "file_name"  # the column of images in these
_MARK = b'"kiloword-library-'
_BESIDE = ("txt", "json", "cls")
_OF_DEVICES = {
    *("@eadir", "#recycle", "@recycle", "@recently-snapshot", "#snapshot", "@__thumb", ".@__thumb"),  # network storage
    *("$recycle.bin", "system volume information", "lost+found", "__macosx"),
}
_PACKED = (".tar", ".zip", ".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".7z", ".rar")
_LONGEST_SUFFIX = 10  # characters, with its dot; more are part of a name
_DIGITS = 5  # of a folder that is named by its label, or of a shard of img2dataset
_WNID = re.compile(r"n[0-9]{8}")
log = logging.getLogger(__name__)


def open_images(name: str, folder: Path, deep: bool = False) -> Rows:
    """The images of one folder, sorted by name, with the captions and labels beside them.

    The fingerprint covers names and sizes. Args: deep: and those of its subfolders, as img2dataset writes files, with
    tables of metadata beside them. Errors: ValueError when the folder holds no images.
    """
    left, used = LeftOut("path"), {file for file in os.listdir(folder) if deep and file.endswith((".json", ".parquet"))}
    found = image_folders(folder, left, deep=deep, used={*OF_DATA, *used})
    return _rows(name, folder, found, left, *class_data(folder))


def open_classes(name: str, folder: Path) -> Rows:
    """The images below the folders of a folder, one folder per class (see docs/data.md), sorted by class and name.

    The fingerprint covers names, sizes and labels. Errors: ValueError for class names that do not fit.
    """
    folders, left = sorted(_folders(folder)), LeftOut("path")
    listed, prompts = class_data(folder)
    label_of, classnames = _labels(name, folders, listed)
    if prompts is None and listed is None and names_of_wnids(folders) is not None:
        prompts = templates(IMAGENET)

    def classes() -> Iterator[tuple[str, list[str], set[str]]]:
        for inner in folders:
            found = list(image_folders(folder, left, inner))
            if not any(images for _, images, _ in found):
                left.add(inner, "no images in it")
            yield from found
        next(image_folders(folder, left, deep=False, used=(*OF_DATA, *folders)))

    return _rows(name, folder, classes(), left, classnames, prompts, label_of)


def open_described(name: str, folder: Path) -> Rows | None:
    """The images that a table in a folder names; None without a table.

    The table is `metadata.csv`, `.jsonl` or `.parquet` of the library datasets, else the only file of the folder that
    has a column of images, where no image has a text file beside it. Errors: as of `open_table`.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in OF_DATA)
    tables = [file for file in files if file.name in METADATA and FILE_NAME in column_names(file)]
    options = TableOptions(image=FILE_NAME if tables else "")
    if not tables:
        stems = {file.stem for file in files if is_image(file.name)}
        tables = [file for file in files if file.stem not in stems and _is_table(file)]
        captioned = any(file.stem in stems and file.suffix in (".txt", ".json") for file in files)
        if captioned or len(tables) != 1 or has_shards(folder) or has_class_folders(folder):
            return None
    source = open_table(name, table := tables[0], options)
    left, root = LeftOut("path"), Path(source.folder)
    known = {Path(image_file(root, os.fsdecode(name))) for name in source.table.column("file").to_pylist() if name}
    for below, images, _ in image_folders(root, left, used={file.name for file in files}):
        for image in images:
            if root / below / image not in known:
                left.add(below + image, f"{table.name} does not name it")
    source.notes += [f"{name}: {line}" for line in left.lines()]
    return source


def _is_table(file: Path) -> bool:
    with suppress(ValueError, OSError):
        kinds = (".csv", ".tsv", ".txt", ".parquet", ".jsonl")
        return file.suffix.lower() in kinds and bool(choose(file, column_names(file), TableOptions()).image)
    return False


def _rows(
    name: str,
    folder: Path,
    found: Iterable[tuple[str, list[str], set[str]]],
    left: LeftOut,
    classnames: list[str] | None,
    prompts: list[str] | None,
    label_of: Mapping[str, int] | None = None,
) -> Rows:
    """Images, with what lies beside them.

    Args: found: as of `image_folders`; label_of: of the folders, in place of labels beside images.
    """
    images, sizes = list[str](), dict[str, int]()
    for below, names, files in found:
        images += [below + image for image in names]
        used = {f"{_stem(image)}.{suffix}" for image in names for suffix in _BESIDE} | set(names)
        paths = {below + file: folder / below / file for file in used & files}
        sizes |= {name: path.stat().st_size if path.is_file() else -1 for name, path in paths.items()}
    if not images:
        raise ValueError(no_images(folder, left))
    images.sort(key=lambda path: (path.partition("/")[0], path))
    lines = [f"{file} {size}" for file, size in sorted(sizes.items())]
    lines += [f"{inner} {label}" for inner, label in (label_of or {}).items()]
    stems = Counter(map(_stem, images))

    def row(image: str) -> dict[str, Any]:
        stem = _stem(image)
        made: dict[str, Any] = {"key": key_bytes(image if stems[stem] > 1 else stem), "file": os.fsencode(image)}
        try:
            txt, meta, cls = (_beside(folder / f"{stem}.{s}", sizes.get(f"{stem}.{s}")) for s in _BESIDE)
            made |= parse_beside(txt, meta, cls if label_of is None else b"%d" % label_of[image.partition("/")[0]])
        except BadSample as error:
            made["error"] = str(error)
        return made

    table = pa.Table.from_pylist([row(image) for image in images], SCHEMA)
    notes = [f"{name}: {line}" for line in left.lines()]
    return Rows(name, table, folder, digest(*lines), classnames=classnames, templates=prompts, notes=notes)


def _beside(file: Path, size: int | None) -> bytes | None:
    """The bytes of a file; None for a missing one. Raises BadSample."""
    if size == -1:
        raise BadSample(f"the {file.suffix} is no regular file")
    try:
        return None if size is None else read_whole(file, f"the {file.suffix}", MAX_TEXT)
    except OSError as error:
        raise BadSample(f"the {file.suffix} cannot be read ({error.strerror})") from None


def has_class_folders(folder: Path) -> bool:
    """Whether a folder has class folders: at least two with images, none that has class folders itself."""
    inner = parents_of_images(folder)
    parents = (one for one in inner if not any(map(is_image, os.listdir(folder / one))))
    return len(inner) >= LEAST and not any(len(parents_of_images(folder / one)) >= LEAST for one in parents)


def has_shards(folder: Path) -> bool:
    """Whether the folders of a folder are shards of img2dataset: numbered, with a text beside the first image."""
    folders = _folders(folder)
    if not folders or not all(name.isdecimal() and len(name) >= _DIGITS for name in folders):
        return False
    found = image_folders(folder, LeftOut("path"))
    image, files = next(((images[0], files) for _, images, files in found if images), ("", set[str]()))
    return not files.isdisjoint((f"{_stem(image)}.txt", f"{_stem(image)}.json"))


def parents_of_images(folder: Path) -> list[str]:
    """The inner folders that are data sets of images: class folders, or images."""
    found = {inner: image_folders(folder, LeftOut("path"), inner) for inner in sorted(_folders(folder))}
    return [inner for inner, folders in found.items() if any(images for _, images, _ in folders)]


def _folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, linked ones too, without hidden ones and those of devices."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return [name for name in names if not name.startswith((".", "__")) and not of_device(name)]


def image_folders(
    root: Path, left: LeftOut, inside: str = "", deep: bool = True, used: Collection[str] = (), passed: str = ""
) -> Iterator[tuple[str, list[str], set[str]]]:
    """Folders with their images: the path below `root` ("a/"), names of images, names of all that is there.

    Everything else goes to `left`, but for captions and labels beside images. Linked folders are not searched, so that
    the search ends and finds each image once. Args: inside: the folder of `root` to begin with; deep: search
    subfolders; used: names that are not left out; passed: the file of a library, whose folder is not searched.
    """
    folders = [inside]
    while folders:
        folder = folders.pop()
        below = f"{folder}/" if folder else ""
        try:
            with os.scandir(root / folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            if not folder:
                raise
            left.add(folder, f"it cannot be read ({error.strerror or error})")
            continue
        if passed and os.path.isfile(library := root / folder / passed) and _MARK in library.read_bytes():
            left.add(folder or root.name, "a library of kiloword")
            continue
        reasons = {entry.name: _reason(entry, deep) for entry in entries}
        inner = {entry.name for entry in entries if entry.is_dir()}
        folders += [below + name for name in reversed(reasons) if name in inner and not reasons[name]]
        images = [name for name, reason in reasons.items() if name not in inner and not reason]
        beside = {f"{_stem(name)}.{suffix}" for name in images for suffix in _BESIDE}
        for name, reason in reasons.items():
            if reason and name not in beside and name not in used:
                left.add(below + name, reason)
        yield below, images, set(reasons)


def no_images(folder: Path, left: LeftOut) -> str:
    """The message of a folder without images."""
    others = "".join(f" {line}." for line in left.lines())
    return f"{folder} holds no images ({', '.join(f'.{s}' for s in IMAGE_SUFFIXES)}).{others}"


def of_device(folder: str) -> bool:
    """Whether a folder of this name holds thumbnails, deleted files or metadata of a device or system."""
    return folder.casefold() in _OF_DEVICES or folder.startswith(".Trash")


def _reason(entry: os.DirEntry[str], deep: bool) -> str:
    """Why a folder is not searched, or a file is not used as an image; "" for one that is."""
    suffix, folder = os.path.splitext(entry.name)[1].lower(), entry.is_dir()
    if folder and of_device(entry.name):
        return "thumbnails or trash of a device"
    if entry.name.startswith("."):
        return "hidden"
    if folder and entry.is_symlink():
        return "links to folders are not followed, name the folder itself"
    if folder:
        return "" if deep else "subfolders are not searched"
    if entry.is_symlink() and not os.path.exists(entry):
        return "a link to nothing"
    if suffix in _PACKED:
        return "packed, unpack it first"
    if suffix[1:] in _BESIDE:
        return "no image of the same name"
    if not is_image(entry.name):
        return f"{suffix} is " * (0 < len(suffix) <= _LONGEST_SUFFIX) + "no suffix of an image"
    return missing_package(suffix[1:]) or ("" if entry.is_file() else "no regular file")


def is_image(file: str) -> bool:
    """Whether the suffix is that of an image; hidden files do not count."""
    return not file.startswith(".") and file.lower().endswith(tuple(f".{s}" for s in IMAGE_SUFFIXES))


def _stem(file: str) -> str:
    return os.path.splitext(file)[0]


def _labels(name: str, folders: Sequence[str], listed: list[str] | None) -> tuple[dict[str, int], list[str] | None]:
    """The label of each folder, and the names of all classes; None where they are not known.

    Among the listed names folders have the place of their own name; else their number, or that in sorted order.
    """
    in_order = {folder: label for label, folder in enumerate(folders)}
    numbered = all(folder.isdecimal() and len(folder) <= _DIGITS for folder in folders)
    numbers = {folder: int(folder) for folder in folders} if numbered else {}
    names = names_of_wnids(folders)
    if listed is None:
        if names is None and not numbers and not all(map(_WNID.fullmatch, folders)):
            names = spaced(folders)
        return numbers or in_order, names
    places = zip(folders, places_among(names or folders, listed), strict=True)
    by_name = {folder: place for folder, place in places if place is not None}
    if len(by_name) == len(folders):
        return by_name, listed
    if numbers and max(numbers.values()) < len(listed):
        return numbers, listed
    other = next(folder for folder in folders if folder not in by_name)
    if len(folders) != len(listed) or not (names or by_name.items() <= in_order.items()):
        raise ValueError(
            f"{name} has {len(folders)} class folders, but classnames.txt names {len(listed)} classes, of which none "
            f"is {shown(other[:60])!r}: expected folders named like the classes, or as many in the same order."
        )
    log.warning(
        "%s: class folders that are not in classnames.txt are taken in sorted order: %r is %r.",
        name, shown(other), shown(listed[in_order[other]]),
    )  # fmt: skip
    return in_order, listed
