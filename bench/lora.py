"""Memory of tuning: all weights, against LoRA. Each is a process of its own, which makes some steps of random weights.

python bench/lora.py [--size b16] [--batch 4] [--rank 8] [--targets qkv,out]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from kiloword.config.recipes import LoraConfig, sizes
from kiloword.methods.defaults import FIELD
from kiloword.methods.registry import preset
from kiloword.model.adapters import attach
from kiloword.models.build import build
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import Learner, backward
from kiloword.types import Batch, Texts

MIB, STEPS = 1 << 20, 3
LENGTH = 20  # tokens of a caption


def fixed_batch(images: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        images=torch.randint(256, (images, 3, size, size), dtype=torch.uint8, generator=generator),
        texts=Texts.pack(torch.randint(6, 400, (images, LENGTH), generator=generator).tolist()),
        image_of_text=torch.arange(images),
        seeds=torch.arange(images),
        position=torch.arange(images),
        composed=torch.zeros(images, dtype=torch.bool),
    )


def child(size: str, batch: int, rank: int, targets: list[str]) -> dict[str, Any]:
    """MiB of weights, gradients and optimizer state, and the most that the process held."""
    method, config = preset("clip"), sizes()[size]
    model = build(config, method)
    if rank:
        attach(model, LoraConfig(rank=rank, targets=tuple(targets)), 0, ("image", "text"))
    learner = Learner(model, method)
    optimizer = Optimizer(learner, replace(FIELD, warmup=0), STEPS)
    data, gradients = fixed_batch(batch, config.image.size), 0
    for step in range(STEPS):
        backward(learner, [data])
        gradients = sum(p.grad.nbytes for p in learner.parameters() if p.grad is not None)
        optimizer.step(step)
    state = sum(x.nbytes for x in optimizer.state_dict().values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes_ = {"weights": sum(p.nbytes for p in learner.parameters()), "gradients": gradients, "optimizer": state}
    return {name: round(value / MIB, 1) for name, value in {**sizes_, "peak": peak}.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="b16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", nargs="+", default=["qkv,out"])
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.size, args.batch, args.rank, args.targets)))
        return
    found = {}
    for name, rank in (("all weights", 0), (f"LoRA of rank {args.rank}", args.rank)):
        words = ["--child", "--size", args.size, "--batch", str(args.batch), "--rank", str(rank)]
        words += ["--targets", *args.targets]
        done = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
        found[name] = json.loads(done.stdout)
        print(name, found[name], flush=True)
    full, lora = found.values()
    for name in ("gradients", "optimizer", "peak"):
        print(f"{name}: {full[name] / lora[name]:.2f} times as much for all weights")


if __name__ == "__main__":
    main()
