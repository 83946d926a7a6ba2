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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from kiloword.search.codes import (
    BinaryCodes,
    CodeKind,
    Codes,
    FloatCodes,
    Int8Codes,
    StoredKind,
    code_bytes,
    column,
    first,
    quantised,
    scale_in,
    scale_meta,
    signs,
)
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
    shortened: bool = False  # whether `dim` is less than the embedding of the model has
    codes: CodeKind = "float"
    code_dim: int | None = None  # how many numbers of the vectors have codes; None: all
    vectors: StoredKind = "fp16"  # beside codes
    gaussian: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of features in the .arrow files
    parts: tuple[str, ...] = ()
    next_part: int = 1
    next_id: int = 0
    recall: dict[str, float] = field(default_factory=dict)  # see `rank.measure`
    format: Literal["kiloword-library-1"] = "kiloword-library-1"

    @property
    def prefix(self) -> int | None:
        """How many numbers of the model's embedding are kept; None: all."""
        return self.dim if self.shortened else None

    @property
    def compared(self) -> int:
        """How many numbers of the vectors all photos are compared by."""
        return self.code_dim or self.dim

    def schema(self) -> pa.Schema:
        """Columns of the parquet files."""
        vector = pa.list_(pa.float32(), self.dim)
        columns = {"id": pa.int64(), "path": pa.string(), "raw": pa.binary(), "stamp": pa.string()}
        columns |= {"caption": pa.string()} | (
            {"code": pa.binary(code_bytes(self.codes, self.compared))} if self.codes != "float" else {"vec": vector}
        )
        if self.gaussian:
            columns |= {"log_var": vector, "penalty": pa.float32(), "uncertainty": pa.float32()}
        return pa.schema(columns)

    def token_schema(self) -> pa.Schema:
        """Columns of the .arrow files."""
        sizes = {name: int(np.prod(shape)) for name, shape in self.shapes.items()}
        columns = {name: pa.list_(pa.float16(), size) for name, size in sizes.items()}
        if self.codes != "float" and self.vectors != "none":
            columns["vec"] = pa.list_(pa.float16() if self.vectors == "fp16" else pa.int8(), self.dim)
        return pa.schema(columns)


class LibraryPart:
    """n photos of a library. Codes and vectors are read when they are first used. Raises: ValueError for damage."""

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

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def codes(self) -> Codes:
        """What all photos are compared by, in memory; without codes the vectors [n, D], float32."""
        kind, dim = self.file.codes, self.file.compared
        if kind == "float":
            return FloatCodes(torch.from_numpy(self._flat("vec")).view(-1, dim))
        code = self._table(["code"])["code"].combine_chunks()
        stored = np.frombuffer(code.buffers()[1], np.uint8).reshape(-1, code_bytes(kind, dim))
        rows = stored[code.offset : code.offset + len(self)]
        if kind == "binary":
            return BinaryCodes(rows, dim)
        return Int8Codes(torch.tensor(rows.view(np.int8)), scale_in(pq.read_schema(self.path), dim, self.path))

    def near(self, query: Tensor) -> Tensor:
        """About the cosine of every photo with a vector [D], and exactly that without codes: [n]."""
        return self.codes.scores(first(query, self.file.compared))

    def vectors(self, rows: Sequence[int]) -> Tensor:
        """The vectors of rows, as exactly as they are stored: [len(rows), D] float32."""
        if self._stored is None:
            return self.codes.vectors(list(rows))
        flat, scale = self._stored
        return torch.from_numpy(flat[list(rows)].astype(np.float32)) * scale

    @cached_property
    def _stored(self) -> tuple[NDArray[Any], Tensor] | None:
        """The vectors beside codes [n, D], memory-mapped, and their scale [D] or [1]; None where there are none."""
        if "vec" not in self.file.token_schema().names:
            return None
        with self._arrow() as reader:
            table = reader.read_all()
            flat = table["vec"].combine_chunks().values.to_numpy().reshape(-1, self.file.dim)
            int8 = self.file.vectors == "int8"
            return flat, scale_in(reader.schema, self.file.dim, self.tokens_path) if int8 else torch.ones(1)

    @property
    def vec(self) -> Tensor:
        """All vectors, as exactly as they are stored: [n, D] float32."""
        return self.vectors(range(len(self)))

    def features(self, rows: Sequence[int]) -> Features:
        """All features of rows of the part, as the model's head takes them: [len(rows), ...] each."""
        features = {"vec": self.vectors(rows)}
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
        """All columns, those of the .arrow file too, with `vec` in place of codes."""
        table = self._table(self.file.schema().names)
        if self.file.codes != "float":
            table = table.drop_columns("code").append_column("vec", column(self.vec))
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
        table, tokens = _coded(table, file)
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


def _coded(table: pa.Table, file: LibraryFile) -> tuple[pa.Table, pa.Table]:
    """The columns of the parquet and of the .arrow file. Args: table: with all features, `vec` among them."""
    if file.codes == "float":
        return table.select(file.schema().names).cast(file.schema()), _tokens(table, file)
    flat = table["vec"].combine_chunks().values.to_numpy(zero_copy_only=False)
    vec = torch.tensor(flat).view(-1, file.dim)
    short = first(vec, file.compared)
    codes, scale = quantised(short)
    stored = codes.numpy() if file.codes == "int8" else signs(short)
    code = pa.array(map(bytes, stored), file.schema().field("code").type)  # parquet has int8 numbers as int32
    rows = table.append_column("code", code).select(file.schema().names).cast(file.schema())
    whole, scale_of_vectors = quantised(vec)
    if file.vectors == "int8":
        table = table.set_column(table.schema.get_field_index("vec"), "vec", column(whole))
    tokens = _tokens(table, file).replace_schema_metadata(scale_meta(scale_of_vectors))
    return rows.replace_schema_metadata(scale_meta(scale)), tokens


def _tokens(table: pa.Table, file: LibraryFile) -> pa.Table:
    return table.select(file.token_schema().names).cast(file.token_schema()).combine_chunks()


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
