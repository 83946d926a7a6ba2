"""Adapters (LoRA) in files: merged into the weights of a model, or saved apart from the model they adapt."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from kiloword.model.adapters import MARK, adapters_of, merge
from kiloword.models.tensors import Tensors, open_tensors, write_tensors

FILE = "adapter.safetensors"
BASE = "base_sha256"  # key of its metadata: digest of model.safetensors of the adapted model


def merged(weights: Tensors) -> Tensors:
    """The tensors of a model, with its adapters merged. `read` raises ValueError for adapters that do not fit."""

    def read(name: str) -> Tensor:
        parts = [weights.read(part) for part in adapters_of(name, weights.specs)]
        try:
            return merge(weights.read(name), *parts) if parts else weights.read(name)
        except (RuntimeError, ZeroDivisionError, IndexError, ValueError) as e:
            raise ValueError(f"an adapter of {name} is damaged ({str(e)[:200]}): copy it again.") from e

    return Tensors({name: spec for name, spec in weights.specs.items() if MARK not in name}, read)


def write_adapter(folder: Path, base: Path, weights: Tensors) -> None:
    """Write the tensors of a model with adapters that its base does not hold: adapters, head, other trained tensors.

    Args: base: the model folder from which the run started. Raises: SaveError, ValueError for a damaged base.
    """
    before, kept = open_tensors(base / "model.safetensors"), {}
    for name in weights.specs:
        value = weights.read(name)
        if name not in before.specs or not torch.equal(value, before.read(name).to(value.dtype)):
            kept[name] = value
    write_tensors(folder / FILE, kept, {BASE: digest(base)})


def digest(folder: Path) -> str:
    """SHA-256 of the weights of a model folder."""
    with (folder / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def joined(base: Path, folder: Path) -> Tensors:
    """Weights of the model whose adapters lie in `folder`, merged.

    Raises: ValueError when they are damaged, or belong to another model than `base`.
    """
    adapters, weights = open_tensors(folder / FILE), open_tensors(base / "model.safetensors")
    expected = str(adapters.about.get(BASE, ""))
    if (actual := digest(base)) != expected:
        raise ValueError(
            f"{folder} holds adapters of another model than {base}: expected weights whose SHA-256 begins with "
            f"{expected[:16]!r}, got {actual[:16]!r}. Name the model folder that --init of their run named."
        )

    def read(name: str) -> Tensor:
        return (adapters if name in adapters.specs else weights).read(name)

    return merged(Tensors({**weights.specs, **adapters.specs}, read))
