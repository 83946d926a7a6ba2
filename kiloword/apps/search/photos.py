"""The photos of a folder and its subfolders, as rows of a library, with stamps that change with the files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path, PurePath

import pyarrow as pa

from kiloword.apps.search.library import FILE, ROWS
from kiloword.data.folders import image_folders, no_images, of_device
from kiloword.data.sample import MAX_TEXT, parse_captions, read_whole
from kiloword.errors import LeftOut
from kiloword.types import BadSample

LONGEST_CAPTION = 1_000  # characters kept of the text beside a photo


def scan(root: Path, left: LeftOut) -> pa.Table:
    """The photos of a folder and its subfolders as rows of a library; what is not used goes to `left`.

    Hidden folders, linked ones, and links to outside are omitted. A text of the same name (photo.txt beside photo.jpg)
    is its caption, and part of the stamp.
    Raises: ValueError when there is no photo, so that a disk that is not mounted does not empty a library.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: expected a folder of photos.")
    whole, rows = root.resolve(), []

    def inside(path: str) -> bool:
        within = not os.path.islink(root / path) or (root / path).resolve().is_relative_to(whole)
        if not within:
            left.add(path, "a link to a file outside the folder")
        return within

    for below, images, files in image_folders(root, left, passed=FILE):
        for path in (below + name for name in images):
            stem = os.path.splitext(path)[0]
            text, meta = stem + ".txt", stem + ".json"
            if meta.removeprefix(below) in files:
                left.add(meta, "captions are read from .txt alone")
            try:
                if not inside(path):
                    continue
                beside = [path, *([text] if text.removeprefix(below) in files and inside(text) else [])]
                status = [os.stat(root / one) for one in beside]
            except OSError as error:
                left.add(path, f"it cannot be read ({error.strerror or error})")
                continue
            file, stamp = os.fsencode(path), " ".join(f"{one.st_size}-{one.st_mtime_ns}" for one in status)
            row = {"id": blake2b(file + stamp.encode(), digest_size=8).hexdigest(), "file": file, "stamp": stamp}
            plain = path.encode("utf-8", "backslashreplace").decode()
            rows.append(row | {"path": plain, "caption": _caption(root, text, left) if len(beside) > 1 else ""})
    if not rows:
        raise ValueError(no_images(root, left))
    return pa.Table.from_pylist(rows, ROWS)


def _caption(root: Path, text: str, left: LeftOut) -> str:
    caption = ""
    with suppress(OSError, BadSample):
        caption = " / ".join(parse_captions(read_whole(root / text, "it", MAX_TEXT), None)[0])
    if not caption:
        left.add(text, "no caption that can be read as UTF-8")
    if len(caption) > LONGEST_CAPTION:
        left.add(text, f"all but its first {LONGEST_CAPTION:,} characters")
    return caption[:LONGEST_CAPTION]


def deleted(root: Path, missing: Iterable[str]) -> set[str]:
    """Missing photos that were deleted: in a trash, or their folder lists others. The others may come back.

    A folder that is gone, empty or cannot be read may be a disk that is not mounted, and a link may point to one.
    """
    gone, listed = set[str](), dict[PurePath, list[str]]()
    for path, folder in ((path, PurePath(path).parent) for path in missing):
        if folder not in listed:
            listed[folder] = []
            with suppress(OSError):
                listed[folder] = os.listdir(root / folder)
        names = listed[folder]
        if any(map(of_device, folder.parts)) or (names and PurePath(path).name not in names):
            gone.add(path)
    return gone
