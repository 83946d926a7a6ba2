"""The photos of a folder and its subfolders, as a library sees them: paths, and stamps that change with the files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath

from kiloword.apps.search.library import FILE
from kiloword.data.folders import image_folders, no_images, of_device
from kiloword.data.sample import MAX_IMAGE, MAX_TEXT, make_record, parse_captions, read_whole
from kiloword.errors import LeftOut
from kiloword.types import BadSample, Record

LONGEST_CAPTION = 1_000  # characters kept of the text beside a photo


@dataclass(frozen=True)
class Scan:
    """What a folder holds. Paths are those below it."""

    root: Path
    stamps: dict[str, str] = field(default_factory=dict)  # path -> size and time of change, of every photo
    left: LeftOut = field(default_factory=lambda: LeftOut("path"))
    cut: LeftOut = field(default_factory=lambda: LeftOut("text", done="cut"))

    def missing(self, known: Iterable[str]) -> tuple[frozenset[str], list[str]]:
        """Photos of a library that are not here: deleted ones, and those that may come back.

        A photo was deleted if its folder lists others, but not this one. A folder that is gone, empty or cannot be
        read may be a disk that is not mounted, and a link may point to one.
        """
        deleted, away, listed = set[str](), list[str](), cache(_listed)
        for path in (path for path in known if path not in self.stamps):
            place, ignored = self.root / path, any(map(of_device, PurePath(path).parts[:-1]))
            if ignored or (listed(place.parent) and place.name not in listed(place.parent)):
                deleted.add(path)
            else:
                away.append(path)
        return frozenset(deleted), away

    def caption(self, path: str, captions: Sequence[str]) -> str:
        """What a library keeps of a photo's captions; a text that is not kept as a whole is named."""
        text, joined = f"{os.path.splitext(path)[0]}.txt", " / ".join(captions)
        if not joined and " " in self.stamps[path]:
            self.left.add(text, "no caption that can be read as UTF-8")
        if len(joined) > LONGEST_CAPTION:
            self.cut.add(text, f"a library keeps {LONGEST_CAPTION:,} characters")
        return joined[:LONGEST_CAPTION]


def scan(root: Path) -> Scan:
    """The photos of a folder and its subfolders; hidden folders and linked ones are omitted.

    A text of the same name (photo.txt beside photo.jpg) is its caption, and part of the stamp.
    Raises: ValueError when there is no photo, so that a disk that is not mounted does not empty a library.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: expected a folder of photos.")
    scanned = Scan(root)
    for below, images, files in image_folders(root, scanned.left, passed=FILE):
        for name in sorted(files.intersection(f"{os.path.splitext(image)[0]}.json" for image in images)):
            scanned.left.add(below + name, "captions are read from .txt alone")
        for name in images:
            text = f"{os.path.splitext(name)[0]}.txt"
            try:
                beside = [_stamp(os.path.join(root, below, one)) for one in (name, text) if one in files]
            except OSError as error:
                scanned.left.add(below + name, f"it cannot be read ({error.strerror or error})")
                continue
            if beside[0]:
                scanned.stamps[below + name] = " ".join(beside)
    if not scanned.stamps:
        raise ValueError(no_images(root, scanned.left))
    return scanned


def _listed(folder: Path) -> set[str]:
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def _stamp(path: str) -> str:
    """Size and time of change; "" for a file that is gone. Raises: OSError where that cannot be known."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}"


class Photos:
    """Some photos of a folder as a `Source` without captions. Args: paths: below `folder`."""

    natural = True

    def __init__(self, folder: Path, paths: Sequence[str]) -> None:
        self.folder, self.paths = folder, paths
        self.name = self.fingerprint = str(folder)

    def __len__(self) -> int:
        return len(self.paths)

    def key(self, row: int) -> str:
        """The path of a photo."""
        return self.paths[row]

    def record(self, row: int) -> Record:
        """The stored photo, with the text beside it. Raises BadSample."""
        path = self.paths[row]
        text = None
        try:
            image = read_whole(self.folder / path, "it", MAX_IMAGE)
        except FileNotFoundError:
            raise BadSample("the file is gone") from None
        except OSError as error:
            raise BadSample(f"it cannot be read ({error.strerror})") from None
        try:
            text = read_whole((self.folder / path).with_suffix(".txt"), "its text", MAX_TEXT)
            parse_captions(text, None)
        except (OSError, BadSample):  # a photo without a usable text is still a photo
            text = None
        return make_record(path, image, text, None, None)
