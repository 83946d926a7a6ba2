"""Scores that depend on the pair, each with its loss, forward and backward: maxsim, flair's and llip's, and a cosine.

First asserts that maxsim's blocks equal the products of all patches and words held at once; then all take turns on
features of the same sizes. Prints ratios to llip's direct form, and all of it as one JSON line. On a CPU seconds are
the processor's, which other work hardly changes.

    python bench/maxsim.py --images 64 --texts 256 1024 --patches 49
    python bench/maxsim.py --device cuda --images 512 --texts 4096 --patches 196
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from kiloword.config.recipes import ModelConfig, sizes
from kiloword.losses.pairs import Blocks, sigmoid_loss
from kiloword.methods.filip import MaxSim, MaxSimSettings
from kiloword.methods.flair import Attended
from kiloword.methods.llip import Contextual, ContextualSettings, with_tokens
from kiloword.methods.method import annotated
from kiloword.model.heads import Head, Pooling, Scale
from kiloword.model.model import initialise
from kiloword.types import Features

Run = Callable[[], list[Tensor]]
"""The loss and its gradients by the features."""
NAMES = ("cosine", "maxsim, text", "maxsim", "flair", "llip, gram", "llip")


def pooling_of(name: str, args: argparse.Namespace) -> Any:
    size = sizes()["debug"]
    wide = replace(size, head=replace(size.head, dim=args.dim))
    if name.startswith("maxsim"):
        thin: ModelConfig = replace(size, head=replace(size.head, dim=args.thin))
        return MaxSim(thin, MaxSimSettings(words=args.words, sides="text" if "text" in name else "both"))
    if name == "flair":
        return Attended(wide, args.heads)
    mixture = ContextualSettings(k=args.k, heads=args.heads, form="gram" if "gram" in name else "direct")
    return Pooling() if name == "cosine" else Contextual(with_tokens(wide, mixture), mixture)


def features(name: str, args: argparse.Namespace, images: int, texts: int) -> tuple[Features, Features]:
    """Of random numbers; captions have 8 to `words` tokens."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        drawn = F.normalize(torch.randn(*shape, generator=generator), dim=-1)
        return drawn.to(args.device).requires_grad_()

    place = torch.arange(max(images, texts), device=args.device)
    image: Features = {"vec": numbers(images, args.dim), "position": place[:images]}
    text: Features = {"vec": numbers(texts, args.dim), "position": place[:texts] % images}
    if name.startswith("maxsim"):
        lengths = torch.randint(8, args.words + 1, (texts, 1), generator=generator).to(args.device)
        there = torch.arange(args.words, device=args.device) < lengths
        image["patches"] = numbers(images, args.patches, args.thin)
        text |= {"words": numbers(texts, args.words, args.thin), "share": there / lengths}
        text["words"] = (text["words"].detach() * there[..., None]).requires_grad_()
    elif name != "cosine":
        shape = (images, args.k if "llip" in name else args.patches + 1, args.heads, args.dim // args.heads)
        image |= {"keys": numbers(*shape), "values": numbers(*shape)}
        text["query"] = numbers(texts, args.heads, args.dim // args.heads)
    return image, text


def make(name: str, args: argparse.Namespace, images: int, texts: int, stored: bool = False) -> Run:
    """One contestant. Args: stored: all products of patches and words held at once, by plain autograd."""
    head = Head(pooling_of(name, args), scale=Scale(10.0, -10.0))
    initialise(head, 0)
    head.to(args.device)
    image, text = features(name, args, images, texts)
    leaves = [x for side in (image, text) for x in side.values() if x.requires_grad]

    def whole() -> Tensor:
        products = torch.einsum("ipd,twd->ipwt", image["patches"], text["words"])
        there = text["share"].T
        by_patch = products.masked_fill(there == 0, -torch.inf).amax(2).mean(1)
        logits = head.logits(((products.amax(1) * there).sum(1) + by_patch) / 2)
        return (F.softplus(logits) - (image["position"][:, None] == text["position"]) * logits).sum()

    def run() -> list[Tensor]:
        loss = whole() if stored else sigmoid_loss(Blocks(head, image, text), annotated).sum
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [loss.detach(), *(torch.zeros(()) if g is None else g for g in gradients)]

    return run


def check(args: argparse.Namespace) -> float:
    """The largest relative difference to all products held at once; asserts that it is rounding."""
    pairs = zip(make("maxsim", args, 16, 40)(), make("maxsim", args, 16, 40, stored=True)(), strict=True)
    worst = max(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in pairs)
    assert worst < 1e-4, worst
    return worst


def seconds(run: Run, device: str) -> float:
    """Of one run: on a CPU those of the processor."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    began = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def compare(args: argparse.Namespace, texts: int) -> dict[str, float]:
    """Median seconds of each over llip's, taking turns."""
    runs = {name: make(name, args, args.images, texts) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for n in range(args.repeat + 1):
        for name in NAMES if n % 2 else NAMES[::-1]:
            took = seconds(runs[name], args.device)
            if n:  # the first warms up
                times[name].append(took)
    ratios = {name: statistics.median(a / b for a, b in zip(times[name], times["llip"], strict=True)) for name in NAMES}
    return {"texts": texts, "llip_s": round(statistics.median(times["llip"]), 4)} | {
        name: round(value, 3) for name, value in ratios.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--texts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--patches", type=int, default=49)
    parser.add_argument("--words", type=int, default=32)
    parser.add_argument("--thin", type=int, default=128, help="size of maxsim's vectors")
    parser.add_argument("--dim", type=int, default=512, help="embedding size of the others")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--k", type=int, default=32, help="mixture tokens of llip")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, after the warm-up")
    args = parser.parse_args()
    agreement = check(args)
    rows = []
    for texts in args.texts:
        rows.append(compare(args, texts))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    report = {"setting": vars(args), "agreement": agreement, "over_llip": rows, "torch": torch.__version__}
    print(json.dumps({**report, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
