"""Safetensors files: written one tensor at a time, read after their header was checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from kiloword.files import atomic

Spec = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a tensor in a file

CODES = {  # dtypes of safetensors, widest first; tensors are stored in this order, so that all are aligned
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
LONGEST_HEADER = 1 << 24  # bytes, enough for 100,000 tensors
FLOATS = ("F64", "F32", "BF16", "F16")  # dtypes of weights


def spec_of(value: Tensor) -> Spec:
    return value.dtype, tuple(value.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """As `write_streamed`, of tensors in memory."""
    return write_streamed(path, {name: spec_of(value) for name, value in tensors.items()}, tensors.__getitem__, about)


def write_streamed(
    path: Path, specs: Mapping[str, Spec], read: Callable[[str], Tensor], about: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file, of which one tensor at a time is in memory.

    Args: read: the tensor of a name; about: metadata of the file.
    Returns: its SHA-256. Raises: SaveError. Source: github.com/huggingface/safetensors, "Format".
    """
    kinds = list(CODES)
    names = sorted(specs, key=lambda name: (kinds.index(specs[name][0]), name))
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name in names:
        dtype, shape = specs[name]
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with atomic(path) as file:

        def put(data: bytes | memoryview) -> None:
            file.write(data)
            checksum.update(data)

        put(len(text).to_bytes(8, "little") + text)
        for name in names:
            value = read(name)
            assert spec_of(value) == specs[name], name
            raw: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            put(memoryview(raw))
    return checksum.hexdigest()


@dataclass(frozen=True)
class Tensors:
    """Tensors on disk: their dtypes and shapes by name, and `read` for one of them."""

    specs: Mapping[str, Spec]
    read: Callable[[str], Tensor]
    about: Mapping[str, str] = field(default_factory=dict)  # metadata of the file

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape) in self.specs.items()}

    def all(self) -> dict[str, Tensor]:
        return {name: self.read(name) for name in self.specs}


def open_tensors(path: Path) -> Tensors:
    """The tensors of a safetensors file; only its header is read.

    Raises: ValueError when it is damaged, or holds tensors that are not floating-point.
    """
    with path.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
    if size > LONGEST_HEADER:
        raise ValueError(f"{path} is damaged (a header of {size:,} bytes, above {LONGEST_HEADER:,}): copy it again.")
    specs = {}
    try:
        file: Any = safe_open(path, framework="np")  # torch would map the whole file
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            if part.get_dtype() not in FLOATS:
                raise ValueError(f"{name[:200]} in {path} is {part.get_dtype()}: expected one of {', '.join(FLOATS)}.")
            specs[name] = DTYPES[part.get_dtype()], tuple(part.get_shape())
    except SafetensorError as e:
        raise ValueError(f"{path} is damaged ({e}): copy it again, or use an earlier one.") from e

    @cache
    def reader() -> Callable[[str], Tensor]:
        try:
            return safe_open(path, framework="pt").get_tensor
        except SafetensorError:  # the path is not UTF-8
            return load(path.read_bytes()).__getitem__

    return Tensors(specs, lambda name: reader()(name), file.metadata() or {})
