"""Options of the verb plan, which also takes the flags of `train`; data sheets of GPUs. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kiloword.config.settings import ABOVE_0, BaseSettings, setting

GIB = 2.0**30


@dataclass(frozen=True)
class Card:
    """A GPU and its links, by its data sheet."""

    flops: float  # FLOP/s of dense products in bf16
    flops_fp32: float  # FLOP/s in fp32, as torch computes it by default (no TF32)
    memory: float  # bytes that torch can see
    link: float  # bytes/s a direction to GPUs of the same node
    network: float  # bytes/s a direction to other nodes: a guess; set yours with --bandwidth


CARDS = {
    # an H200 was measured at 790 TFLOP/s of bf16 products; steps had 0.27 to 0.37 of the data sheet (research/bench.md)
    "h200": Card(989e12, 67e12, 139 * GIB, 450e9, 50e9),
    "h100": Card(989e12, 67e12, 79 * GIB, 450e9, 50e9),
    "a100-80": Card(312e12, 19.5e12, 79 * GIB, 300e9, 25e9),
    "a100-40": Card(312e12, 19.5e12, 39 * GIB, 300e9, 25e9),
    "4090": Card(165e12, 83e12, 23.5 * GIB, 25e9, 5e9),
    "cpu": Card(0.2e12, 0.1e12, 16 * GIB, 5e9, 1e9),  # a small one; set yours with --flops and --memory
}


@dataclass(frozen=True, kw_only=True)
class Plan(BaseSettings):
    """Estimate the memory, time and network traffic of a run, and list the layouts that fit.

    plan takes flags of `kiloword train` too, such as --recipe and --settings.NAME. Defaults: --size b16, --batch 1024.

    Examples:
      kiloword plan siglip --size b16 --gpus 8 --batch 8192 --samples 1e9 --gpu h100
      kiloword plan llip --size g14 --gpus 256 --batch 32768 --samples 12.8e9 --gpu a100-80 --settings.k 64
      kiloword plan --recipe llip-l14 --gpus 64
      kiloword plan siglip --image-tower efficientnet-lite0 --text-tower minilm --samples 1e7
      kiloword plan sycoca --gpus 16 --batch 2048 --samples 2.4e8 --flops 400 --memory 64 --bandwidth 50
    """

    gpus: int = setting(1, "number of GPUs", 1)
    samples: float | None = setting(None, "images seen in training, such as 12.8e9; or give --steps", 1)
    gpu: Literal["h200", "h100", "a100-80", "a100-40", "4090", "cpu"] = setting("h200", "GPU whose data sheet counts")
    flops: float | None = setting(None, "TFLOP/s of one GPU in --precision, in place of the data sheet", ABOVE_0)
    memory: float | None = setting(None, "memory of one GPU in GiB", ABOVE_0)
    bandwidth: float | None = setting(None, "GB/s that one GPU sends to other GPUs", ABOVE_0)
    utilisation: float = setting(
        0.32, "share of these FLOP/s that the run reaches; an H200 reached 0.27 (b32) to 0.37 (l14)", ABOVE_0, 1
    )
    parallel: Literal["auto", "ddp", "fsdp"] = setting(
        "auto", "ddp: replicated weights; fsdp: sharded; auto: the fastest that fits"
    )
    checkpointing: Literal["auto", "none", "whole", "selective"] = setting("auto", "as in `train`; auto: the fastest")
    tokens: float = setting(20.0, "mean number of tokens of a caption, start and end included", 1)
    captions: int = setting(0, "captions per image; 0: six if the method takes all captions, else one", 0)
    json: Path | None = setting(None, "write all figures to this file")

    def card(self, flops: str) -> Card:
        """The data sheet with the plan's own values. Args: flops: the field that --flops replaces."""
        own = {flops: (self.flops, 1e12), "memory": (self.memory, GIB)}
        own |= dict.fromkeys(("link", "network"), (self.bandwidth, 1e9))
        return replace(CARDS[self.gpu], **{name: value * unit for name, (value, unit) in own.items() if value})
