"""Codes of vectors: a byte or a bit for each number, by which all photos are compared before a few are scored exactly.

int8: a scale for each dimension, the largest number of it in a part. Query and rows are compared in whole numbers.
binary: signs, compared by the number of bits that differ (Hamming distance).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.model.heads import unit

CodeKind = Literal["float", "int8", "binary"]
StoredKind = Literal["fp16", "int8", "none"]
"""Of the vectors by which the candidates of codes are scored again."""

LEVELS = 127  # int8 codes are -LEVELS to LEVELS
WORD = 8  # bytes that are compared at a time
AGAIN = "The same `kiloword index` command again mends it."  # of damaged files
Bits = NDArray[np.uint8]


class Codes(Protocol):
    """Codes of n vectors of D numbers."""

    def scores(self, query: Tensor) -> Tensor:
        """[n] float32: about the cosines with a unit vector [D]; higher is nearer."""

    def vectors(self, rows: list[int]) -> Tensor:
        """[len(rows), D] float32: the vectors as far as their codes tell them."""


def code_bytes(kind: CodeKind, dim: int) -> int:
    """Bytes of the code of a vector of `dim` numbers."""
    return {"float": 4 * dim, "int8": dim, "binary": -(-dim // 8)}[kind]


def first(vec: Tensor, dim: int) -> Tensor:
    """The first numbers of vectors, normalised again where there are more: [..., dim]."""
    return vec if vec.shape[-1] == dim else unit(vec[..., :dim])


def quantised(vec: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [n, D] int8, and the scale [D] float32 that makes vectors of them. Args: vec [n, D]."""
    scale = vec.abs().amax(0).clamp(min=1e-12) / LEVELS if len(vec) else vec.new_ones(vec.shape[1])
    return (vec / scale).round().to(torch.int8), scale


def signs(vec: Tensor) -> Bits:
    """The bit "above 0" of every number, packed: [n, ceil(D / 8)]. Args: vec [n, D]."""
    return np.packbits(vec.numpy() > 0, axis=1)


class FloatCodes:
    """The vectors themselves [n, D], float32."""

    def __init__(self, vec: Tensor) -> None:
        self._vec = vec

    def scores(self, query: Tensor) -> Tensor:
        """[n], the cosines."""
        return self._vec @ query

    def vectors(self, rows: list[int]) -> Tensor:
        """[len(rows), D]."""
        return self._vec[rows]


class Int8Codes:
    """Whole numbers [n, D] with a scale [D]; the query is rounded to as many levels."""

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self._codes, self._scale = codes, scale

    def scores(self, query: Tensor) -> Tensor:
        """[n], sums of whole numbers: the cosines up to the rounding of rows and query."""
        weighted = query * self._scale
        step = weighted.abs().max().clamp(min=1e-12) / LEVELS
        whole = (weighted / step).round().to(torch.int8)
        products: Tensor = torch._int_mm(
            self._codes, whole[:, None]
        )  # 18 times as fast as in float32, a block at a time
        return products[:, 0] * step

    def vectors(self, rows: list[int]) -> Tensor:
        """[len(rows), D]."""
        return self._codes[rows] * self._scale


class BinaryCodes:
    """Signs, packed [n, ceil(D / 8)], of vectors of `dim` numbers."""

    def __init__(self, bits: Bits, dim: int) -> None:
        self._dim, self._bits = dim, bits
        self._words = np.ascontiguousarray(_words(bits).T)  # [W, n]: five times as fast as [n, W]

    def scores(self, query: Tensor) -> Tensor:
        """[n], 1 - 2 Hamming distance / D: the cosine of the signs."""
        kind = np.int16 if self._dim < 1 << 15 else np.int32
        differ: NDArray[Any] = np.zeros(self._words.shape[1], kind)
        for word, of_query in zip(self._words, _words(signs(query[None]))[0], strict=True):
            differ += np.bitwise_count(np.bitwise_xor(word, of_query))
        return 1 - torch.from_numpy(differ) * (2 / self._dim)

    def vectors(self, rows: list[int]) -> Tensor:
        """[len(rows), D], of norm 1."""
        bits = np.unpackbits(self._bits[rows], axis=1, count=self._dim)
        vectors: Tensor = (torch.from_numpy(bits) * 2.0 - 1) / self._dim**0.5
        return vectors


def _words(bits: Bits) -> NDArray[np.uint64]:
    """Packed bits as whole words, with zeros at the end: [n, ceil(bytes / WORD)]."""
    whole = np.zeros((len(bits), -(-bits.shape[1] // WORD) * WORD), np.uint8)
    whole[:, : bits.shape[1]] = bits
    return whole.view(np.uint64)


def column(values: Tensor) -> pa.Array:
    """[n, D] as a column of a table."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.numpy().ravel()), values.shape[1])


def scale_meta(scale: Tensor) -> dict[str, str]:
    """The metadata of a file with numbers int8. Args: their scale [D]."""
    return {"scale": json.dumps(scale.tolist())}


def scale_in(schema: pa.Schema, dim: int, path: Path) -> Tensor:
    """The scale of a file's numbers int8, [dim]. Raises: ValueError where it has none."""
    try:
        scale = torch.tensor(json.loads((schema.metadata or {})[b"scale"]), dtype=torch.float32)
    except (KeyError, ValueError, TypeError):
        scale = torch.empty(0)
    if scale.shape != (dim,) or not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"{path} is damaged: its numbers have no scale. {AGAIN}")
    return scale
