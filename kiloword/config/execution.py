"""Flags that verbs share, declared once: device, precision, batch, workers. No torch at import: help is instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from tyro.conf import Positional, arg

T = TypeVar("T")

Flat = Annotated[T, arg(name="")]
"""Options whose flags have no prefix: `execution: Flat[Execution]`."""

REQUIRED = arg(help_behavior_hint="(required)")  # of values whose default is only "not given"

Some = Annotated[Positional[tuple[T, ...]], REQUIRED]
"""One or several positional words: `models: Some[str]`."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a model runs."""

    device: str = "auto"  # auto, cpu, mps, cuda, cuda:N
    # precision of encoders and decoders; auto: bf16 on CUDA for models larger than size tiny, else fp32. Features,
    # scores and probes are fp32
    precision: Literal["auto", "fp32", "bf16"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Execution(Device):
    """How a model is fed."""

    batch: int = 64  # images in a batch
    workers: int | Literal["auto"] = "auto"  # loader processes; auto: none on a CPU, on CUDA all cores except two
