"""Adapters (LoRA) in files: merged into the weights of a model, or saved apart from the model they adapt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from kiloword.model.adapters import MARK, adapters_of, merge
from kiloword.models.tensors import read_tensors, write_tensors

FILE = "adapter.safetensors"
BASE = "base_sha256"  # key of its metadata: digest of model.safetensors of the adapted model


def merged(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a model with its adapters merged."""
    for name, value in weights.items():
        if MARK not in name:
            parts = [weights[part] for part in adapters_of(name, weights)]
            yield name, merge(value, *parts) if parts else value


def write_adapter(folder: Path, base: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write the tensors of a model with adapters that its base does not hold: adapters, head, other trained tensors.

    Args: base: the model folder from which the run started. Raises: SaveError, ValueError for a damaged base.
    """
    before = read_tensors(base / "model.safetensors")
    kept = {n: x for n, x in weights if n not in before or not torch.equal(x, before[n].to(x.dtype))}
    write_tensors(folder / FILE, kept, {BASE: digest(base)})


def digest(folder: Path) -> str:
    """SHA-256 of the weights of a model folder."""
    with (folder / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def joined(base: Path, folder: Path) -> dict[str, Tensor]:
    """Weights of the model whose adapters lie in `folder`, merged.

    Raises: ValueError when they are damaged, or belong to another model than `base`.
    """
    adapters = read_tensors(folder / FILE)
    with safe_open(folder / FILE, framework="np") as file:
        expected = str((file.metadata() or {}).get(BASE, ""))
    if (actual := digest(base)) != expected:
        raise ValueError(
            f"{folder} holds adapters of another model than {base}: expected weights whose SHA-256 begins with "
            f"{expected[:16]!r}, got {actual[:16]!r}. Name the model folder that --init of their run named."
        )
    weights = {**read_tensors(base / "model.safetensors"), **adapters}
    try:
        return dict(merged(weights))
    except (RuntimeError, KeyError, ZeroDivisionError, IndexError, ValueError) as e:  # shapes that do not fit
        raise ValueError(f"{folder / FILE} is damaged ({str(e)[:200]}): copy it again.") from e
