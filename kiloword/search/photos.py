"""The photos of a folder and its subfolders, as a library sees them: paths, and stamps that change with the files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from kiloword.data.sources.folder import is_image, visible
from kiloword.data.sources.sample import IMAGE_SUFFIXES, MAX_IMAGE, MAX_TEXT, make_record, parse_captions, read_whole
from kiloword.search.library import FILE
from kiloword.types import BadSample, Record

LONGEST_SUFFIX = 10  # characters, with its dot; more are part of a name
LONGEST_CAPTION = 1_000  # characters kept of the text beside a photo


@dataclass(frozen=True)
class Scan:
    """What a folder holds. Paths are those below it."""

    stamps: dict[str, str] = field(default_factory=dict)  # path -> size and time of change, of every photo
    unread: dict[str, str] = field(default_factory=dict)  # path -> reason, of folders and photos that cannot be read

    def gone(self, path: str) -> bool:
        """Whether a photo that was there is there no more, as far as the folder can be read."""
        return path not in self.stamps and self.unread.keys().isdisjoint(map(str, (path, *PurePath(path).parents)))


def scan(root: Path) -> Scan:
    """The photos of a folder and its subfolders; hidden folders and linked ones are omitted.

    A text of the same name (photo.txt beside photo.jpg) is its caption, and part of the stamp.
    Raises: ValueError when there is no photo, so that a disk that is not mounted does not empty a library.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: expected a folder of photos.")
    scanned = Scan()

    def failed(error: OSError, path: str | None = None) -> None:
        scanned.unread[os.path.relpath(path or error.filename or root, root)] = error.strerror or str(error)

    for folder, files in visible(root, failed):
        here = set(files)
        for file in sorted(filter(is_image, files)):
            path, text = os.path.join(folder, file), f"{os.path.splitext(file)[0]}.txt"
            try:
                beside = [_stamp(os.path.join(folder, one)) for one in (file, text) if one in here]
            except OSError as error:
                failed(error, path)
                continue
            if beside[0]:
                scanned.stamps[os.path.relpath(path, root)] = " ".join(beside)
    if scanned.unread and not scanned.stamps:
        inner, reason = next(iter(scanned.unread.items()))
        raise ValueError(f"{os.path.normpath(root / inner)} cannot be read ({reason}): expected a folder of photos.")
    if not scanned.stamps:
        packed = next((name for _, _, files in os.walk(root) for name in sorted(files) if name.endswith(".tar")), "")
        tars = f" {packed} is a tar: unpack it first (tar xf), as a library points to files." if packed else ""
        raise ValueError(f"{root} holds no photos ({', '.join(f'.{s}' for s in IMAGE_SUFFIXES)}): expected some.{tars}")
    return scanned


def others(root: Path) -> Counter[str]:
    """Files below `root` by suffix ("" for none), but photos and their captions, libraries, and what is hidden."""
    passed = Counter[str]()
    for _, files in visible(root):
        if FILE in files:
            continue
        beside = {f"{os.path.splitext(file)[0]}.txt" for file in files if is_image(file)}
        passed.update(
            suffix if len(suffix := os.path.splitext(file)[1].lower()) <= LONGEST_SUFFIX else ""
            for file in files
            if not (is_image(file) or file in beside or file.startswith("."))
        )
    return passed


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
    from_files = True

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
