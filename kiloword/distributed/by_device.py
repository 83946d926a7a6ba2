"""Defaults that depend on the device: precision and workers. For a run they are chosen before its `config.json`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_start_method
from typing import Any, Literal, cast, get_args

import torch

from kiloword.config.recipes import EncoderPrecision, Matmul, ModelConfig, Recipe, sizes
from kiloword.distributed.device import cores, cpu_has_bf16
from kiloword.distributed.sharing import is_first
from kiloword.terminal import warn

MOST_WORKERS = 16  # chosen for a rank at most: each holds batches in memory
SHARED_MEMORY = "/dev/shm"  # through which workers send batches
AHEAD = 3  # batches of a worker in shared memory: two prefetched, one in the making


def settle(recipe: Recipe, device: str, earlier: Recipe | None = None) -> Recipe:
    """The recipe with values for `precision` and `matmul` where they are "auto".

    A resumed run keeps its values, whatever the device. Otherwise precision is bf16 on CUDA for all sizes but debug,
    and on a CPU with bf16 products for the sizes tiny and top, which learn as well with it and are twice as fast;
    matmul is TF32 on CUDA and torch's setting elsewhere.

    Args: device: "cpu", "cuda" or "cuda:N"; earlier: the recipe of the run that is resumed.
    """
    if earlier is not None:
        chosen: dict[str, Any] = {"precision": earlier.precision, "matmul": earlier.matmul}
    elif device.startswith("cuda"):
        chosen = {"precision": "fp32" if recipe.size == "debug" else "bf16", "matmul": "high"}
    else:
        precise = recipe.size not in ("tiny", "top") or not cpu_has_bf16()
        chosen = {"precision": "fp32" if precise else "bf16", "matmul": torch.get_float32_matmul_precision()}
    return replace(recipe, **{name: value for name, value in chosen.items() if getattr(recipe, name) == "auto"})


def encoder_precision(requested: str, config: ModelConfig, device: str) -> EncoderPrecision:
    """Precision of the encoders of a trained model. "auto": bf16 on CUDA where the model is larger than size tiny.

    Raises: ValueError for another name.
    """
    if requested == "auto":
        return "bf16" if device.startswith("cuda") and _is_large(config) else "fp32"
    if requested not in get_args(EncoderPrecision):
        raise ValueError(f"precision is {requested!r}: expected auto, fp32 or bf16.")
    return cast(EncoderPrecision, requested)


def _is_large(config: ModelConfig) -> bool:
    """Whether a tower is wider than that of size tiny."""
    tiny = sizes()["tiny"]
    return config.image.width > tiny.image.width or config.text.width > tiny.text.width


def workers_of(requested: int | Literal["auto"], device: str, images: int, size: int, train: bool = False) -> int:
    """Number of loader processes of a rank. "auto": on CUDA the rank's share of the cores minus two; on a CPU, which
    computes too, half of its share to train on images that are decoded, else none, as where processes do not fork (a
    source may be impossible to pickle); at most as many as shared memory holds.

    Args: requested: --workers; images: of a rank's batch; size: their height in pixels; train: on decoded images.
    """
    if requested != "auto":
        return requested
    share = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    half = share // 2 if train and get_start_method() == "fork" else 0
    chosen = min(MOST_WORKERS, max(1, share - 2) if device.startswith("cuda") else half)
    try:
        memory = os.statvfs(SHARED_MEMORY)
    except OSError:  # not Linux
        return chosen
    return min(chosen, memory.f_bavail * memory.f_frsize // (AHEAD * max(images, 1) * 3 * size * size))


def summary(requested: Recipe, settled: Recipe, device: str, workers: int, resumed: bool) -> str:
    """One line: the values chosen for a device, and why. Args: requested: the recipe before `settle`."""
    cuda = device.startswith("cuda")
    slow = not cuda and not cpu_has_bf16()
    reasons = {
        "precision": f"as for size {settled.size}" + " on a CPU without bf16" * slow,
        "matmul": "TF32" if cuda else "as torch is set",
    }
    for name in reasons:
        if getattr(requested, name) != "auto":
            reasons[name] = "as given"
        elif resumed:
            reasons[name] = "as the run began"
    emulated = ", which this CPU only emulates: fp32 is many times faster" if slow else ""
    return (
        f"{device}: precision {settled.precision} ({reasons['precision']}){emulated * (settled.precision == 'bf16')}, "
        f"fp32 matmul {settled.matmul} ({reasons['matmul']}), {workers} workers of {cores()} cores; set --precision, "
        "--matmul, --workers"
    )


def reason_of(requested: str, config: ModelConfig) -> str:
    """The reason for the choice of `encoder_precision`."""
    if requested != "auto":
        return "as given"
    return f"the model is {'' if _is_large(config) else 'not '}larger than size tiny"


def announce(device: str, precision: str, reason: str, workers: int | None = None) -> None:
    """On CUDA the first rank prints the chosen values and why, on stderr. Args: workers: None without a loader."""
    if device.startswith("cuda") and is_first():
        loading = "" if workers is None else f", {workers} workers of {cores()} cores"
        flags = "--precision" if workers is None else "--precision, --workers"
        warn(f"{device}: precision {precision} ({reason}){loading}; set {flags}")


@contextmanager
def products(kind: Matmul) -> Iterator[None]:
    """Inside, fp32 matrix products have this precision, see `torch.set_float32_matmul_precision`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(kind)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
