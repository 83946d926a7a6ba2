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
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
ROWS = pa.schema(
    [pa.field(name, pa.binary() if name == "file" else pa.string(), nullable=False) for name in
     ("id", "path", "file", "stamp", "caption")]
)  # fmt: skip
OF_GAUSSIANS = ("log_var", "penalty", "uncertainty")
LARGEST, BLOCK = 1 << 20, 1 << 14  # bytes of library.json; rows that are read or written at once
Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class LibraryFile(BaseSettings):
    """The contents of `library.json`."""

    folder: str  # of the photos
    model: str  # a local one: a folder, or files
    fingerprint: str  # of the model's weights
    dim: int | None = None  # the first numbers of the model's embedding that are kept; None: all
    features: tuple[str, ...] = ()  # names of the matrices
    state: int = 0  # number of the state; 0: the first is not finished
    format: Literal["kiloword-library-2"] = "kiloword-library-2"


class Library:
    """A state of a library, N photos. What it opened stays readable when `kiloword index` makes the next state.

    Raises: ValueError for a folder that is no library, one that is damaged or not finished, or of an earlier version.
    """

    def __init__(self, folder: Path) -> None:
        while True:
            self.folder, self.version = folder, version_of(folder)
            self.file = read_file(folder)
            try:
                self.rows = _rows(folder / f"rows-{self.file.state}.parquet")
                self.features = {name: self._matrix(name) for name in self.file.features}
                break
            except (OSError, ValueError, ArithmeticError, pa.ArrowException) as error:
                if self.version != version_of(folder):  # the files of another state now
                    continue
                if not self.file.state:
                    raise ValueError(f"the library {folder} is not finished: run its `kiloword index` again.") from None
                raise ValueError(f"the library {folder} is damaged ({error}): remove it and index again.") from None

    def _matrix(self, name: str) -> Array:
        with np.errstate(over="raise"):  # of a shape
            values = np.asarray(np.lib.format.open_memmap(self.folder / f"{name}-{self.file.state}.npy", mode="r"))
        if values.dtype not in (np.float16, np.float32) or len(values) != len(self.rows):
            raise ValueError(f"{name} is {values.dtype} {list(values.shape)} for {len(self.rows):,} photos")
        return values

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def stamps(self) -> dict[str, str]:
        """Path -> stamp of every photo."""
        files = map(os.fsdecode, self.rows["file"].to_pylist())
        return dict(zip(files, self.rows["stamp"].to_pylist(), strict=True))

    def cells(self, row: int) -> dict[str, Any]:
        """The cells of a row by column; its `path` as the system has it."""
        cells: dict[str, Any] = self.rows.slice(row, 1).to_pylist()[0]
        return cells | {"path": os.fsdecode(cells["file"])}

    def row_of(self, number: str) -> int | None:
        """The row of a photo by its id; None where there is none."""
        row: int = pc.index(self.rows["id"], number).as_py()
        return None if row < 0 else row

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


def read_file(folder: Path) -> LibraryFile:
    """The settings of a library. Raises: ValueError for a folder that is none, and one of an earlier version."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a library: it has no {FILE}. Make one: kiloword index PHOTOS --model MODEL --out DIR."
        )
    if path.stat().st_size > LARGEST or VERSION.encode() not in path.read_bytes():
        raise ValueError(f"the library {folder} is of another version of kiloword: index the photos in a new folder.")
    file = read_config(path, LibraryFile)
    if not all(re.fullmatch("[a-z_]{1,40}", name) for name in file.features):
        raise ValueError(f"{path} is damaged: index the photos in a new folder.")
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


class Part(NamedTuple):
    """Some rows of a state, or of what was encoded, for the next state."""

    table: pa.Table
    features: Mapping[str, Array]
    rows: Array


def publish(folder: Path, file: LibraryFile, parts: Sequence[Part]) -> None:
    """Write the next state of a library, and then library.json, which makes it the current one."""
    table = pa.concat_tables([part.table.take(part.rows) for part in parts]).cast(ROWS)
    for name in file.features:
        like = parts[0].features[name]
        header = {"descr": like.dtype.str, "fortran_order": False, "shape": (len(table), *like.shape[1:])}
        with atomic(folder / f"{name}-{file.state + 1}.npy") as out:
            np.lib.format.write_array_header_1_0(out, header)
            for part in parts:
                for block in chunks(len(part.rows), BLOCK):
                    out.write(np.ascontiguousarray(part.features[name][part.rows[block]]).data)
    with atomic(folder / f"rows-{file.state + 1}.parquet") as out:
        pq.write_table(table, out, compression="none", use_dictionary=False)
    write_json(folder / FILE, asdict(replace(file, state=file.state + 1)))


def tidy(folder: Path) -> None:
    """Remove what is of other states than the current one, and what was encoded for it."""
    state = read_file(folder).state
    for path in folder.iterdir():
        found = re.fullmatch(r"([a-z_]+)-(\d+)(\.npy|\.parquet|)", path.name)
        if found and (found[1] == "next" or int(found[2]) != state):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
