"""Devices: choosing one, autocast, and copying batches to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kiloword.distributed import launch
from kiloword.types import Batch

PrecisionContext = Callable[[], AbstractContextManager[object]]
_simulated: str | None = None


def device_type(device: torch.device) -> str:
    """Type of a device, by which kernels and block sizes are chosen; inside `simulated` the simulated one."""
    return _simulated or device.type


def readable(device: torch.device) -> bool:
    """Whether values on a device can be read without waiting for it: on a CPU, and not inside `simulated`."""
    return _simulated is None and device.type == "cpu"


@contextmanager
def simulated(device: str) -> Iterator[None]:
    """Make `device_type` return this type inside, so that fake tensors pass through what another device would run."""
    global _simulated
    before, _simulated = _simulated, device
    try:
        yield
    finally:
        _simulated = before


def choose(device: str, mps: bool = False) -> str:
    """Resolve "auto", "cpu", "cuda" or "cuda:N" to a device of this machine.

    Args: mps: Apple's GPU may be chosen too ("mps"), as for features of a trained model.
    Raises: ValueError for another name, a missing device, or one GPU for several ranks.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if mps and torch.backends.mps.is_available() else "cpu"
    kind, _, number = device.partition(":")
    found = {"cpu": 1, "cuda": torch.cuda.device_count()} | ({"mps": torch.backends.mps.is_available()} if mps else {})
    if kind not in found or (number and not number.isdecimal()):
        raise ValueError(f"device is {device!r}: expected auto, cpu, {'mps, ' * mps}cuda or cuda:N.")
    if int(number or 0) >= found[kind]:
        raise ValueError(
            f"device is {device}, but this torch ({torch.__version__}) sees {found[kind]:d} {kind.upper()} devices: "
            "use cpu, or look at `kiloword doctor`."
        )
    if number and kind == "cuda" and (ranks := launch.adopt()) > 1:
        raise ValueError(
            f"device is {device}, one GPU, but {ranks} ranks are started: use cuda, with which each rank takes the GPU "
            "of its LOCAL_RANK, and choose among GPUs by CUDA_VISIBLE_DEVICES."
        )
    return device


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices; torch emulates that elsewhere, at a hundredth of the rate of fp32.

    Only instructions whose speed was measured count: others have fp32 by default.
    """
    return any(torch.cpu.get_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def precision_of(name: str, device: str) -> PrecisionContext:
    """The context for the towers: autocast for "bf16", else one without effect. Args: device: its type."""
    return partial(torch.autocast, device, torch.bfloat16) if name == "bf16" else nullcontext


def on_device(batches: Iterator[Batch], device: torch.device, parts: int) -> Iterator[tuple[Batch, list[Batch]]]:
    """Yield each batch of I images with its `parts` micro-batches of I / `parts` images on the device.

    `parts` must divide I. Batches are split on the host. On a GPU a separate stream copies them while the previous step
    still computes, as the host runs ahead as long as nothing in a step waits for the GPU.
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
    """Keep the memory from being reused before the current stream has finished with the tensor."""
    x.record_stream(torch.cuda.current_stream(x.device))
    return x


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device, in bytes; where it is not known, half of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
