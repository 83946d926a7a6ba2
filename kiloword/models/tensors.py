"""Safetensors files; what is read stays on disk until it is used, as the file is mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from kiloword.files import atomic

Spec = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a tensor

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FLOATS = list(CODES)[:4]  # dtypes of weights


def spec_of(value: Tensor) -> Spec:
    return value.dtype, tuple(value.shape)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file. The library's own writer makes files that nobody else may read.

    Args: about: metadata of the file.
    Returns: its SHA-256. Raises: SaveError. Source: github.com/huggingface/safetensors, "Format".
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": CODES[tensors[name].dtype], "shape": tensors[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written = hashlib.sha256()
    with atomic(path) as file:

        def put(data: Any) -> None:
            file.write(data)
            written.update(data)

        put(len(text).to_bytes(8, "little") + text)
        for name in names:
            put(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return written.hexdigest()


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_digest(values: Mapping[str, Tensor], *before: bytes) -> str:
    """A digest of tensors by name, in single precision, wherever they lie. Args: before: what it covers, too."""
    digest = hashlib.blake2b(b"".join(before), digest_size=16)
    for name, value in sorted(values.items()):
        digest.update(f"{name} {list(value.shape)}\n".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def open_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises: ValueError when it is damaged, or holds others than floats."""
    odd = "\ufffd" in os.fsencode(path).decode(errors="replace")  # the library opens no path that is not UTF-8
    try:
        tensors = load(path.read_bytes()) if odd else load_file(path)
    except (SafetensorError, RuntimeError) as e:
        raise ValueError(f"{path} is damaged ({e}): copy it again, or use an earlier one.") from e
    for name, value in tensors.items():
        if value.dtype not in FLOATS:
            raise ValueError(f"{name[:200]} in {path} is {value.dtype}: expected floating-point weights.")
    return tensors
