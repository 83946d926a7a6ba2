"""A library: the features of a folder's photos, in parquet files that other programs read.

    library.json         what the files below were made from, and their names; written last
    part-000001.parquet  a row a photo: id, path, caption, vec [D] and, of Gaussians, uncertainty, penalty, log_var [D]
    part-000001.arrow    of models that pool for each text: features by which a photo is scored, float16

Parts are never changed: an update writes new ones, then library.json, then removes the old ones. A killed update leaves
the library as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.checkpoint.files import atomic, write_json
from kiloword.config.settings import BaseSettings, about, read_config
from kiloword.types import Features

FILE, PART = "library.json", 4096  # rows of a part
AGAIN = "The same `kiloword index` command again mends it."


@dataclass(frozen=True, kw_only=True)
class LibraryFile(BaseSettings):
    """The contents of `library.json`."""

    folder: str  # of the photos
    model: str  # as given by the user
    fingerprint: str  # of the model
    dim: int = field(metadata=about(low=1, high=1e6))
    gaussian: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of features in the .arrow files
    parts: tuple[str, ...] = ()
    next_part: int = 1
    next_id: int = 0
    recall: dict[str, float] = field(default_factory=dict)  # see `rank.measure`
    format: Literal["kiloword-library-1"] = "kiloword-library-1"

    def schema(self) -> pa.Schema:
        """Columns of the parquet files."""
        vector = pa.list_(pa.float32(), self.dim)
        columns = {"id": pa.int64(), "path": pa.string(), "raw": pa.binary(), "stamp": pa.string()}
        columns |= {"caption": pa.string(), "vec": vector}
        if self.gaussian:
            columns |= {"log_var": vector, "penalty": pa.float32(), "uncertainty": pa.float32()}
        return pa.schema(columns)

    def token_schema(self) -> pa.Schema:
        """Columns of the .arrow files."""
        sizes = {name: int(np.prod(shape)) for name, shape in self.shapes.items()}
        return pa.schema({name: pa.list_(pa.float16(), size) for name, size in sizes.items()})


class LibraryPart:
    """n photos of a library. `vec` [n, D] is read when it is first used. Raises: ValueError for a damaged file."""

    def __init__(self, folder: Path, name: str, file: LibraryFile) -> None:
        self.name, self.file = name, file
        self.path, self.tokens_path = folder / f"{name}.parquet", folder / f"{name}.arrow"
        names = ["id", "path", "raw", "stamp", "caption", *(["penalty", "uncertainty"] if file.gaussian else [])]
        table = self._table(names)
        self.ids: NDArray[np.int64] = table["id"].to_numpy()
        raws = table["raw"].to_pylist()
        self.paths = [p if r is None else os.fsdecode(r) for p, r in zip(table["path"].to_pylist(), raws, strict=True)]
        self.captions, self.stamps = table["caption"].to_pylist(), table["stamp"].to_pylist()
        self.uncertain = {name: torch.tensor(table[name].to_numpy()) for name in names[5:]}  # [n] each
        self._vec: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def vec(self) -> Tensor:
        """[n, D] float32, unit norm."""
        if self._vec is None:
            self._vec = torch.from_numpy(self._flat("vec")).view(-1, self.file.dim)
        return self._vec

    def features(self, rows: Sequence[int]) -> Features:
        """All features of rows of the part, as the model's head takes them: [len(rows), ...] each."""
        features = {"vec": self.vec[list(rows)]}
        if self.file.gaussian:
            features["log_var"] = torch.from_numpy(self._flat("log_var")).view(-1, self.file.dim)[list(rows)]
        if self.file.shapes:
            with self._arrow() as reader:
                table = reader.read_all()
                for name, shape in self.file.shapes.items():
                    flat = table[name].combine_chunks().values.to_numpy().reshape(len(self), -1)
                    features[name] = torch.from_numpy(flat[list(rows)].astype(np.float32)).view(-1, *shape)
        return features

    def whole(self) -> pa.Table:
        """All columns, those of the .arrow file too."""
        table = self._table(self.file.schema().names)
        if self.file.shapes:
            with self._arrow() as reader:
                tokens = reader.read_all()
            for name in self.file.shapes:
                table = table.append_column(tokens.schema.field(name), tokens[name])
        return table

    def _flat(self, name: str) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._table([name])[name].combine_chunks().values.to_numpy(zero_copy_only=False)
        if not np.isfinite(values).all():
            raise ValueError(f"{self.path} is damaged: {name} is NaN or infinite. {AGAIN}")
        return np.require(values, requirements="W")

    def _table(self, names: list[str]) -> pa.Table:
        """Columns of the parquet file."""
        try:
            table = pq.read_table(self.path, columns=names, partitioning=None)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{self.path} is missing or damaged. {AGAIN}") from error
        expected = self.file.schema()
        right = all(n in table.schema.names and table.schema.field(n).type == expected.field(n).type for n in names)
        if not right or any(table[n].null_count for n in names if n != "raw"):
            raise ValueError(f"{self.path} has other columns than a library. {AGAIN}")
        return table

    def _arrow(self) -> pa.RecordBatchFileReader:
        try:
            reader = pa.ipc.open_file(pa.memory_map(os.fsencode(self.tokens_path)))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{self.tokens_path} is missing or damaged. {AGAIN}") from error
        if not reader.schema.equals(self.file.token_schema()):
            raise ValueError(f"{self.tokens_path} has other columns than its library.json says. {AGAIN}")
        return reader


class Library:
    """The photos of a library, N in all. Raises: ValueError when the folder is none, or is damaged.

    Args: mend: omit damaged parts, so that their photos count as new.
    """

    def __init__(self, folder: Path, mend: bool = False, parts: Mapping[str, LibraryPart] | None = None) -> None:
        self.folder = folder
        if not (folder / FILE).is_file():
            raise ValueError(
                f"{folder} is not a library: it has no {FILE}. Make one: kiloword index PHOTOS --model MODEL --out DIR."
            )
        self.file = read_config(folder / FILE, LibraryFile)
        self.version = _version(folder)
        self.parts: list[LibraryPart] = []
        for name in self.file.parts:
            if Path(name).name != name:
                raise ValueError(f"{folder / FILE} cannot be used: it names the part {name!r} outside its folder.")
            try:
                self.parts.append((parts or {}).get(name) or LibraryPart(folder, name, self.file))
            except ValueError:
                if not mend:
                    raise
        self._places()

    def _places(self) -> None:
        self.starts = np.cumsum([0, *map(len, self.parts)])  # rows of the parts
        self.ids: NDArray[np.int64] = np.concatenate([np.zeros(0, np.int64), *(part.ids for part in self.parts)])
        self.row_of = {int(number): row for row, number in enumerate(self.ids)}

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

    def refreshed(self) -> Library:
        """The library as it is now; this one if nothing changed."""
        with suppress(OSError):
            if _version(self.folder) != self.version:
                return Library(self.folder, parts={part.name: part for part in self.parts})
        return self

    def commit(self, rows: pa.Table | None = None, drop: frozenset[str] = frozenset(), **changed: Any) -> None:
        """Remove photos by their paths, add rows (without ids) and change settings: all of it or nothing."""
        file, parts = replace(self.file, **changed), []
        for part in self.parts:
            keep = [path not in drop for path in part.paths]
            if all(keep):
                parts.append(part)
            elif any(keep):
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
        if file.shapes:
            tokens = table.select(list(file.shapes)).cast(file.token_schema()).combine_chunks()
            with atomic(self.folder / f"{name}.arrow") as out, pa.ipc.new_file(out, tokens.schema) as writer:
                writer.write_table(tokens)
        with atomic(self.folder / f"{name}.parquet") as out:
            columns = table.select(file.schema().names).cast(file.schema())
            pq.write_table(columns, out, compression="none", use_dictionary=False)
        parts.append(LibraryPart(self.folder, name, file))
        return replace(file, next_part=file.next_part + 1)

    def _publish(self, file: LibraryFile, parts: list[LibraryPart]) -> None:
        self.parts, self.file = parts, replace(file, parts=tuple(part.name for part in parts))
        write_json(self.folder / FILE, vars(self.file))
        self.version = _version(self.folder)
        self._places()
        for stale in _files(self.folder):
            if stale.stem not in self.file.parts:
                stale.unlink(missing_ok=True)


def create(folder: Path, file: LibraryFile) -> Library:
    """An empty library. Raises: ValueError for a folder that holds other files."""
    strange = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    if strange:
        raise ValueError(f"{folder} holds other files ({strange[0]}, ...): choose a new folder for --out.")
    write_json(folder / FILE, vars(file))
    return Library(folder)


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for kind in ("parquet", "arrow") for path in folder.glob(f"part-??????.{kind}"))


def _version(folder: Path) -> tuple[int, int]:
    """Changes when library.json is replaced. Raises: OSError."""
    status = (folder / FILE).stat()
    return status.st_ino, status.st_mtime_ns
