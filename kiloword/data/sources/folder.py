"""A folder of images, each with a .txt, .json or .cls file of the same name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kiloword.data.sources.sample import (
    IMAGE_SUFFIXES,
    MAX_IMAGE,
    MAX_TEXT,
    make_record,
    parse_captions,
    question_in,
    read_whole,
)
from kiloword.types import BadSample, Record

_BESIDE = ("txt", "json", "cls")


class Folder:
    """The images of one folder, sorted by name; subfolders are not searched.

    The fingerprint covers names and sizes. `classnames`, `templates`: of classification data (.cls), else None.
    Errors: ValueError when the folder holds no images.
    """

    natural = True
    from_files = True

    def __init__(
        self, name: str, folder: Path, classnames: list[str] | None = None, templates: list[str] | None = None
    ) -> None:
        self.name, self.folder = name, folder
        self.classnames, self.templates = classnames, templates
        with os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        self._images = sorted(file for file in sizes if is_image(file))
        if not self._images:
            raise ValueError(f"{folder} holds no images ({', '.join(f'.{s}' for s in IMAGE_SUFFIXES)}).")
        used = {f"{_stem(p)}.{s}" for p in self._images for s in _BESIDE} | set(self._images)
        lines = "\n".join(f"{file} {sizes[file]}" for file in sorted(used & sizes.keys()))
        self.fingerprint = hashlib.blake2b(os.fsencode(lines), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._images)

    def key(self, row: int) -> str:
        """The image's file name without its last suffix."""
        return _stem(self._images[row])

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
        return self._read(f"{self.key(row)}.{suffix}")

    def _read(self, file: str) -> bytes | None:
        """The bytes of a file; None for a missing one."""
        try:
            return read_whole(self.folder / file, file, MAX_IMAGE if is_image(file) else MAX_TEXT)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadSample(f"{file} cannot be read ({error.strerror})") from None


def visible(root: Path, failed: Callable[[OSError], object] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Folders below `root`, itself first, with the names of their files; hidden and linked folders are omitted.

    Args: failed: called for each folder that cannot be read, whose path is the error's `filename`.
    """
    for folder, inner, files in os.walk(root, onerror=failed):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield folder, files


def is_image(file: str) -> bool:
    """Whether the suffix is that of an image; hidden files do not count."""
    return not file.startswith(".") and file.lower().endswith(tuple(f".{s}" for s in IMAGE_SUFFIXES))


def _stem(file: str) -> str:
    return os.path.splitext(file)[0]
