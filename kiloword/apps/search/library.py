"""A library: the photos of a folder as a table, and matrices of their features beside it, which other programs read.

    library.json     what the files below were made from, and the number of their state; written last
    rows-1.parquet   a row a photo: id, path, file (the path's bytes), stamp, caption
    vec-1.npy        [N, D] float32, norm 1; of Gaussians also log_var [N, D], penalty [N] and uncertainty [N]
    ...              of models that compare a photo anew with each text, what they need of it, float16

A library may be a stranger's: nothing of it is code, and a reader takes no more memory than its files have bytes.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from kiloword.config.settings import BaseSettings, read_config
from kiloword.files import atomic, write_json
from kiloword.model.encoding import chunks
from kiloword.types import Features

FILE, VERSION = "library.json", "kiloword-library-2"
TYPES = {"id": pa.string(), "path": pa.string(), "file": pa.binary(), "stamp": pa.string(), "caption": pa.string()}
ROWS = pa.schema([pa.field(name, kind, nullable=False) for name, kind in TYPES.items()])
OF_GAUSSIANS = ("log_var", "penalty", "uncertainty")
BLOCK = 1 << 14  # rows that are read or written at once
Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class LibraryFile(BaseSettings):
    """The contents of `library.json`."""

    folder: str = ""  # of the photos
    model: str = ""  # a local one: a folder, or files
    fingerprint: str = ""  # of the model's weights
    dim: int | None = None  # the first numbers of the model's embedding that are kept; None: all
    features: tuple[str, ...] = ()  # names of the matrices
    state: int = 0  # number of the state; 0: there is none yet
    format: str = VERSION


class Library:
    """A state of a library, N photos. What it opened stays readable when `kiloword index` makes the next state.

    Raises: ValueError for a folder that is no library, one without photos yet, damage, or an earlier version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, version_of(folder)
        self.file = read_file(folder)
        if not self.file.state:
            raise ValueError(f"the library {folder} holds no photos yet: run its `kiloword index` again.")
        try:
            self.rows = _rows(folder / f"rows-{self.file.state}.parquet")
            self.features = {name: self._matrix(name) for name in self.file.features}
        except (OSError, ValueError, ArithmeticError, pa.ArrowException) as error:
            if self.version == version_of(folder):
                raise ValueError(f"the library {folder} is damaged ({error}): remove it and index again.") from None
            self.__init__(folder)  # type: ignore[misc]  # the files are of another state now

    def _matrix(self, name: str) -> Array:
        with np.errstate(over="raise"):  # of a shape
            values = np.asarray(np.lib.format.open_memmap(self.folder / f"{name}-{self.file.state}.npy", mode="r"))
        if values.dtype not in (np.float16, np.float32) or len(values) != len(self.rows):
            raise ValueError(f"{name} is {values.dtype} {list(values.shape)} for {len(self.rows):,} photos")
        return values

    def __len__(self) -> int:
        return len(self.rows)

    def cells(self, row: int) -> dict[str, Any]:
        """The id and the caption of a row, and its path as the system has it."""
        cells = self.rows.slice(row, 1).to_pylist()[0]
        return {"path": os.fsdecode(cells["file"]), "id": cells["id"], "caption": cells["caption"]}

    def row_of(self, number: str) -> int:
        """The row of a photo by its id; -1 where there is none."""
        return int(pc.index(self.rows["id"], number).as_py())

    def photo(self, row: int) -> Path:
        """The file of a photo. Raises: ValueError for one outside the folder of photos, also behind a link."""
        path, root = str(self.cells(row)["path"]), Path(self.file.folder)
        if "\0" in path or not (root / path).resolve().is_relative_to(root.resolve()):
            raise ValueError("the library names a file outside its folder of photos.")
        return root / path

    def taken(self, rows: Sequence[int] | Array) -> Features:
        """The features by which a model scores photos: [len(rows), ...] each, float32."""
        names = (name for name in self.features if name not in OF_GAUSSIANS[1:])
        return {name: torch.from_numpy(self.features[name][rows].astype(np.float32)) for name in names}


def stamps_of(rows: pa.Table) -> dict[str, str]:
    """Path -> stamp of photos in rows of a library."""
    return dict(zip(map(os.fsdecode, rows["file"].to_pylist()), rows["stamp"].to_pylist(), strict=True))


def read_file(folder: Path) -> LibraryFile:
    """The settings of a library. Raises: ValueError for a folder that is none, one of another version, and damage."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a library: it has no {FILE}. Make one: kiloword index PHOTOS --model MODEL --out DIR."
        )
    file = read_config(path, LibraryFile)
    wrong = "of another version of kiloword" if file.format != VERSION else "damaged"
    if file.format != VERSION or not all(re.fullmatch("[a-z_]{1,40}", name) for name in file.features):
        raise ValueError(f"{path} is {wrong}: index the photos in a new folder.")
    return file


def _rows(path: Path) -> pa.Table:
    """The table of photos. Raises: ValueError for one that is packed or has other columns."""
    with pa.OSFile(os.fsencode(path)) as opened, pq.ParquetFile(opened) as file:
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        columns = [group.column(n) for group in groups for n in range(group.num_columns)]
        packed = any(column.compression != "UNCOMPRESSED" or column.has_dictionary_page for column in columns)
        if packed or not file.schema_arrow.equals(ROWS):
            raise ValueError(f"{path} has other columns")
        return file.read()


def version_of(folder: Path) -> tuple[int, int] | None:
    """Changes when library.json is replaced; None where it is gone."""
    try:
        status = (folder / FILE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def publish(
    folder: Path, file: LibraryFile, rows: pa.Table, features: Mapping[str, Array], before: Library | None, kept: Array
) -> None:
    """Write the next state of a library: rows `kept` of the one before, then these.

    Its number is made from the photos alone, so that an interrupted command ends with the same bytes as a whole one.
    """
    old = before.features if before else {}
    if before:
        rows = pa.concat_tables([before.rows.take(kept), rows])
    state = zlib.crc32("".join(rows["id"].to_pylist()).encode()) or 1
    features = features or {name: values[:0] for name, values in old.items()}
    for name, new in features.items():
        header = {"descr": new.dtype.str, "fortran_order": False, "shape": (len(rows), *new.shape[1:])}
        with atomic(folder / f"{name}-{state}.npy") as out:
            np.lib.format.write_array_header_1_0(out, header)
            for part in chunks(len(kept), BLOCK):
                out.write(np.ascontiguousarray(old[name][kept[part]]).data)
            out.write(np.ascontiguousarray(new).data)
    with atomic(folder / f"rows-{state}.parquet") as out:
        pq.write_table(rows, out, compression="none", use_dictionary=False)
    write_json(folder / FILE, asdict(replace(file, state=state, features=tuple(features))))
    tidy(folder, state)


def tidy(folder: Path, state: int) -> None:
    """Remove the files of other states."""
    for path in folder.iterdir():
        if (found := re.fullmatch(r"[a-z_]+-(\d+)\.(npy|parquet)", path.name)) and int(found[1]) != state:
            path.unlink()
