"""Where a model computes, and how batches get there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from kiloword.distributed import launch
from kiloword.types import Batch

PrecisionContext = Callable[[], AbstractContextManager[object]]


def choose(asked: str) -> str:
    """The device of "auto", "cpu", "cuda" or "cuda:N".

    Raises: ValueError for another name, one that is not here, or one GPU for several ranks.
    """
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = asked.partition(":")
    if kind == "cuda" and number and (ranks := launch.adopt()) > 1:
        raise ValueError(
            f"device is {asked}, one GPU, but {ranks} ranks are started: use cuda, with which each rank takes the GPU "
            "of its LOCAL_RANK, and choose among GPUs by CUDA_VISIBLE_DEVICES."
        )
    if kind not in ("cpu", "cuda") or (number and not (number.isascii() and number.isdecimal())):
        raise ValueError(f"device is {asked!r}: expected auto, cpu, cuda or cuda:N.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {asked}, but this torch ({torch.__version__}) sees {torch.cuda.device_count()} CUDA devices: "
            "use cpu, or look at `kiloword doctor`."
        )
    return asked


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def precision_of(name: str, device: str) -> PrecisionContext:
    """The context that towers compute in: autocast for "bf16", nothing else for others. Args: device, its type."""
    return partial(torch.autocast, device, torch.bfloat16) if name == "bf16" else nullcontext


def on_device(batches: Iterator[Batch], device: torch.device, parts: int) -> Iterator[tuple[Batch, list[Batch]]]:
    """Each batch of I images, and its `parts` micro-batches of I / `parts` on the device; `parts` must divide I.

    They are split on the host, where that waits for nothing. On a GPU a stream of their own copies them, while the step
    before still computes: the host is ahead of it, as long as nothing in a step waits for the GPU.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    for batch in batches:
        with torch.cuda.stream(stream) if stream else nullcontext():
            micro = [part.to(device) for part in batch.split(parts)]
        if stream:
            torch.cuda.current_stream(device).wait_stream(stream)
            for part in micro:
                part.each(_used_here)
        yield batch, micro


def _used_here(x: Tensor) -> Tensor:
    """Its memory is not given to another tensor before the current stream is done with it."""
    x.record_stream(torch.cuda.current_stream(x.device))
    return x
