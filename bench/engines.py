"""What ranks, checkpointing and micro-batches cost: steps of siglip, one thread a process.

Ranks: pairs/s of 2 ranks (ddp, fsdp) over twice those of one process that has the machine for itself, and over those of
two processes at once that share nothing, which is what the machine's memory leaves of two. Checkpointing and
micro-batches: time of a step over that without, and the activations that are kept. Arms take turns; medians.

    OMP_WAIT_POLICY=PASSIVE python bench/engines.py --size b32 --batch 16 --steps 2 --repeat 3
    python bench/engines.py --size tiny --batch 64 --steps 5
    torchrun --nproc-per-node 8 bench/engines.py --device cuda --size b16 --batch 256 --dtype bf16  # on GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

import plan_allocated
from kiloword.config.recipes import OptimConfig, sizes
from kiloword.distributed import collectives, launch
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training import engine
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import Learner, backward
from kiloword.types import Batch, Texts

LENGTHS = (9, 14, 21, 12, 17)  # tokens of captions, in turn


class Steps:
    """A learner, and steps with it."""

    def __init__(self, args: argparse.Namespace, way: str = "ddp", kept: str = "none", micro: int = 1) -> None:
        self.args, self.micro = args, micro
        method = preset("siglip")
        self.learner = Learner(build(sizes()[args.size], method), method).to(args.device)
        engine.recompute(self.learner.model, kept)  # type: ignore[arg-type]
        if way == "fsdp":
            engine.shard(self.learner, half=args.dtype == "bf16")
        self.reducer = engine.replicated(self.learner)
        self.optimizer = Optimizer(self.learner, OptimConfig(lr=1e-4), 1000)
        self.batch = share(args, self.learner).to(args.device)

    def step(self) -> None:
        bf16 = self.args.dtype == "bf16"
        precision = partial(torch.autocast, self.args.device, torch.bfloat16, enabled=bf16)
        backward(self.learner, self.batch.split(self.micro), precision, self.reducer)
        self.optimizer.step(0)

    def seconds(self) -> float:
        """Of one step, after one that is not counted."""
        self.step()
        wait(self.args.device)
        start = time.perf_counter()
        for _ in range(self.args.steps):
            self.step()
        wait(self.args.device)
        return (time.perf_counter() - start) / self.args.steps

    def kept(self) -> int:
        """Bytes that the forward pass of a micro-batch allocates and leaves for the backward pass, on a CPU."""
        micro = self.batch.split(self.micro)[0]
        return plan_allocated.kept(lambda: self.learner.encode(micro))


def share(args: argparse.Namespace, learner: Learner) -> Batch:
    """This rank's images and captions."""
    size, n, first = learner.model.config.image.size, args.batch, collectives.rank() * args.batch
    generator = torch.Generator().manual_seed(first)
    ids = [torch.randint(10, 400, (LENGTHS[i % len(LENGTHS)],), generator=generator).tolist() for i in range(n)]
    return Batch(
        images=torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8),
        texts=Texts.pack(ids),
        image_of_text=torch.arange(n),
        seeds=torch.arange(first, first + n),
        position=torch.arange(first, first + n),
        composed=torch.zeros(n, dtype=torch.bool),
    )


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    collectives.wait()


def rate_of_ranks(args: argparse.Namespace, ranks: int, way: str) -> float:
    """Pairs/s of all processes together: alone (one), apart (they share nothing), or ranks of an engine."""
    context = torch.multiprocessing.get_context("spawn")
    found: Any = context.SimpleQueue()
    spawn(_process, (ranks, launch.free_port(), args, way, found), nprocs=ranks)  # type: ignore[no-untyped-call]
    return args.batch * sum(1 / found.get() for _ in range(ranks))


def _process(rank: int, ranks: int, port: int, args: argparse.Namespace, way: str, found: Any) -> None:
    torch.set_num_threads(1)
    if way in ("ddp", "fsdp"):
        os.environ |= launch.announced(rank, ranks, port)
    with collectives.process_group(timeout_s=900):
        found.put(Steps(args, way).seconds())


def in_turns(arms: dict[str, Callable[[], float]], repeat: int) -> dict[str, float]:
    """Median of each arm's figure."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeat):
        for name, arm in arms.items():
            found[name].append(arm())
    return {name: statistics.median(values) for name, values in found.items()}


def of_ranks(args: argparse.Namespace) -> dict[str, Any]:
    arms = {
        "alone": partial(rate_of_ranks, args, 1, "alone"),
        **{way: partial(rate_of_ranks, args, 2, way) for way in ("apart", "ddp", "fsdp")},
    }
    rates = in_turns(arms, args.repeat)
    ratios = {f"{way} over twice alone": rates[way] / (2 * rates["alone"]) for way in ("apart", "ddp", "fsdp")}
    ratios |= {f"{way} over apart": rates[way] / rates["apart"] for way in ("ddp", "fsdp")}
    return {"pairs/s": rates, **ratios}


def of_memory(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    arms = {kept: Steps(args, kept=kept) for kept in ("none", "selective", "whole")}
    arms |= {f"{n} micro-batches": Steps(args, micro=n) for n in (2, 4)}
    seconds = in_turns({name: arm.seconds for name, arm in arms.items()}, args.repeat)
    return {
        "time over none": {name: s / seconds["none"] for name, s in seconds.items()},
        "MiB of activations": {name: arm.kept() / 2**20 for name, arm in arms.items()},
    }


def of_this_group(args: argparse.Namespace) -> dict[str, Any]:
    """Under torchrun: each engine on all ranks."""
    with collectives.process_group(args.device, 900):
        rates = {}
        for way in ("ddp", "fsdp"):
            for kept in ("none", "selective", "whole"):
                steps = Steps(args, way, kept)
                rates[f"{way}, {kept}"] = args.batch * collectives.ranks() / steps.seconds()
                del steps
        return {"ranks": collectives.ranks(), "pairs/s": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch", type=int, default=32, help="images of each process")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=("ranks", "memory"))
    args = parser.parse_args()
    found: dict[str, Any] = {"size": args.size, "batch": args.batch, "dtype": args.dtype, "device": args.device}
    if "WORLD_SIZE" in os.environ or args.device == "cuda":
        found |= of_this_group(args)
    else:
        found |= {} if args.only == "memory" else of_ranks(args)
        found |= {} if args.only == "ranks" else of_memory(args)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
