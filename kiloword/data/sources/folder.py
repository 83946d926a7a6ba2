"""A folder of images, each with a .txt, .json or .cls file of the same name."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from kiloword.data.images.decode import missing_package
from kiloword.data.sources.sample import (
    IMAGE_SUFFIXES,
    MAX_IMAGE,
    MAX_TEXT,
    make_record,
    parse_captions,
    question_in,
    read_whole,
)
from kiloword.errors import LeftOut
from kiloword.types import BadSample, Record

_BESIDE = ("txt", "json", "cls")
OF_DATA = ("classnames.txt", "zeroshot_classification_templates.txt", "tree.json")  # files about all images
_OF_DEVICES = {
    *("@eadir", "#recycle", "@recycle", "@recently-snapshot", "#snapshot", "@__thumb", ".@__thumb"),  # network storage
    *("$recycle.bin", "system volume information", "lost+found", "__macosx"),
}
_PACKED = (".tar", ".zip", ".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".7z", ".rar")
_LONGEST_SUFFIX = 10  # characters, with its dot; more are part of a name


class Folder:
    """The images of one folder, sorted by name; subfolders are not searched.

    The fingerprint covers names and sizes. `classnames`, `templates`: of classification data (.cls), else None.
    Errors: ValueError when the folder holds no images.
    """

    natural = True

    def __init__(
        self, name: str, folder: Path, classnames: list[str] | None = None, templates: list[str] | None = None
    ) -> None:
        self.name, self.folder = name, folder
        self.classnames, self.templates = classnames, templates
        left = LeftOut("path")
        _, self._images, files = next(image_folders(folder, left, deep=False, used=OF_DATA), ("", [], set()))
        if not self._images:
            raise ValueError(no_images(folder, left))
        used = {f"{_stem(p)}.{s}" for p in self._images for s in _BESIDE} | set(self._images)
        present = [file for file in sorted(used & files) if (folder / file).is_file()]
        lines = "\n".join(f"{file} {os.stat(folder / file).st_size}" for file in present)
        self.fingerprint = hashlib.blake2b(os.fsencode(lines), digest_size=16).hexdigest()
        self.notes = [f"{name}: {line}" for line in left.lines()]

    def __len__(self) -> int:
        return len(self._images)

    @cached_property
    def _shared(self) -> set[str]:
        """Names without suffix of two or more images."""
        return {name for name, n in Counter(map(_stem, self._images)).items() if n > 1}

    def key(self, row: int) -> str:
        """The image's file name without its last suffix, or with it where another image differs in that alone."""
        file = self._images[row]
        return file if _stem(file) in self._shared else _stem(file)

    def captions(self, row: int) -> list[str]:
        """Captions, without reading the image. Raises BadSample."""
        return parse_captions(self._beside(row, "txt"), self._beside(row, "json"))[0]

    def question(self, row: int) -> str | None:
        """The question, without reading the image; None without one in the JSON. Raises BadSample."""
        return question_in(parse_captions(None, self._beside(row, "json"))[1])

    def record(self, row: int) -> Record:
        """The stored sample. Raises BadSample with the reason."""
        image = self._read(self._images[row]) or b""
        return make_record(self.key(row), image, *(self._beside(row, suffix) for suffix in _BESIDE))

    def stored(self, row: int) -> list[bytes | None]:
        """The bytes of a row's files, None for missing ones. Raises BadSample."""
        return [self._read(self._images[row]), *(self._beside(row, suffix) for suffix in _BESIDE)]

    def _beside(self, row: int, suffix: str) -> bytes | None:
        return self._read(f"{_stem(self._images[row])}.{suffix}")

    def _read(self, file: str) -> bytes | None:
        """The bytes of a file; None for a missing one."""
        what, most = ("the image", MAX_IMAGE) if is_image(file) else (f"the {os.path.splitext(file)[1]}", MAX_TEXT)
        try:
            return read_whole(self.folder / file, what, most)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadSample(f"{what} cannot be read ({error.strerror})") from None


def image_folders(
    root: Path, left: LeftOut, inside: str = "", deep: bool = True, used: Collection[str] = (), passed: str = ""
) -> Iterator[tuple[str, list[str], set[str]]]:
    """Folders with their images: the path below `root` ("a/"), names of images, names of all files.

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
        if passed and _of_library(root / folder / passed):
            left.add(folder or root.name, "a library of kiloword")
            continue
        inner = [entry for entry in entries if entry.is_dir()]
        reasons = {entry.name: _reason_of_folder(entry, deep) for entry in inner}
        folders += [below + entry.name for entry in reversed(inner) if not reasons[entry.name]]
        files = {entry.name: _reason_of_file(entry) for entry in entries if entry.name not in reasons}
        images = [name for name, reason in files.items() if not reason]
        beside = {f"{_stem(name)}.{suffix}" for name in images for suffix in _BESIDE}
        for name, reason in (reasons | files).items():
            if reason and name not in beside and name not in used:
                left.add(below + name, reason)
        yield below, images, set(files)


def no_images(folder: Path, left: LeftOut) -> str:
    """The message of a folder without images."""
    others = "".join(f" {line}." for line in left.lines())
    return f"{folder} holds no images ({', '.join(f'.{s}' for s in IMAGE_SUFFIXES)}).{others}"


def of_device(folder: str) -> bool:
    """Whether a folder of this name holds thumbnails, deleted files or metadata of a device or system."""
    return folder.casefold() in _OF_DEVICES or folder.startswith(".Trash")


def _of_library(file: Path) -> bool:
    with suppress(OSError, BadSample):
        return b'"kiloword-library-' in read_whole(file, "it", MAX_TEXT)
    return False


def _reason_of_folder(entry: os.DirEntry[str], deep: bool) -> str:
    """Why a folder is not searched; "" for one that is."""
    if of_device(entry.name):
        return "thumbnails or trash of a device"
    if entry.name.startswith("."):
        return "hidden"
    if entry.is_symlink():
        return "links to folders are not followed, name the folder itself"
    return "" if deep else "subfolders are not searched"


def _reason_of_file(entry: os.DirEntry[str]) -> str:
    """Why a file is not used as an image; "" for an image."""
    suffix = os.path.splitext(entry.name)[1].lower()
    if entry.name.startswith("."):
        return "hidden"
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
