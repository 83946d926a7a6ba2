"""Options of `kiloword plan`. No torch here, so that help is instant."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kiloword.config.recipes import ModelConfig, OptimConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory, time and traffic of a run before machines are rented; advises what fits.

    Examples:
      kiloword plan siglip --size b16 --gpus 8 --batch 8192 --samples 1e9 --gpu h100
      kiloword plan llip --size g14 --gpus 256 --batch 32768 --samples 12.8e9 --gpu a100-80 --settings.k 64
      kiloword plan sycoca --size b16 --gpus 16 --batch 2048 --samples 2.4e8 --gpu custom --flops 400 --memory 64
    """

    size: str = "b16"  # of the towers (`kiloword sizes`)
    gpus: int = 1  # number of GPUs
    batch: int = 1024  # images, over all GPUs
    samples: float = 0.0  # images seen in all, 12.8e9 is understood; must be given
    gpu: str = "h200"  # h200, h100, a100-80, a100-40, 4090, cpu, or custom
    flops: float | None = None  # TFLOP/s of one GPU, in place of the data sheet's
    memory: float | None = None  # GiB of one GPU
    bandwidth: float | None = None  # GB/s that one GPU sends to others
    utilisation: float = 0.4  # share of those FLOP/s that all arithmetic reaches; padding is never counted
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # auto: the fastest that fits
    checkpointing: Literal["auto", "none", "whole", "selective"] = "auto"  # as of `train`; auto: what is fastest
    micro: int = 0  # images a micro-batch; 0: the most that fit
    chunk: int = 0  # rows and columns of pairs a block; 0: chosen
    precision: Literal["fp64", "fp32", "bf16"] = "bf16"  # of the arithmetic
    tokens: float = 20.0  # mean length of a caption, start and end included
    captions: int = 0  # an image; 0: one, or six where the method takes all (one and five made ones)
    teacher: int = 768  # width of the features that methods with mined positives read
    transforms: str | None = None  # as of `train`
    positives: str | None = None  # as of `train`
    pair_loss: str | None = None  # as of `train`
    pooling: str | None = None  # as of `train`
    uncertainty: str | None = None  # as of `train`
    terms: tuple[str, ...] = ()  # as of `train`
    json: Path | None = None  # write all figures there
    optim: OptimConfig = field(default_factory=OptimConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


def check(plan: Plan) -> None:
    """Raises: ValueError for what cannot be."""
    if not plan.samples:
        raise ValueError("plan needs the length of the run: give --samples, images seen in all, such as 1.28e9.")
    for name in ("gpus", "batch", "samples", "tokens"):
        if not 1 <= getattr(plan, name) < float("inf"):
            raise ValueError(f"--{name} is {getattr(plan, name):g}: expected at least 1.")
    for name in ("micro", "chunk", "captions", "teacher"):
        if getattr(plan, name) < 0:
            raise ValueError(f"--{name} is {getattr(plan, name)}: expected at least 0.")
    if not 0 < plan.utilisation <= 1:
        raise ValueError(f"--utilisation is {plan.utilisation:g}: expected a share above 0 and at most 1.")
    if plan.batch % plan.gpus:
        raise ValueError(f"batch {plan.batch} does not divide over {plan.gpus} GPUs: choose a multiple of {plan.gpus}.")
    share = plan.batch // plan.gpus
    if plan.micro and share % plan.micro:
        raise ValueError(f"micro {plan.micro} does not divide a GPU's share of {share} images: choose a divisor.")
    if plan.parallel != "auto" and plan.gpus == 1 and plan.parallel == "fsdp":
        raise ValueError("--parallel fsdp shards weights over GPUs, but --gpus is 1: give more, or take ddp.")
