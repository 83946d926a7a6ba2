"""Whether a GPU computes what the CPU does: losses, features and gradients of one step, by way of computing it.

Each way (variable-length attention in half precision, checkpointing, compiling) is compared with fp64 on the CPU: the
largest relative error of a loss, of a kind of features, and of all gradients together (norm of the difference over the
norm). Prints one JSON line; fails above the bound of a precision, and where a way is further off than the plain one in
its precision by more than FURTHER. --profile prints the times of the plain steps' kernels, by torch's profiler.

    python bench/device_check.py --device cuda --size b32 --batch 64
    python bench/device_check.py --device cuda --methods all --ways fp32 bf16    # every preset
    python bench/device_check.py --device cpu --size tiny --batch 8    # the same, where there is no GPU
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace

import torch
from torch import Tensor

from kiloword.config.recipes import sizes
from kiloword.distributed.device import precision_of
from kiloword.methods.registry import PRESETS, preset
from kiloword.model.model import initialise
from kiloword.models.build import build
from kiloword.training import engine
from kiloword.training.step import Learner, backward
from kiloword.types import Batch
from plan_measure import batch_of

BOUND = {"fp32": 0.02, "bf16": 0.14}
BOUND_OF_FILIP = {"fp32": 0.02, "bf16": 0.2}  # its maxima change places
FURTHER = 0.03
# way: precision, checkpointing, what is compiled
WAYS = {
    "fp32": ("fp32", "none", "none"),
    "bf16": ("bf16", "none", "none"),
    "bf16, whole checkpointing": ("bf16", "whole", "none"),
    "bf16, selective checkpointing": ("bf16", "selective", "none"),
    "bf16, compiled blocks": ("bf16", "none", "blocks"),
    "bf16, compiled towers": ("bf16", "none", "towers"),
    "bf16, compiled blocks, selective checkpointing": ("bf16", "selective", "blocks"),
}
Errors = dict[str, float]


def outcome(learner: Learner, batch: Batch, device: str, kind: str) -> dict[str, list[Tensor]]:
    """Losses, kinds of features and all gradients, each flat, on the CPU in fp64. Args: kind: fp32 or bf16."""
    precision = precision_of(kind, device)
    with torch.no_grad(), precision():
        encoded = learner.encode(batch)
    features = [x for side in (encoded.images, encoded.texts) for x in side.values() if x.is_floating_point()]
    losses = step(learner, batch, device, kind)
    gradients = torch.cat([p.grad.flatten() for p in learner.parameters() if p.grad is not None])
    parts = {"losses": losses, "features": features, "gradients": [gradients]}
    return {name: [x.detach().flatten().double().cpu() for x in tensors] for name, tensors in parts.items()}


def step(learner: Learner, batch: Batch, device: str, kind: str) -> list[Tensor]:
    """Losses of a step, whose gradients it leaves."""
    learner.zero_grad()
    return list(backward(learner, [batch], precision_of(kind, device)).values())


def errors(got: dict[str, list[Tensor]], exact: dict[str, list[Tensor]]) -> Errors:
    """The largest relative error of each part; NaN where there is one."""
    relative = {
        name: [(a - b).norm() / b.norm().clamp(min=1e-6) for a, b in zip(got[name], exact[name], strict=True)]
        for name in got
    }
    return {name: float(torch.stack(of_part).max()) for name, of_part in relative.items()}


def check(name: str, args: argparse.Namespace) -> dict[str, Errors]:
    """Errors of each way to compute a step of a method."""
    method = preset(name)
    first = Learner(build(sizes()[args.size], method), method)
    for part in (first.terms, first.contrasts):
        initialise(part, 0, "")
    batch = batch_of(first.model.config, args.batch, 2, method)
    if method.transforms:
        batch = replace(batch, composed=batch.position % 2 == 0)
    exact = outcome(copy.deepcopy(first).double(), batch, "cpu", "fp32")
    found = {}
    for way in args.ways:
        precision, kept, compiled = WAYS[way]
        learner = copy.deepcopy(first).to(args.device)
        engine.recompute(learner.model, kept)  # type: ignore[arg-type]
        mine = batch.to(torch.device(args.device))
        engine.compile_model(learner.model, compiled)  # type: ignore[arg-type]
        found[way] = errors(outcome(learner, mine, args.device, precision), exact)
    if args.profile:
        profile(copy.deepcopy(first).to(args.device), batch.to(torch.device(args.device)), args.device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch", type=int, default=16, help="images, of two captions each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--methods", nargs="+", choices=("all", *PRESETS), default=["siglip"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="fp32 and bf16 among them")
    parser.add_argument("--profile", action="store_true", help="print the kernels that take most time")
    args = parser.parse_args()
    if not {"fp32", "bf16"} <= set(args.ways):
        parser.error("--ways needs fp32 and bf16, with which the others are compared")
    found = {name: check(name, args) for name in (PRESETS if "all" in args.methods else args.methods)}
    print(json.dumps({"size": args.size, "batch": args.batch, "device": args.device, "errors": found}))
    for name, ways in found.items():
        bound = BOUND_OF_FILIP if name == "filip" else BOUND
        for way, of_way in ways.items():
            plain = "bf16" if way.startswith("bf16") else "fp32"
            assert all(error <= bound[plain] for error in of_way.values()), f"{name}: {way} is far from fp64"
            assert all(of_way[k] <= ways[plain][k] + FURTHER for k in of_way), f"{name}: {way} is worse than {plain}"


def profile(learner: Learner, batch: Batch, device: str) -> None:
    """Of three steps in bf16, after three."""
    for _ in range(3):
        step(learner, batch, device, "bf16")
    with torch.profiler.profile() as seen:
        for _ in range(3):
            step(learner, batch, device, "bf16")
        if device == "cuda":
            torch.cuda.synchronize()
    by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=20))


if __name__ == "__main__":
    main()
