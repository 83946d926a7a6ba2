"""A library: the features of a folder's photos, in parquet files that other programs read.

    library.json         what the files below were made from, and their names; written last
    part-000001.parquet  a row a photo: id, path, caption, vec [D] and, of Gaussians, uncertainty, penalty, log_var [D]
    part-000001.arrow    of models that pool for each text: features by which a photo is scored, float16

With codes (`codes.py`) the table has the column `code` in place of `vec`, and the .arrow file, which is memory-mapped,
holds the vectors, by which few photos are scored again. The scale of int8 numbers stands in the metadata of a schema.

Parts are never changed: an update writes new ones, then library.json, then removes the old ones. A killed update leaves
the library as it was.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from kiloword.apps.search.part import LibraryFile, LibraryPart, coded
from kiloword.config.settings import read_config
from kiloword.files import atomic, write_json
from kiloword.types import Features

FILE, PART = "library.json", 4096  # rows of a part
TRIES = 5  # to read a library that changes again and again
T = TypeVar("T")


class Library:
    """The photos of a library, N in all. Raises: ValueError when the folder is none, or is damaged.

    Args: mend: read all of it, and omit damaged parts, so that their photos count as new; before: an earlier state,
    whose parts are taken over where it is the same library.
    """

    def __init__(self, folder: Path, mend: bool = False, before: Library | None = None) -> None:
        self.folder = folder
        for last in (*[False] * (TRIES - 1), True):
            self.version = _version(folder)  # before library.json, so that no change is missed
            self.file = settings_of(folder)
            try:
                self.parts = list(self._opened(mend, before))
                break
            except ValueError:  # an index may have removed the parts that library.json named
                if last or not self.changed:
                    raise
        self._places()

    def _opened(self, mend: bool, before: Library | None) -> Iterator[LibraryPart]:
        """The parts that library.json names; see `Library`."""
        same = before if before is not None and before.file.id == self.file.id else None
        here = {part.name: part for part in same.parts} if same else {}
        for name in self.file.parts:
            try:
                part = here.get(name) or LibraryPart(self.folder, name, self.file)
                if mend:
                    part.check()
                yield part
            except ValueError:
                if not mend:
                    raise

    def _places(self) -> None:
        self.starts = np.cumsum([0, *map(len, self.parts)])  # rows of the parts
        for name in ("ids", "row_of"):  # computed when they are asked for: a part more does not need them
            self.__dict__.pop(name, None)

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The number of every photo [N], which it keeps."""
        return np.concatenate([np.zeros(0, np.int64), *(part.ids for part in self.parts)])

    @cached_property
    def row_of(self) -> dict[int, int]:
        """Number -> row of every photo."""
        return {number: row for row, number in enumerate(self.ids.tolist())}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def place(self, row: int) -> tuple[LibraryPart, int]:
        """The part of a row of the library, and the row in it."""
        part = int(np.searchsorted(self.starts, row, "right")) - 1
        return self.parts[part], row - int(self.starts[part])

    def path(self, row: int) -> str:
        """Path of a photo below the folder of photos."""
        part, inner = self.place(row)
        return part.paths[inner]

    def photo(self, row: int) -> Path:
        """The file of a photo. Raises: ValueError for a path that leaves the folder of photos."""
        path = self.path(row)
        if os.path.isabs(path) or ".." in Path(path).parts or "\0" in path:
            raise ValueError("the library names a file outside its folder of photos.")
        return Path(self.file.folder) / path

    def features(self, rows: Sequence[int]) -> Features:
        """All features of rows, in their order: [len(rows), ...] each."""
        order = np.argsort(rows, kind="stable")
        placed = [self.place(rows[n]) for n in order]
        parts = [
            part.features([inner for other, inner in placed if other is part])
            for part in dict.fromkeys(part for part, _ in placed)
        ]
        back = torch.from_numpy(np.argsort(order))
        return {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}

    def stamps(self) -> dict[str, str]:
        """Path -> stamp of every photo."""
        return {path: stamp for part in self.parts for path, stamp in zip(part.paths, part.stamps, strict=True)}

    @property
    def changed(self) -> bool:
        """Whether the library on disk is another one, or in another state; False where there is none."""
        return _version(self.folder) not in (None, self.version)

    def refreshed(self) -> Library:
        """The library as it is now; this one if nothing changed. Raises: ValueError for damage."""
        with suppress(OSError):
            return Library(self.folder, before=self) if self.changed else self
        return self

    def now(self, use: Callable[[Library], T]) -> T:
        """What a function makes of the library as it is now; again if it fails and an index changed it meanwhile.

        An index removes files that a reader may not have read yet. Raises: the function's ValueError.
        """
        library = self.refreshed()
        for _ in range(TRIES - 1):
            try:
                return use(library)
            except ValueError:
                if not library.changed:
                    raise
                library = library.refreshed()
        return use(library)

    def commit(self, rows: pa.Table | None = None, drop: frozenset[str] = frozenset(), **changed: Any) -> None:
        """Remove photos by their paths, add rows (without ids) and change settings: all of it or nothing."""
        file, parts = replace(self.file, **changed), []
        for part in self.parts:
            if not drop or drop.isdisjoint(part.paths):
                parts.append(part)
                continue
            keep = [path not in drop for path in part.paths]
            if any(keep):
                file = self._write(file, part.whole().filter(pa.array(keep)), parts)
        if rows is not None and len(rows):
            ids = pa.array(np.arange(file.next_id, file.next_id + len(rows), dtype=np.int64))
            file = replace(file, next_id=file.next_id + len(rows))
            file = self._write(file, rows.add_column(0, "id", ids), parts)
        self._publish(file, parts)

    def merge(self) -> None:
        """Join neighbouring parts that fit into one."""
        parts: list[LibraryPart] = []
        file, groups = self.file, [[part] for part in self.parts[:1]]
        for part in self.parts[1:]:
            fits = sum(map(len, groups[-1])) + len(part) <= PART
            groups[-1 if fits else len(groups) :] = [[*groups[-1], part] if fits else [part]]
        for group in groups:
            if len(group) == 1:
                parts += group
            else:
                file = self._write(file, pa.concat_tables([part.whole() for part in group]), parts)
        if len(parts) < len(self.parts):
            self._publish(file, parts)

    def refresh_recall(self, measure: Callable[[], dict[str, float]], changed: bool) -> None:
        """Measure the recall of searches again where a tenth of the photos changed since it was measured."""
        measured = self.file.recall.get("photos", 0)
        if changed and abs(len(self) - measured) * 10 >= max(measured, 1):
            self._publish(replace(self.file, recall=measure()), self.parts)

    def _write(self, file: LibraryFile, table: pa.Table, parts: list[LibraryPart]) -> LibraryFile:
        """Write a part and append it. Returns: the settings with the next number."""
        name = f"part-{file.next_part:06d}"
        table, tokens = coded(table, file)
        if len(tokens.schema):
            with atomic(self.folder / f"{name}.arrow") as out, pa.ipc.new_file(out, tokens.schema) as writer:
                writer.write_table(tokens)
        with atomic(self.folder / f"{name}.parquet") as out:
            pq.write_table(table, out, compression="none", use_dictionary=False)
        parts.append(LibraryPart(self.folder, name, file))
        return replace(file, next_part=file.next_part + 1)

    def _publish(self, file: LibraryFile, parts: list[LibraryPart]) -> None:
        self.parts, self.file = parts, replace(file, parts=tuple(part.name for part in parts))
        write_json(self.folder / FILE, vars(self.file))
        self.version = _version(self.folder)
        self._places()
        kept = set(self.file.parts)
        for stale in _files(self.folder):
            if stale.stem not in kept:
                stale.unlink(missing_ok=True)


def settings_of(folder: Path) -> LibraryFile:
    """The settings of a library, with an id. Raises: ValueError for a folder that is none, or damage."""
    if not (folder / FILE).is_file():
        raise ValueError(
            f"{folder} is not a library: it has no {FILE}. Make one: kiloword index PHOTOS --model MODEL --out DIR."
        )
    file = read_config(folder / FILE, LibraryFile)
    for name in file.parts:
        if Path(name).name != name:
            raise ValueError(f"{folder / FILE} cannot be used: it names the part {name!r} outside its folder.")
    return file if re.fullmatch("[0-9a-f]{16}", file.id) else replace(file, id=_first_id(folder, file))


def _first_id(folder: Path, file: LibraryFile) -> str:
    """An id for a library of earlier versions, from its first part; it stands in library.json after the next update."""
    try:
        name = f"{file.parts[0]}.parquet"
        return blake2b(f"{name} {(folder / name).stat().st_mtime_ns}".encode(), digest_size=8).hexdigest()
    except (IndexError, OSError):
        return secrets.token_hex(8)


def create(folder: Path, file: LibraryFile) -> Library:
    """An empty library. Raises: ValueError for a folder that holds other files."""
    strange = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    if strange:
        raise ValueError(f"{folder} holds other files ({strange[0]}, ...): choose a new folder for --out.")
    write_json(folder / FILE, vars(file) | {"id": secrets.token_hex(8)})
    return Library(folder)


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for kind in ("parquet", "arrow") for path in folder.glob(f"part-??????.{kind}"))


def _version(folder: Path) -> tuple[int, int] | None:
    """Changes when library.json is replaced; None where it is gone."""
    try:
        status = (folder / FILE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
