"""A library: the photos of a folder as a table, and matrices of their features beside it, which other programs read.

    library.json     what the files below were made from, and the number of their state; written last
    rows-1.parquet   a row a photo: id, path, file (the path's bytes), stamp, caption
    vec-1.npy        [N, D] float32, norm 1; of Gaussians also log_var [N, D], penalty [N] and uncertainty [N]
    ...              of models that compare a photo anew with each text, what they need of it, float16

A library may be a stranger's: nothing of it is code, and a reader takes no more memory than its files have bytes.

Photos are scored exactly, all of them, where a score is a cosine minus uncertainties. A model that compares a photo
anew with each text (llip, flair, filip) scores a shortlist, the photos nearest by their vectors.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from kiloword.config.settings import BaseSettings, read_config
from kiloword.data.classes.names import caseless
from kiloword.data.images.decode import decode
from kiloword.data.sample import MAX_IMAGE, read_whole
from kiloword.files import atomic, write_json
from kiloword.model.encoding import chunks, inference, moved
from kiloword.report import Pixels, thumbnail
from kiloword.types import BadSample, Features

if TYPE_CHECKING:
    from kiloword.api import Matcher

FILE, VERSION = "library.json", "kiloword-library-3"
TYPES = {"id": pa.string(), "path": pa.string(), "file": pa.binary(), "stamp": pa.string(), "caption": pa.string()}
ROWS = pa.schema([pa.field(name, kind, nullable=False) for name, kind in TYPES.items()])
OF_GAUSSIANS = ("log_var", "penalty", "uncertainty")
BLOCK = 1 << 14  # rows that are written at once
SHORTLIST = 300  # photos scored exactly by a model that compares photos anew with each text
SCORED = 32  # of them at once, so that their features fit into memory
LONGEST_QUERY = 10_000  # characters
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
        self.folder, self.file = folder, read_file(folder)
        if not self.file.state:
            raise ValueError(f"the library {folder} holds no photos yet: run its `kiloword index` again.")
        try:
            self.rows = _rows(folder / f"rows-{self.file.state}.parquet")
            self.features = {name: self._matrix(name) for name in self.file.features}
        except (OSError, ValueError, ArithmeticError, pa.ArrowException) as error:
            if self.file == read_file(folder):
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

    def photos(self, rows: Sequence[int] | Array, scores: Array | None = None) -> list[dict[str, Any]]:
        """What rows [n] show: path, id, caption, their score of scores [N], and the uncertainty of a Gaussian."""
        found = self.rows.take(pa.array(rows, pa.int64())).to_pylist()
        told = {"score": scores, "uncertainty": self.features.get("uncertainty")}
        numbers = {name: values[rows].tolist() for name, values in told.items() if values is not None}
        return [
            {"path": os.fsdecode(cells["file"]), "id": cells["id"], "caption": cells["caption"]}
            | {name: values[n] for name, values in numbers.items()}
            for n, cells in enumerate(found)
        ]

    def row_of(self, number: str) -> int:
        """The row of a photo by its id. Raises: FileNotFoundError where there is none."""
        if (row := int(pc.index(self.rows["id"], number).as_py())) < 0:
            raise FileNotFoundError("there is no such photo (any more).")
        return row

    def photo(self, number: str) -> Path:
        """The file of a photo by its id. Raises: FileNotFoundError for none, one that leads out of the folder too."""
        path, root = os.fsdecode(self.rows["file"][self.row_of(number)].as_py()), Path(self.file.folder)
        if "\0" in path or not (root / path).resolve().is_relative_to(root.resolve()):
            raise FileNotFoundError("the library names a file outside its folder of photos.")
        return root / path

    def taken(self, rows: Sequence[int] | Array) -> Features:
        """The features by which a model scores photos: [len(rows), ...] each, float32."""
        names = (name for name in self.features if name not in OF_GAUSSIANS[1:])
        return {name: torch.from_numpy(self.features[name][rows].astype(np.float32)) for name in names}


def ids_of(rows: pa.Table) -> dict[str, str]:
    """Path -> id of photos in rows of a library."""
    return dict(zip(map(os.fsdecode, rows["file"].to_pylist()), rows["id"].to_pylist(), strict=True))


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


def publish(
    folder: Path, file: LibraryFile, rows: pa.Table, features: Mapping[str, Array], before: Library | None, kept: Array
) -> Library:
    """Write and open the next state of a library: rows `kept` of the one before, then these.

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
    return Library(folder)


def tidy(folder: Path, state: int) -> None:
    """Remove the files of other states."""
    for path in folder.iterdir():
        if (found := re.fullmatch(r"[a-z_]+-(\d+)\.(npy|parquet)", path.name)) and int(found[1]) != state:
            path.unlink()


def by_text(library: Library, matcher: Matcher, text: str, top: int, within: str = "") -> list[dict[str, Any]]:
    """The best photos for a text, as `Library.photos`. Args: within: part of the path that photos must have.

    Raises: ValueError for a text that is empty or too long.
    """
    text = " ".join(text.split())
    if not 0 < len(text) <= LONGEST_QUERY:
        raise ValueError(f"the query has {len(text):,} characters: expected words, at most {LONGEST_QUERY:,}.")
    model, texts = matcher.model, matcher.encode_text([text])
    scores = library.features["vec"] @ texts["vec"][0].float().cpu().numpy()
    if "penalty" in library.features:
        assert model.head.uncertainty is not None
        with inference(model):
            scores -= library.features["penalty"] + model.head.uncertainty.penalty(texts).float().cpu().numpy()
    _only(library, scores, within)
    if not library.features.keys() <= {"vec", *OF_GAUSSIANS}:
        rows, exact = np.sort(best(scores, max(SHORTLIST, top))), np.full_like(scores, -np.inf)
        for part in chunks(len(rows), SCORED):
            some = moved(library.taken(rows[part]), model.device)
            exact[rows[part]] = matcher.score(some, texts)[:, 0].float().cpu().numpy()
        scores = exact
    return library.photos(best(scores, top), scores)


def by_image(library: Library, vec: Array, top: int, within: str = "") -> list[dict[str, Any]]:
    """The photos most like an image by the cosine of their vectors, [D], as `Library.photos`."""
    scores = library.features["vec"] @ vec
    _only(library, scores, within)
    return library.photos(best(scores, top), scores)


def best(scores: Array, top: int) -> Array:
    """Places of the largest scores, without -inf and NaN; ties in their order, however many are wanted."""
    rows = np.flatnonzero(scores > -np.inf)
    if top < len(rows):
        rows = rows[scores[rows] >= np.partition(scores[rows], -top)[-top]]
    return rows[np.argsort(-scores[rows], kind="stable")][:top]


def _only(library: Library, scores: Array, within: str) -> None:
    """Give -inf to photos whose path has not `within`."""
    if within:
        inside = [caseless(within) in caseless(path) for path in library.rows["path"].to_pylist()]
        scores[~np.array(inside, bool)] = -np.inf


def shrunk(photo: Path, side: int) -> Pixels:
    """A photo [H, W, 3] with at most `side` pixels a side. Raises: FileNotFoundError for one that cannot be read."""
    try:
        return thumbnail(decode(read_whole(photo, "it", MAX_IMAGE), at_least=side), side)
    except (OSError, BadSample) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileNotFoundError(f"the photo cannot be read ({reason}).") from None
