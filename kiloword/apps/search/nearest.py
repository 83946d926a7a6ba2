"""An approximate index (HNSW, by usearch) of a library's vectors, where scoring all photos would take too long.

It lies in the cache folder, not in the library: native code reads it, so that it must be what this machine wrote.
Without it, or where it does not belong to the library as it is, all photos are scored.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kiloword.apps.search.codes import first, signs
from kiloword.files import cache_folder, write_atomic
from kiloword.terminal import warn
from kiloword.terminal.progress import Bar

if TYPE_CHECKING:
    from kiloword.apps.search.library import Library

LARGE = 1_000_000  # photos; all are scored up to this number
LISTED = 1_000  # photos that the index lists, which are then scored exactly
KINDS = {"float": ("ip", "f16"), "int8": ("cos", "i8"), "binary": ("hamming", "b1")}  # metric and type of numbers
WIDTH, EFFORT = 16, 128  # neighbours of a photo in the graph; candidates that it looks at when a photo is added


class Nearest:
    """The index of a library on this machine."""

    def __init__(self, library: Library, index: Any) -> None:
        self.library, self._index = library, index
        self._index.expansion_search = LISTED
        self._binary = library.file.codes == "binary"

    def rows(self, vec: Tensor) -> list[int]:
        """About the LISTED photos nearest to a vector [D], as rows of the library."""
        short = first(vec, self.library.file.compared)
        query = signs(short[None])[0] if self._binary else short.numpy()
        keys = self._index.search(query, LISTED).keys
        return [self.library.row_of[int(key)] for key in keys if int(key) in self.library.row_of]


def open_nearest(library: Library) -> Nearest | None:
    """The index of a library; None where it is small, was not made here, or is older than the library."""
    if len(library) <= LARGE:
        return None
    path, mark = _places(library)
    try:
        from usearch.index import Index

        if mark.read_text(encoding="utf-8") != _state(library):
            return None
        index = Index.restore(str(path), view=True)
    except (ImportError, OSError, ValueError):
        return None
    return None if index is None else Nearest(library, index)


def update_nearest(library: Library) -> None:
    """Bring the index of a large library up to date: photos that are new are added, those that are gone removed."""
    if len(library) <= LARGE or open_nearest(library) is not None:
        return
    try:
        from usearch.index import Index
    except ImportError:
        warn(f"searches score all {len(library):,} photos: pip install 'kiloword[search]' makes them faster.")
        return
    path, mark = _places(library)
    metric, dtype = KINDS[library.file.codes]
    index = _earlier(library, path, mark) or Index(
        ndim=library.file.compared, metric=metric, dtype=dtype, connectivity=WIDTH, expansion_add=EFFORT
    )
    mark.unlink(missing_ok=True)
    known = np.fromiter(index.keys, np.int64, len(index))
    for key in np.setdiff1d(known, library.ids):
        index.remove(int(key))
    _add(library, index, known)
    path.parent.mkdir(parents=True, exist_ok=True)
    index.save(str(path))
    write_atomic(mark, _state(library).encode())


def _add(library: Library, index: Any, known: NDArray[np.int64]) -> None:
    bar, done = Bar("approximate index", "photos"), 0
    for part in library.parts:
        new = ~np.isin(part.ids, known)
        if new.any():
            vec = first(part.vectors(np.flatnonzero(new).tolist()), library.file.compared)
            index.add(part.ids[new], signs(vec) if library.file.codes == "binary" else vec.numpy())
        done += len(part)
        bar(done, len(library))


def _earlier(library: Library, path: Path, mark: Path) -> Any:
    """The index of an earlier state of the library; None for none, or of another model."""
    from usearch.index import Index

    try:
        of_this_model = mark.read_text(encoding="utf-8").startswith(f"{_numbers(library)} ")
        return Index.restore(str(path)) if of_this_model else None
    except (OSError, ValueError):
        return None


def _places(library: Library) -> tuple[Path, Path]:
    """Paths of the index and of the file that says which state of which library it belongs to."""
    name = hashlib.blake2b(os.fsencode(os.path.abspath(library.folder)), digest_size=12).hexdigest()
    path = cache_folder() / f"{name}-{library.folder.name}.usearch"
    return path, Path(f"{path}.state")


def _numbers(library: Library) -> str:
    """What the numbers of an index depend on."""
    file = library.file
    return f"{file.fingerprint}-{file.id}" + ("" if file.codes == "float" else f"-{file.codes}{file.compared}")


def _state(library: Library) -> str:
    return f"{_numbers(library)} {hashlib.blake2b(library.ids.tobytes(), digest_size=16).hexdigest()}"
