"""The photos of a folder and its subfolders, as a library sees them: paths, and stamps that change with the files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path, PurePath

import pyarrow as pa

from kiloword.apps.search.library import FILE, ROWS
from kiloword.data.folders import image_folders, no_images, of_device
from kiloword.data.sample import MAX_TEXT, parse_captions, read_whole
from kiloword.errors import LeftOut
from kiloword.types import BadSample

LONGEST_CAPTION = 1_000  # characters kept of the text beside a photo


@dataclass(frozen=True)
class Scan:
    """What a folder holds. Paths are those below it."""

    root: Path
    stamps: dict[str, str] = field(default_factory=dict)  # path -> size and time of change, of every photo and its text
    left: LeftOut = field(default_factory=lambda: LeftOut("path"))

    def missing(self, known: Iterable[str]) -> tuple[set[str], set[str]]:
        """Photos of a library that are not here: deleted ones, and those that may come back.

        A photo was deleted if its folder lists others, but not this one. A folder that is gone, empty or cannot be
        read may be a disk that is not mounted, and a link may point to one.
        """

        @cache
        def listed(folder: Path) -> set[str]:
            with suppress(OSError):
                return set(os.listdir(folder))
            return set()

        gone, deleted = {path for path in known if path not in self.stamps}, set[str]()
        for path in gone:
            place, trash = self.root / path, any(map(of_device, PurePath(path).parts[:-1]))
            if trash or (listed(place.parent) and place.name not in listed(place.parent)):
                deleted.add(path)
        return deleted, gone - deleted

    def rows(self, paths: Iterable[str]) -> pa.Table:
        """Photos as rows of a library."""
        rows = []
        for path in paths:
            file, stamp, text = os.fsencode(path), self.stamps[path], f"{os.path.splitext(path)[0]}.txt"
            caption = ""
            if " " in stamp:
                with suppress(OSError, BadSample):
                    caption = " / ".join(parse_captions(read_whole(self.root / text, "it", MAX_TEXT), None)[0])
                if not caption:
                    self.left.add(text, "no caption that can be read as UTF-8")
                if len(caption) > LONGEST_CAPTION:
                    self.left.add(text, f"all but its first {LONGEST_CAPTION:,} characters")
            row = {"id": blake2b(file + stamp.encode(), digest_size=8).hexdigest(), "file": file, "stamp": stamp}
            plain = path.encode("utf-8", "backslashreplace").decode()
            rows.append(row | {"path": plain, "caption": caption[:LONGEST_CAPTION]})
        return pa.Table.from_pylist(rows, ROWS)


def scan(root: Path) -> Scan:
    """The photos of a folder and its subfolders; hidden folders, linked ones, and links to outside are omitted.

    A text of the same name (photo.txt beside photo.jpg) is its caption, and part of the stamp.
    Raises: ValueError when there is no photo, so that a disk that is not mounted does not empty a library.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: expected a folder of photos.")
    scanned, whole = Scan(root), root.resolve()

    def inside(path: str) -> bool:
        within = not os.path.islink(root / path) or (root / path).resolve().is_relative_to(whole)
        if not within:
            scanned.left.add(path, "a link to a file outside the folder")
        return within

    for below, images, files in image_folders(root, scanned.left, passed=FILE):
        for name in images:
            text, meta = (os.path.splitext(name)[0] + suffix for suffix in (".txt", ".json"))
            if meta in files:
                scanned.left.add(below + meta, "captions are read from .txt alone")
            try:
                if inside(below + name):
                    beside = [name, *([text] if text in files and inside(below + text) else [])]
                    status = [os.stat(root / below / one) for one in beside]
                    scanned.stamps[below + name] = " ".join(f"{one.st_size}-{one.st_mtime_ns}" for one in status)
            except OSError as error:
                scanned.left.add(below + name, f"it cannot be read ({error.strerror or error})")
    if not scanned.stamps:
        raise ValueError(no_images(root, scanned.left))
    return scanned
