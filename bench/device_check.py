"""Whether a GPU computes what the CPU does: features and gradients of one step, by way of computing it.

Each way (variable-length attention in half precision, checkpointing, compiling) is compared with fp64 on the CPU:
1 - cosine of all features, and of all gradients together. Prints one JSON line; fails where a way is further off than
the plain one in the same precision by more than LIMIT. Then the times of the plain steps' kernels, by torch's profiler.

    python bench/device_check.py --device cuda --size b32 --batch 64
    python bench/device_check.py --device cpu --size tiny --batch 8    # the same, where there is no GPU
"""

from __future__ import annotations

import argparse
import copy
import json

import torch
import torch.nn.functional as F
from torch import Tensor

from engines import share
from kiloword.config.recipes import sizes
from kiloword.distributed.device import precision_of
from kiloword.methods.registry import preset
from kiloword.model.model import build
from kiloword.training import compilation
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.types import Batch

LIMIT = 1e-3  # of 1 - cosine
# way: precision, checkpointing, what is compiled
WAYS = {
    "fp32": ("fp32", "none", "none"),
    "bf16": ("bf16", "none", "none"),
    "bf16, whole checkpointing": ("bf16", "whole", "none"),
    "bf16, selective checkpointing": ("bf16", "selective", "none"),
    "bf16, compiled blocks": ("bf16", "none", "blocks"),
    "bf16, compiled towers": ("bf16", "none", "towers"),
    "bf16, compiled blocks, selective checkpointing": ("bf16", "selective", "blocks"),
    "bf16, CUDA graph": ("bf16", "none", "cudagraphs"),
}


def outcome(learner: Learner, batch: Batch, device: str, kind: str) -> tuple[Tensor, Tensor]:
    """Features of images and texts, and all gradients, flat, on the CPU in fp64. Args: kind: fp32 or bf16."""
    precision = precision_of(kind, device)
    learner.zero_grad()
    with torch.no_grad(), precision():
        encoded = learner.encode(batch)
    features = torch.cat([encoded.images["vec"].flatten(), encoded.texts["vec"].flatten()])
    backward(learner, [batch], precision)
    gradients = torch.cat([p.grad.flatten() for p in learner.parameters() if p.grad is not None])
    return features.double().cpu(), gradients.double().cpu()


def apart(a: Tensor, b: Tensor) -> float:
    return 1 - float(F.cosine_similarity(a, b, dim=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:-1], help="fp32 and bf16 among them")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take most time")
    args = parser.parse_args()
    method = preset("siglip")
    first = Learner(build(sizes()[args.size], method), method)
    batch = share(args, first)
    exact = outcome(copy.deepcopy(first).double(), batch, "cpu", "fp32")
    found = {}
    for name in args.ways:
        precision, kept, compiled = WAYS[name]
        learner = copy.deepcopy(first).to(args.device)
        compilation.recompute(learner.model, kept)  # type: ignore[arg-type]
        mine = batch.to(torch.device(args.device))
        if compiled == "cudagraphs":
            compilation.compile_with_graph(learner, args.batch)
            for _ in range(3):  # runs once, is recorded, replayed
                outcome(learner, mine, args.device, precision)
        else:
            compilation.compile_model(learner.model, compiled)  # type: ignore[arg-type]
        got = outcome(learner, mine, args.device, precision)
        found[name] = {"features": apart(got[0], exact[0]), "gradients": apart(got[1], exact[1])}
    print(json.dumps({"size": args.size, "batch": args.batch, "device": args.device, "1 - cosine": found}))
    if args.profile:
        profile(copy.deepcopy(first).to(args.device), batch.to(torch.device(args.device)), args.device)
    for name, errors in found.items():
        plain = found["bf16" if name.startswith("bf16") else "fp32"]
        assert all(errors[k] <= plain[k] + LIMIT for k in errors), f"{name} is further off than it should be"
    assert max(found["bf16"].values()) < 10 * LIMIT


def profile(learner: Learner, batch: Batch, device: str) -> None:
    """Of three steps in bf16, after three."""
    for _ in range(3):
        outcome(learner, batch, device, "bf16")
    with torch.profiler.profile() as seen:
        for _ in range(3):
            outcome(learner, batch, device, "bf16")
    by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=20))


if __name__ == "__main__":
    main()
