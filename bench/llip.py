"""Llip's pair loss, forward and backward: the direct form stored in full, the same in blocks, and the Gram form.

First asserts that loss and gradients agree; then takes turns over numbers of texts and prints times, ratios and where
the Gram form starts to pay, the peak memory beyond the inputs, and all of it as one JSON line.

    python bench/llip.py --texts 128 256 512 1024 2048 4096
    python bench/llip.py --device cuda --images 1024 --texts 1024 4096 32768
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.config.recipes import sizes
from kiloword.losses.pairs import Blocks, sigmoid_loss
from kiloword.losses.pertext import choose
from kiloword.methods.llip import Contextual, ContextualSettings, with_tokens
from kiloword.methods.method import annotated
from kiloword.model.heads import Head, Scale
from kiloword.model.model import initialise
from kiloword.types import Features

STORED = 8 << 30  # bytes: what the stored form may need before it is left out

Run = Callable[[], list[Tensor]]
"""The loss and its gradients by keys, values, targets, queries and W_O."""


def make(args: argparse.Namespace, images: int, texts: int, dtype: torch.dtype, form: str) -> Run:
    """One contestant on its own copy of the same numbers."""
    size = sizes()["debug"]
    config = replace(size, head=replace(size.head, dim=args.dim))
    mixture = ContextualSettings(k=args.k, heads=args.heads, form="gram" if form == "gram" else "direct")
    head = Head(Contextual(with_tokens(config, mixture), mixture), scale=Scale(10.0, -10.0))
    initialise(head, 0)
    head.to(args.device, dtype)
    image_features, text_features = features(args, images, texts, dtype)
    pooling = head.pooling
    assert isinstance(pooling, Contextual)
    leaves = [
        image_features["keys"],
        image_features["values"],
        text_features["vec"],
        text_features["query"],
        pooling.out.weight,
    ]

    def blocks() -> Tensor:
        return sigmoid_loss(Blocks(head, image_features, text_features), annotated).sum

    def stored() -> Tensor:
        phi = torch.einsum("inmd,tmd->itmn", image_features["keys"], text_features["query"] * pooling.factor).softmax(
            -1
        )
        mixed = torch.einsum("itmn,inmd->itmd", phi, image_features["values"]).flatten(2)
        score = (F.normalize(pooling.out(mixed), dim=-1) * text_features["vec"]).sum(-1)
        logits = head.logits(score)
        return (F.softplus(logits) - (image_features["position"][:, None] == text_features["position"]) * logits).sum()

    def run() -> list[Tensor]:
        loss = stored() if form == "stored" else blocks()
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return run


def features(args: argparse.Namespace, images: int, texts: int, dtype: torch.dtype) -> tuple[Features, Features]:
    generator = torch.Generator().manual_seed(0)
    d = args.dim // args.heads

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(args.device, dtype)

    keys, values = numbers(images, args.k, args.heads, d), numbers(images, args.k, args.heads, d)
    query, vec = numbers(texts, args.heads, d), F.normalize(numbers(texts, args.dim), dim=1)
    for x in (keys, values, query, vec):
        x.requires_grad_()
    place = torch.arange(max(images, texts), device=args.device)
    image_features = {"vec": F.normalize(numbers(images, args.dim), dim=1), "keys": keys, "values": values}
    return image_features | {"position": place[:images]}, {
        "vec": vec,
        "query": query,
        "position": place[:texts] % images,
    }


def check(args: argparse.Namespace) -> dict[str, float]:
    """The largest relative difference to the stored form of loss and gradients; asserts that it is rounding."""
    found = {}
    for name, dtype, limit in (("fp64", torch.float64, 1e-12), ("fp32", torch.float32, 1e-4)):
        reference, *others = (make(args, 8, 40, dtype, form)() for form in ("stored", "direct", "gram"))
        errors = [float((a - b).norm() / b.norm()) for other in others for a, b in zip(other, reference, strict=True)]
        found[name] = max(errors)
        assert found[name] < limit, (name, errors)
    return found


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Run, device: str) -> float:
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - began


def stored_fits(args: argparse.Namespace, images: int, texts: int) -> bool:
    return images * texts * (3 * args.dim + 2 * args.k * args.heads) * 4 <= STORED


def compare(args: argparse.Namespace, texts: int) -> dict[str, float | str | None]:
    """Median seconds of each form, taking turns."""
    forms = ["direct", "gram"]
    if stored_fits(args, args.images, texts):
        forms.insert(0, "stored")
    runs = {form: make(args, args.images, texts, torch.float32, form) for form in forms}
    times: dict[str, list[float]] = {form: [] for form in forms}
    for n in range(args.repeat + 1):
        for form in forms if n % 2 else forms[::-1]:
            took = seconds(runs[form], args.device)
            if n:  # the first warms up
                times[form].append(took)
    middle = {form: statistics.median(t) for form, t in times.items()}
    auto = choose((args.k, args.heads, args.dim // args.heads), texts)
    over = {f: round(statistics.median(a / b for a, b in zip(times[f], times["gram"], strict=True)), 2) for f in forms}
    return {
        "texts": texts,
        **{f"{form}_s": round(middle[form], 5) if form in middle else None for form in ("stored", "direct", "gram")},
        "stored_over_gram": over.get("stored"),
        "direct_over_gram": over["direct"],
        "auto": auto,
    }


def crossover(rows: list[dict[str, float | str | None]]) -> int | None:
    """The first number of texts from which the Gram form stays ahead of the direct one in blocks."""
    ahead = [float(row["direct_over_gram"] or 0) >= 1 for row in rows]
    first = next((n for n in range(len(rows)) if all(ahead[n:])), None)
    return None if first is None else int(rows[first]["texts"] or 0)


def peak(args: argparse.Namespace, form: str) -> float:
    """MiB beyond inputs and weights, gradients included, of one forward and backward."""
    images, texts = args.memory
    if args.device == "cuda":
        run = make(args, images, texts, torch.float32, form)
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - rest) / 2**20
    own = [sys.executable, __file__, "--measure", form, "--memory", str(images), str(texts)]
    own += ["--k", str(args.k), "--dim", str(args.dim), "--heads", str(args.heads)]
    return float(subprocess.run(own, capture_output=True, check=True, text=True).stdout)


def resident(args: argparse.Namespace) -> float:
    """The same on a CPU, of this fresh process: resident memory's high-water mark (Linux)."""
    make(args, 2, 8, torch.float32, args.measure)()  # what libraries keep
    run = make(args, *args.memory, torch.float32, args.measure)
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts anew
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """KiB."""
    return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--texts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--k", type=int, default=32, help="mixture tokens")
    parser.add_argument("--dim", type=int, default=512, help="embedding size")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, after the warm-up")
    parser.add_argument("--memory", type=int, nargs=2, default=[1024, 4096], help="images and texts of the peak")
    parser.add_argument("--measure", choices=["direct", "gram"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(resident(args))
        return
    agreement = check(args)
    rows = []
    for texts in sorted(args.texts):
        rows.append(compare(args, texts))
        print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    memory = {form: round(peak(args, form), 1) for form in ("direct", "gram")}
    print(f"gram ahead from {crossover(rows)} texts; peak MiB beyond the inputs at {args.memory}: {memory}")
    setting = {k: v for k, v in vars(args).items() if k != "measure"}
    print(
        json.dumps(
            {
                "setting": setting,
                "agreement": agreement,
                "rows": rows,
                "gram_ahead_from": crossover(rows),
                "peak_mib": memory,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
