"""Safetensors files: written one tensor at a time, read after their header was checked."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from torch import Tensor

from kiloword.files import SaveError, atomic

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
FLOATS = ("F64", "F32", "BF16", "F16")  # dtypes of weights
LONGEST_HEADER = 1 << 24  # bytes, enough for 100,000 tensors


def spec_of(value: Tensor) -> Spec:
    return value.dtype, tuple(value.shape)


def in_order(specs: Mapping[str, Spec]) -> list[str]:
    """Names in the order of a file."""
    kinds = list(CODES)
    return sorted(specs, key=lambda name: (kinds.index(specs[name][0]), name))


def write_tensors(
    path: Path, specs: Mapping[str, Spec], values: Iterable[Tensor], about: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file one tensor at a time; the library needs all of them, and twice the memory.

    Args: specs: of every tensor; values: in the order of `in_order(specs)`; about: metadata of the file.
    Returns: its SHA-256. Raises: SaveError. Source: github.com/huggingface/safetensors, "Format".
    """
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name in in_order(specs):
        dtype, shape = specs[name]
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with atomic(path) as file:
        head: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        for data in itertools.chain(head, _bytes(path, specs, values)):
            file.write(data)
            checksum.update(data)
    return checksum.hexdigest()


def _bytes(path: Path, specs: Mapping[str, Spec], values: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of the tensors. Raises: SaveError for values that do not match the specs."""
    for name, value in itertools.zip_longest(in_order(specs), values):
        if name is None or value is None or spec_of(value) != specs[name]:
            actual, expected = "nothing" if value is None else str(spec_of(value)), specs.get(name, "nothing more")
            raise SaveError(f"cannot write {path}: got {actual} for {name}, expected {expected}. This is a bug.")
        raw: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield memoryview(raw)


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a safetensors file; only the header is read.

    Raises: ValueError when it is damaged, or holds tensors that are not floating-point.
    """
    with path.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
    if not 2 <= size <= min(LONGEST_HEADER, path.stat().st_size - 8):
        raise ValueError(
            f"{path} is damaged (its header says that it has {size:,} bytes; expected at most {LONGEST_HEADER:,}, and "
            "no more than the file): copy it again, or use an earlier one."
        )
    shapes = {}
    try:
        with safe_open(path, framework="np") as file:
            names = file.keys()
            for name in names:
                part = file.get_slice(name)
                shapes[name] = tuple(part.get_shape())
                if part.get_dtype() not in FLOATS:
                    raise ValueError(
                        f"{name[:200]} in {path} is {part.get_dtype()}: expected one of {', '.join(FLOATS)}."
                    )
    except SafetensorError as e:
        raise ValueError(f"{path} is damaged ({e}): copy it again, or use an earlier one.") from e
    return shapes


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises: ValueError as `read_shapes`."""
    read_shapes(path)
    return load_tensors(path.read_bytes())
