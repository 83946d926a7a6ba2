"""Defaults that depend on the device: precision, workers. A run's are chosen once, before its `config.json`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, cast, get_args

import torch

from kiloword.config.recipes import EncoderPrecision, Matmul, ModelConfig, Precision, Recipe, sizes
from kiloword.data.steps import free_shared_memory
from kiloword.distributed.device import cores
from kiloword.distributed.sharing import is_first
from kiloword.terminal import warn

MOST_WORKERS = 16  # that are chosen for a rank: each holds batches in memory
AHEAD = 3  # batches in shared memory for each worker: two that wait, one that is made


def settle(recipe: Recipe, device: str, earlier: Recipe | None = None) -> Recipe:
    """The recipe with `precision` and `matmul` chosen where they are "auto".

    Those of the run that continues, whatever its device. Else bf16 for tiny, which learns as well with it and is twice
    as fast on a CPU, and on CUDA for all larger sizes; TF32 on CUDA, elsewhere what torch is set to.

    Args: device: "cpu", "cuda" or "cuda:N"; earlier: the recipe of the run that continues.
    """
    precision, matmul = recipe.precision, recipe.matmul
    if earlier is not None:
        chosen = earlier.precision, earlier.matmul
    else:
        chosen = _precision(recipe.size, device), _matmul(device)
    return replace(
        recipe,
        precision=chosen[0] if precision == "auto" else precision,
        matmul=chosen[1] if matmul == "auto" else matmul,
    )


def _precision(size: str, device: str) -> Precision:
    return "bf16" if size == "tiny" or (device.startswith("cuda") and size != "debug") else "fp32"


def _matmul(device: str) -> Matmul:
    return "high" if device.startswith("cuda") else torch.get_float32_matmul_precision()  # type: ignore[return-value]


def encoder_precision(asked: str, config: ModelConfig, device: str) -> EncoderPrecision:
    """What the encoders of a finished model compute in. "auto": bf16 on CUDA where the model is larger than size tiny.

    Raises: ValueError for another name.
    """
    if asked == "auto":
        return "bf16" if device.startswith("cuda") and _is_large(config) else "fp32"
    if asked not in get_args(EncoderPrecision):
        raise ValueError(f"precision is {asked!r}: expected auto, fp32 or bf16.")
    return cast(EncoderPrecision, asked)


def _is_large(config: ModelConfig) -> bool:
    """Whether a tower is wider than the same one of size tiny."""
    tiny = sizes()["tiny"]
    return config.image.width > tiny.image.width or config.text.width > tiny.text.width


def workers_of(asked: int | Literal["auto"], device: str, batch: int) -> int:
    """Loader processes of a rank. "auto": none on a CPU, which has no cores to spare; on CUDA the rank's share of the
    cores but two, as far as their batches fit into shared memory.

    Args: asked: --workers; batch: bytes of a rank's batch.
    """
    if asked != "auto":
        return asked
    if not device.startswith("cuda"):
        return 0
    share = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = free_shared_memory()
    fit = MOST_WORKERS if free is None else free // (AHEAD * batch)
    return min(max(1, share - 2), MOST_WORKERS, fit)


def summary(asked: Recipe, settled: Recipe, device: str, workers: int, resumed: bool) -> str:
    """One line: what was chosen for a device, and why. Args: asked: the recipe before `settle`; resumed: by it."""
    sizes = f"size {settled.size}"
    reasons = {"precision": sizes, "matmul": "TF32" if device.startswith("cuda") else "as torch is set"}
    if resumed:
        reasons = dict.fromkeys(reasons, "as the run began")
    shown = {
        name: f"{getattr(settled, name)} ({reason if getattr(asked, name) == 'auto' else 'as given'})"
        for name, reason in reasons.items()
    }
    return (
        f"{device}: precision {shown['precision']}, fp32 matmul {shown['matmul']}, {workers} workers of "
        f"{cores()} cores; set --precision, --matmul, --workers"
    )


def image_bytes(images: int, size: int) -> int:
    """Bytes of a batch of uint8 images [images, 3, size, size]."""
    return max(images, 1) * 3 * size * size


def reason_of(asked: str, config: ModelConfig) -> str:
    """Why `encoder_precision` chose what it did."""
    if asked != "auto":
        return "as given"
    return f"the model is {'' if _is_large(config) else 'not '}larger than size tiny"


def announce(device: str, precision: str, reason: str, workers: int | None = None) -> None:
    """On CUDA the first rank prints a line on stderr: what was chosen and why. Args: workers: None where none read."""
    if device.startswith("cuda") and is_first():
        loading = "" if workers is None else f", {workers} workers of {cores()} cores"
        flags = "--precision" if workers is None else "--precision, --workers"
        warn(f"{device}: precision {precision} ({reason}){loading}; set {flags}")


@contextmanager
def products(kind: Matmul) -> Iterator[None]:
    """Inside, torch computes products of matrices in fp32 as `torch.set_float32_matmul_precision` says."""
    before = torch.get_float32_matmul_precision()
    if kind == before:
        yield
        return
    torch.set_float32_matmul_precision(kind)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
