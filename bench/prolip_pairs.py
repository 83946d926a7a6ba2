"""What Gaussians cost where every image meets every text: `prolip`'s pair loss, forward and backward, and `siglip`'s.

First asserts that losses and gradients are what the equations say; then takes turns and prints ratios and the peak
memory beyond the inputs by number of images and texts, and all of it as one JSON line. On a CPU seconds are the
processor's, which other work hardly changes.

    python bench/prolip_pairs.py --pairs 1024 2048 4096 8192
    python bench/prolip_pairs.py --device cuda --pairs 4096 8192 16384 32768
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from kiloword.config.recipes import sizes
from kiloword.losses.pairs import Blocks, sigmoid_loss
from kiloword.methods.method import annotated
from kiloword.methods.registry import preset
from kiloword.model.heads import Head
from kiloword.model.model import initialise
from kiloword.types import Features
from prolip import in_turns, ratio

Run = Callable[..., list[Tensor]]
"""A pair loss and its gradients by features, scale and bias, the same in every turn."""


def pair_loss(args: argparse.Namespace, name: str, n: int, chunk: int, dtype: torch.dtype = torch.float32) -> Run:
    """Blocks of n x n pairs, every image's own text at its place."""
    images, texts, head = features(args, name, n, dtype)
    inputs = [x for x in (*images.values(), *texts.values(), *head.parameters()) if x.requires_grad]

    def run(turn: int = 0) -> list[Tensor]:
        loss = sigmoid_loss(Blocks(head, images, texts, chunk), annotated).sum
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    return run


def features(args: argparse.Namespace, name: str, n: int, dtype: torch.dtype) -> tuple[Features, Features, Head]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(2):
        vec, log_var = (torch.randn(n, args.dim, generator=generator) for _ in range(2))
        given = {"vec": F.normalize(vec, dim=1)} | ({"log_var": log_var - 8} if name == "prolip" else {})
        one = {key: value.to(args.device, dtype).requires_grad_() for key, value in given.items()}
        made.append({**one, "position": torch.arange(n, device=args.device)})
    return made[0], made[1], scorer(args, name, dtype)


def scorer(args: argparse.Namespace, name: str, dtype: torch.dtype) -> Head:
    """Scale and bias of a method's head; its projections are no part of the pair loss."""
    method, config = preset(name), sizes()["debug"]
    head = method.head(method.shape(replace(config, head=replace(config.head, dim=args.dim))))
    initialise(head, 0)
    for parameter_name, parameter in head.named_parameters():
        parameter.requires_grad_(parameter_name in ("log_scale", "bias"))
    head.to(args.device, dtype)
    return head


def check(args: argparse.Namespace) -> dict[str, float]:
    """The largest relative difference of both losses and gradients to their equations, stored in full."""
    found = {}
    for kind, dtype, limit in (("fp64", torch.float64, 1e-12), ("fp32", torch.float32, 1e-4)):
        errors = []
        for name in ("siglip", "prolip"):
            ours, theirs = pair_loss(args, name, 40, 16, dtype)(), written_out(args, name, 40, dtype)
            errors += [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
        found[kind] = max(errors)
        assert found[kind] < limit, (kind, errors)
    return found


def written_out(args: argparse.Namespace, name: str, n: int, dtype: torch.dtype) -> list[Tensor]:
    """arXiv:2303.15343, eq. 1, of the cosine, or less half of both traces (arXiv:2410.18857, eq. 2)."""
    images, texts, head = features(args, name, n, dtype)
    inputs = [x for x in (*images.values(), *texts.values(), *head.parameters()) if x.requires_grad]
    i, t = (index.flatten() for index in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    a, b = ({key: value[index] for key, value in side.items()} for side, index in ((images, i), (texts, t)))
    score = (a["vec"] * b["vec"]).sum(-1)
    if name == "prolip":
        score = score - (a["log_var"].exp().sum(-1) + b["log_var"].exp().sum(-1)) / 2
    sign = torch.where(i == t, 1, -1).to(args.device)
    loss = -F.logsigmoid(sign * head.logits(score)).sum()
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def pairs(args: argparse.Namespace, chunk: int) -> dict[str, Any]:
    """Times and peak memory of both pair losses by number of images, in blocks of `chunk`."""
    rows: list[dict[str, Any]] = []
    for n in args.pairs:
        peaks = {name: round(peak(args, name, n, chunk), 1) for name in ("siglip", "prolip")}
        rows.append({"n": n, "peak_mib": peaks, **(taken(args, n, chunk) if args.repeat else {})})
        print(f"chunk {chunk or 'default'}  " + "  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    return {"chunk": chunk, "rows": rows}


def taken(args: argparse.Namespace, n: int, chunk: int) -> dict[str, Any]:
    """Seconds of each, and the median and least ratio."""
    runs = {name: pair_loss(args, name, n, chunk) for name in ("siglip", "prolip")}
    times = in_turns(runs, args.repeat, 1, args.device)
    return {
        "ratio": ratio(times, "prolip", "siglip"),
        "ratio_of_least": round(min(times["prolip"]) / min(times["siglip"]), 3),
        "seconds": {name: round(median(t), 4) for name, t in times.items()},
    }


def peak(args: argparse.Namespace, name: str, n: int, chunk: int) -> float:
    """MiB beyond inputs, gradients included, of one forward and backward."""
    if args.device == "cuda":
        run = pair_loss(args, name, n, chunk)
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - rest) / 2**20
    own = [sys.executable, __file__, "--measure", name, "--pairs", str(n), "--chunk", str(chunk)]
    own += ["--dim", str(args.dim)]
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the process at once (glibc)
    return float(subprocess.run(own, capture_output=True, check=True, text=True, env=given_back).stdout)


def resident(args: argparse.Namespace) -> float:
    """The same on a CPU, of this fresh process: resident memory's high-water mark (Linux)."""
    pair_loss(args, args.measure, 64, 0)()  # what libraries keep
    run = pair_loss(args, args.measure, args.pairs[0], args.chunk[0])
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
    before = resident_kib("VmRSS")
    run()
    return (resident_kib("VmHWM") - before) / 1024


def resident_kib(name: str) -> int:
    return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)).split()[1])


def main() -> None:
    args = arguments()
    if args.measure:
        print(resident(args))
        return
    found: dict[str, Any] = {"setting": {k: v for k, v in vars(args).items() if k != "measure"}}
    found |= {"agreement": check(args), "blocks": [pairs(args, chunk) for chunk in args.chunk]}
    print(json.dumps({**found, "threads": torch.get_num_threads(), "torch": torch.__version__}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--pairs", type=int, nargs="+", default=[1024, 2048, 4096], help="images, and as many texts")
    parser.add_argument("--chunk", type=int, nargs="+", default=[0], help="rows and columns of a block; 0: the head's")
    parser.add_argument("--dim", type=int, default=512, help="embedding size")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, after one to warm up; 0: memory alone")
    parser.add_argument("--measure", choices=["siglip", "prolip"], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
