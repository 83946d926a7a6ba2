"""Adapters (LoRA) in files: merged into the weights of a model, or saved apart from the model they adapt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from kiloword.model.adapters import MARK, merge
from kiloword.models.tensors import checksum, open_tensors, write_tensors

FILE = "adapter.safetensors"
BASE = "base_sha256"  # key of its metadata: digest of model.safetensors of the adapted model


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model, with its adapters merged. Raises: ValueError for adapters that do not fit."""
    out = {name: value for name, value in weights.items() if MARK not in name}
    for layer in [name.removesuffix(f"{MARK}a") for name in weights if name.endswith(f"{MARK}a")]:
        try:
            parts = (weights[f"{layer}{MARK}{part}"] for part in ("a", "b", "scale"))
            out[f"{layer}.weight"] = merge(out[f"{layer}.weight"], *parts)
        except (RuntimeError, ZeroDivisionError, IndexError, ValueError, KeyError) as e:
            raise ValueError(f"an adapter of {layer[:200]} is damaged ({str(e)[:200]}): copy it again.") from e
    return out


def write_adapter(folder: Path, base: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the tensors of a model with adapters that its base does not hold: adapters, head, other trained tensors.

    Args: base: the model folder from which the run started. Raises: SaveError, ValueError for a damaged base.
    """
    before = open_tensors(base / "model.safetensors")
    kept = {k: v for k, v in weights.items() if k not in before or not torch.equal(v, before[k].to(v.dtype))}
    write_tensors(folder / FILE, kept, {BASE: checksum(base / "model.safetensors")})


def joined(base: Path, folder: Path) -> dict[str, Tensor]:
    """Weights of the model whose adapters lie in `folder`, merged.

    Raises: ValueError when they are damaged, or belong to another model than `base`.
    """
    adapters = open_tensors(folder / FILE)
    with safe_open(folder / FILE, framework="pt") as file:
        expected = str((file.metadata() or {}).get(BASE, ""))
    if (actual := checksum(base / "model.safetensors")) != expected:
        raise ValueError(
            f"{folder} holds adapters of another model than {base}: expected weights whose SHA-256 begins with "
            f"{expected[:16]!r}, got {actual[:16]!r}. Name the model folder that --init of their run named."
        )
    return merged({**open_tensors(base / "model.safetensors"), **adapters})
