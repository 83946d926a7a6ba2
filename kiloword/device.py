"""Where a model computes."""

from __future__ import annotations

import os

import torch


def choose(asked: str) -> str:
    """The device of "auto", "cpu", "cuda" or "cuda:N". Raises: ValueError for another name, or one that is not here."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = asked.partition(":")
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
