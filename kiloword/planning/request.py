"""Options of `kiloword plan`. No torch here, so that help is instant."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from kiloword.config.options import Mixing
from kiloword.config.recipes import ModelConfig, OptimConfig
from kiloword.config.settings import ABOVE_0, BaseSettings, about, setting
from kiloword.config.settings import check as check_settings


@dataclass(frozen=True, kw_only=True)
class Plan(BaseSettings):
    """Memory, time and traffic of a run before machines are rented; advises what fits.

    Examples:
      kiloword plan siglip --size b16 --gpus 8 --batch 8192 --samples 1e9 --gpu h100
      kiloword plan llip --size g14 --gpus 256 --batch 32768 --samples 12.8e9 --gpu a100-80 --settings.k 64
      kiloword plan sycoca --size b16 --gpus 16 --batch 2048 --samples 2.4e8 --gpu custom --flops 400 --memory 64
    """

    common: ClassVar[dict[str, str]] = {
        "length": "samples batch tokens captions",
        "model": "size teacher",
        "loss": "transforms positives pair-loss pooling uncertainty terms",
        "hardware": "gpus gpu flops memory bandwidth utilisation",
        "execution": "parallel checkpointing micro chunk precision",
        "results": "json",
    }

    size: str = setting("b16", "size of the towers (`kiloword sizes` lists them)")
    gpus: int = setting(1, "number of GPUs", 1)
    batch: int = setting(1024, "images in a step, over all GPUs", 1)
    samples: float = setting(0.0, "images seen in training, such as 12.8e9 (required)", 1)
    gpu: str = setting("h200", "h200, h100, a100-80, a100-40, 4090, cpu, or custom")
    flops: float | None = setting(None, "TFLOP/s of one GPU, instead of the data sheet's")
    memory: float | None = setting(None, "memory of one GPU in GiB")
    bandwidth: float | None = setting(None, "GB/s that one GPU sends to others")
    utilisation: float = setting(0.4, "share of these FLOP/s that is reached; padding is not counted", ABOVE_0, 1)
    parallel: Literal["auto", "ddp", "fsdp"] = setting(
        "auto", "ddp: replicated weights; fsdp: sharded; auto: the fastest that fits"
    )
    checkpointing: Literal["auto", "none", "whole", "selective"] = setting("auto", "as in `train`; auto: the fastest")
    micro: int = setting(0, "images in a micro-batch; 0: as many as fit", 0)
    chunk: int = setting(0, "rows and columns of a block of pairs; 0: automatic", 0)
    precision: Literal["fp64", "fp32", "bf16"] = setting("bf16", "precision of the computation")
    tokens: float = setting(20.0, "mean number of tokens of a caption, start and end included", 1)
    captions: int = setting(0, "captions per image; 0: one, or six if the method takes all", 0)
    teacher: int = setting(768, "dimension of the teacher's features, for mined positives", 0)
    mixing: Mixing = field(default_factory=Mixing, metadata=about(flag=""))
    json: Path | None = setting(None, "write all figures to this file")
    optim: OptimConfig = field(default_factory=OptimConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


def check(plan: Plan) -> None:
    """Raises: ValueError for a run that cannot be planned."""
    if not plan.samples:
        raise ValueError("plan needs the length of the run: give --samples, images seen in all, such as 1.28e9.")
    check_settings(plan)
    if plan.batch % plan.gpus:
        raise ValueError(f"batch {plan.batch} does not divide over {plan.gpus} GPUs: choose a multiple of {plan.gpus}.")
    share = plan.batch // plan.gpus
    if plan.micro and share % plan.micro:
        raise ValueError(f"micro {plan.micro} does not divide a GPU's share of {share} images: choose a divisor.")
    if plan.gpus == 1 and plan.parallel == "fsdp":
        raise ValueError("--parallel fsdp shards weights over GPUs, but --gpus is 1: give more, or take ddp.")
