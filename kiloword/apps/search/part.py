"""A part of a library: its two files, as tables, and what is read of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.apps.search.codes import (
    AGAIN,
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
from kiloword.config.settings import BaseSettings, about
from kiloword.types import Features


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
    id: str = ""  # 16 random digits (hex); the library of another command at the same path has others
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
    """n photos of a library. Codes and vectors are read when they are first used. Raises: ValueError for damage.

    What was read, and the .arrow file once it is open, outlasts the files.
    """

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

    def load(self) -> None:
        """Read what searches compare, and open the rest. Raises: ValueError for damage."""
        _ = self.codes, self._stored
        for name in self.file.shapes:
            self._token_rows(name)

    def check(self) -> None:
        """Read all but the numbers of features that are pooled for each text. Raises: ValueError for damage."""
        self.load()
        del self.codes  # the vectors of all parts may not fit into memory
        if self.file.gaussian:
            self._flat("log_var")
        for name, values in self.uncertain.items():
            _finite(values.numpy(), name, self.path)
        if self._stored is not None:
            _finite(self._stored[0], "vec", self.tokens_path)

    @cached_property
    def codes(self) -> Codes:
        """What all photos are compared by, in memory; without codes the vectors [n, D], float32."""
        kind, dim = self.file.codes, self.file.compared
        if kind == "float":
            return FloatCodes(torch.from_numpy(self._flat("vec")).view(-1, dim))
        table = self._table(["code"])
        code = table["code"].combine_chunks()
        stored = np.frombuffer(code.buffers()[1], np.uint8).reshape(-1, code_bytes(kind, dim))
        rows = stored[code.offset : code.offset + len(self)]
        if kind == "binary":
            return BinaryCodes(rows, dim)
        return Int8Codes(torch.tensor(rows.view(np.int8)), scale_in(table.schema, dim, self.path))

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
        flat, int8 = self._token_rows("vec"), self.file.vectors == "int8"
        return flat, scale_in(self._tokens.schema, self.file.dim, self.tokens_path) if int8 else torch.ones(1)

    @property
    def vec(self) -> Tensor:
        """All vectors, as exactly as they are stored: [n, D] float32."""
        return self.vectors(range(len(self)))

    def features(self, rows: Sequence[int]) -> Features:
        """All features of rows of the part, as the model's head takes them: [len(rows), ...] each."""
        features = {"vec": self.vectors(rows)}
        if self.file.gaussian:
            features["log_var"] = torch.from_numpy(self._flat("log_var")).view(-1, self.file.dim)[list(rows)]
        for name, shape in self.file.shapes.items():
            flat = self._token_rows(name)
            features[name] = torch.from_numpy(flat[list(rows)].astype(np.float32)).view(-1, *shape)
        return features

    def whole(self) -> pa.Table:
        """All columns, those of the .arrow file too, with `vec` in place of codes."""
        table = self._table(self.file.schema().names)
        if self.file.codes != "float":
            table = table.drop_columns("code").append_column("vec", column(self.vec))
        for name in self.file.shapes:
            table = table.append_column(self._tokens.schema.field(name), self._tokens[name])
        return table

    def _flat(self, name: str) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._table([name])[name].combine_chunks().values.to_numpy(zero_copy_only=False)
        _finite(values, name, self.path)
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

    @cached_property
    def _tokens(self) -> pa.Table:
        """The .arrow file, memory-mapped; it stays so."""
        try:
            with pa.memory_map(os.fsencode(self.tokens_path)) as raw, pa.ipc.open_file(raw) as reader:
                table: pa.Table = reader.read_all()
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"{self.tokens_path} is missing or damaged. {AGAIN}") from error
        if not table.schema.equals(self.file.token_schema()):
            raise ValueError(f"{self.tokens_path} has other columns than its library.json says. {AGAIN}")
        if len(table) != len(self):
            raise ValueError(f"{self.tokens_path} has {len(table):,} rows, and {self.path} {len(self):,}. {AGAIN}")
        return table

    def _token_rows(self, name: str) -> NDArray[Any]:
        """A column of the .arrow file: [n, numbers of a row]."""
        rows = self._tokens[name].combine_chunks()
        values = rows.flatten()
        if rows.null_count or values.null_count:
            raise ValueError(f"{self.tokens_path} is damaged: {name} has gaps. {AGAIN}")
        numbers: NDArray[Any] = values.to_numpy()
        return numbers.reshape(len(self), -1)


def _finite(values: NDArray[Any], name: str, path: Path) -> None:
    """Raises: ValueError for NaN and infinite numbers."""
    if not np.isfinite(values).all():
        raise ValueError(f"{path} is damaged: {name} is NaN or infinite. {AGAIN}")


def coded(table: pa.Table, file: LibraryFile) -> tuple[pa.Table, pa.Table]:
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
