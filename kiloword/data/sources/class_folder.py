"""Class folders: a folder of images for each class (torchvision's `ImageFolder`), such as those of ImageNet."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kiloword.data.classes.names import IMAGENET, names_of_wnids, places_among, spaced, templates
from kiloword.data.sources.folder import OF_DATA, Folder, image_folders, is_image, of_device
from kiloword.errors import LeftOut
from kiloword.terminal import shown

LEAST = 2  # classes
_DIGITS = 5  # of a folder that is named by its label
_WNID = re.compile(r"n[0-9]{8}")
log = logging.getLogger(__name__)


class ClassFolder(Folder):
    """The images below the folders of a folder, one folder per class, sorted by class and name.

    Labels count the lines of classnames.txt where there is one: by the name of the folder, else in sorted order. Else
    folders named by numbers are these labels and have no names; other folders count in sorted order, and their names
    are those of the classes, "_" for a space; wnids of ImageNet are named by its table. Captions and other values may
    lie beside the images as in `Folder`. The fingerprint covers names, sizes and labels. `notes` names empty folders
    and what is not used.
    Errors: ValueError for class names that do not fit.
    """

    def __init__(
        self, name: str, folder: Path, classnames: list[str] | None = None, prompts: list[str] | None = None
    ) -> None:
        self.name, self.folder = name, folder
        folders = sorted(_folders(folder))
        self._label, self.classnames = _labels(name, folders, classnames)
        named_by_table = classnames is None and names_of_wnids(folders) is not None
        self.templates = templates(IMAGENET) if prompts is None and named_by_table else prompts
        left, files = LeftOut("path"), list[tuple[str, int]]()
        for inner in folders:
            of_class = [(path, os.stat(folder / path).st_size) for path in _images(folder, inner, left)]
            files += sorted(of_class)
            if not of_class:
                left.add(inner, "no images in it")
        self._images = [path for path, _ in files]
        lines = [f"{path} {size} {self._label[_class(path)]}" for path, size in files]
        self.fingerprint = hashlib.blake2b(os.fsencode("\n".join(lines)), digest_size=16).hexdigest()
        next(image_folders(folder, left, deep=False, used=(*OF_DATA, *folders)))
        self.notes = [f"{name}: {line}" for line in left.lines()]

    def _beside(self, row: int, suffix: str) -> bytes | None:
        if suffix == "cls":
            return str(self._label[_class(self._images[row])]).encode()
        return super()._beside(row, suffix)


def has_class_folders(folder: Path) -> bool:
    """Whether a folder has class folders: at least two with images, none that has class folders itself."""
    folders = _folders(folder)
    with_images = [inner for inner in folders if next(_images(folder, inner), None)]
    return len(with_images) >= LEAST and not any(_is_parent(folder / inner) for inner in with_images)


def parents_of_images(folder: Path) -> list[str]:
    """The inner folders that are data sets of images: class folders, or images."""
    return sorted(inner for inner in _folders(folder) if next(_images(folder, inner), None))


def _is_parent(folder: Path) -> bool:
    """Whether a folder has no images itself, but two of its folders have."""
    has_images = any(map(is_image, os.listdir(folder)))
    return not has_images and sum(next(_images(folder, inner), None) is not None for inner in _folders(folder)) >= LEAST


def _folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, linked ones too, without hidden ones and those of devices."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    return [name for name in names if not name.startswith((".", "__")) and not of_device(name)]


def _images(root: Path, inner: str, left: LeftOut | None = None) -> Iterator[str]:
    """Paths below the root of all images in a folder of it and in its subfolders."""
    for below, images, _ in image_folders(root, LeftOut("path") if left is None else left, inner):
        yield from (below + name for name in images)


def _class(path: str) -> str:
    return path.partition("/")[0]


def _labels(name: str, folders: Sequence[str], classnames: list[str] | None) -> tuple[dict[str, int], list[str] | None]:
    """The label of each folder, and the names of all classes; None where they are not known."""
    numbered = all(folder.isdecimal() and len(folder) <= _DIGITS for folder in folders)
    names = names_of_wnids(folders)
    if classnames is not None:
        return _labels_of_names(name, folders, classnames, names or folders, numbered), classnames
    if numbered:
        return {folder: int(folder) for folder in folders}, None
    if names is None and not all(map(_WNID.fullmatch, folders)):
        names = spaced(folders)
    return {folder: label for label, folder in enumerate(folders)}, names


def _labels_of_names(
    name: str, folders: Sequence[str], classnames: list[str], names: Sequence[str], numbered: bool
) -> dict[str, int]:
    """Labels of folders by their names among the class names; else by number, or in sorted order."""
    places = places_among(names, classnames)
    by_name = {folder: place for folder, place in zip(folders, places, strict=True) if place is not None}
    if len(by_name) == len(folders):
        return by_name
    if numbered and max(map(int, folders)) < len(classnames):
        return {folder: int(folder) for folder in folders}
    in_order = {folder: label for label, folder in enumerate(folders)}
    other = next(folder for folder in folders if folder not in by_name)
    if len(folders) == len(classnames) and (names != folders or by_name.items() <= in_order.items()):
        log.warning(
            "%s: %d of its %d class folders are not in classnames.txt, so they are taken in sorted order: %r is %r.",
            name, len(folders) - len(by_name), len(folders), shown(other), shown(classnames[in_order[other]]),
        )  # fmt: skip
        return in_order
    raise ValueError(
        f"{name} has {len(folders)} class folders, but classnames.txt names {len(classnames)} classes, of which none "
        f"is {shown(other[:60])!r}: expected folders named like the classes, or as many in the same order."
    )
