"""What Gaussians cost: steps of `prolip`, with and without its terms, against `siglip`'s, and the pair losses alone.

Towers are the same (`siglip` reads its texts in both directions too), but `prolip` has one token more a picture, one or
two more a text, and a linear layer a side. First asserts that towers start equal and that both pair losses are what
their equations say; then takes turns. Prints ratios, FLOPs, shares of parts, and the pair losses' peak memory, all of
it again as one JSON line. On a CPU seconds are the processor's, which other work on the machine hardly changes.

    python bench/prolip.py --size tiny --batch 64 --dtype bf16 --steps 20
    python bench/prolip.py --size b32 --batch 32 --steps 3 --pairs
    python bench/prolip.py --steps 0 --pairs 1024 2048 4096 8192 --chunk 0 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

sys.path.insert(0, str(Path(__file__).parent))
from step import LENGTHS, wait

from kiloword.accumulate import backward
from kiloword.heads import Head
from kiloword.inclusion import mask_words
from kiloword.learner import Learner
from kiloword.losses import Blocks, sigmoid_loss
from kiloword.method import annotated
from kiloword.methods import preset
from kiloword.model import build, initialise
from kiloword.recipes import sizes
from kiloword.types import Batch, Features, Texts

ARMS: dict[str, tuple[str, dict[str, float]]] = {
    "siglip": ("siglip", {}),
    "pairs alone": ("prolip", {"image_in_text": 0, "masked": 0, "vib": 0}),
    "without masked": ("prolip", {"masked": 0}),
    "prolip": ("prolip", {}),
}
Run = Callable[..., list[Tensor]]
"""A pair loss and its gradients by features, scale and bias, the same in every turn."""


class Arm:
    """One contestant of the steps."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        config = sizes()[args.size]
        method = preset(*ARMS[name])
        self.args = args
        self.learner = Learner(build(replace(config, text=replace(config.text, causal=False)), method), method)
        self.learner.to(args.device)
        self.optimizer = torch.optim.AdamW(self.learner.parameters(), lr=1e-5, fused=True)
        self.batches = [self._batch(seed) for seed in range(3)]  # lengths change from step to step

    def _batch(self, seed: int) -> Batch:
        """Noise with captions of Flickr8k's lengths; the same words for every arm."""
        rng, config = np.random.default_rng(seed), self.learner.model.config
        text, size, n = config.text, config.image.size, self.args.batch
        words, numbers = max(text.special.values()) + 1, torch.arange(n)
        tail = [text.special["end"], *(text.special[name] for name in text.extra_tokens)]
        lengths = 4 + rng.choice(len(LENGTHS), n, p=np.array(LENGTHS) / sum(LENGTHS))
        captions = [[text.special["start"], *rng.integers(words, text.vocab, n - 2).tolist(), *tail] for n in lengths]
        return Batch(
            images=torch.from_numpy(rng.integers(0, 256, (n, 3, size, size), dtype=np.uint8)),
            texts=Texts.pack(captions),
            image_of_text=numbers,
            seeds=numbers,
            position=numbers,
            composed=torch.zeros(n, dtype=torch.bool),
        ).to(self.args.device)

    def step(self, turn: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        half = self.args.dtype == "bf16"
        cast = partial(torch.autocast, self.args.device, torch.bfloat16, enabled=half)
        backward(self.learner, [self.batches[turn % len(self.batches)]], cast)
        self.optimizer.step()

    def gflop(self) -> float:
        """Of matrix products, forward and backward."""
        aten = torch.ops.aten
        own = {
            aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop(q, k, v),
            # two products become five: dq, dk, dv, and scores and their gradients
            aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
                sdpa_flop(q, k, v) * 5 // 2
            ),
        }
        with FlopCounterMode(display=False, custom_mapping=own) as counter:
            self.step(0)
        return float(counter.get_total_flops()) / 1e9


def check_towers(arms: dict[str, Arm]) -> None:
    """Weights of the same name start as the same numbers, and nothing of siglip's is missing."""
    theirs = dict(arms["siglip"].learner.named_parameters())
    for arm in arms.values():
        ours = dict(arm.learner.named_parameters())
        assert all(torch.equal(parameter, ours[name]) for name, parameter in theirs.items())


def seconds(run: Callable[[], Any], device: str) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time
    wait(device)
    began = clock()
    run()
    wait(device)
    return clock() - began


def in_turns(runs: Mapping[str, Callable[[int], Any]], turns: int, warmup: int, device: str) -> dict[str, list[float]]:
    """Seconds of each, first to last and last to first by turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(warmup + turns):
        for name in list(runs) if n % 2 else list(runs)[::-1]:
            took = seconds(partial(runs[name], n), device)
            if n >= warmup:
                times[name].append(took)
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> float:
    """Median of the turns' own ratios: what else the machine did weighs on both."""
    return round(statistics.median(a / b for a, b in zip(times[name], times[to], strict=True)), 3)


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Times and FLOPs of the arms' steps, as ratios to siglip's."""
    arms = {name: Arm(args, name) for name in ARMS}
    check_towers(arms)
    flops = {name: arm.gflop() for name, arm in arms.items()}
    times = in_turns({name: arm.step for name, arm in arms.items()}, args.steps, args.warmup, args.device)
    full = arms["prolip"].learner.model.config
    pictures, texts = (full.image.size // full.image.patch) ** 2 + 1, arms["siglip"].batches[0].texts
    return {
        "time_over_siglip": {name: ratio(times, name, "siglip") for name in ARMS},
        "least_over_siglip": {name: round(min(times[name]) / min(times["siglip"]), 3) for name in ARMS},
        "flops_over_siglip": {name: round(flops[name] / flops["siglip"], 3) for name in ARMS},
        "masked_adds": round(
            statistics.median(
                (a - b) / c for a, b, c in zip(times["prolip"], times["without masked"], times["siglip"], strict=True)
            ),
            3,
        ),
        "mask_words_share": round(mask_words_seconds(arms["prolip"]) / statistics.median(times["prolip"]), 4),
        "tokens_of_siglip": {"picture": pictures, "caption": round(len(texts.ids) / len(texts), 2)},
        "tokens_more": {"picture": 1, "caption": len(full.text.extra_tokens)},
        "seconds": {name: [round(x, 4) for x in t] for name, t in times.items()},
    }


def mask_words_seconds(arm: Arm) -> float:
    """Of choosing and hiding the words of one picture's caption in eight."""
    batch, text = arm.batches[0], arm.learner.model.config.text
    some = batch.texts.cut(0, -(-len(batch) // 8))
    times = in_turns({"it": lambda n: mask_words(some, batch.seeds[: len(some)], 0.75, text)}, 20, 3, arm.args.device)
    return statistics.median(times["it"])


def pair_loss(args: argparse.Namespace, name: str, n: int, chunk: int, dtype: torch.dtype = torch.float32) -> Run:
    """Blocks of n x n pairs, every picture's own text at its place."""
    pictures, texts, head = features(args, name, n, dtype)
    inputs = [x for x in (*pictures.values(), *texts.values(), *head.parameters()) if x.requires_grad]

    def run(turn: int = 0) -> list[Tensor]:
        loss = sigmoid_loss(Blocks(head, pictures, texts, chunk), annotated).sum
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


def check_pairs(args: argparse.Namespace) -> dict[str, float]:
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
    pictures, texts, head = features(args, name, n, dtype)
    inputs = [x for x in (*pictures.values(), *texts.values(), *head.parameters()) if x.requires_grad]
    i, t = (index.flatten() for index in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    a, b = ({key: value[index] for key, value in side.items()} for side, index in ((pictures, i), (texts, t)))
    score = (a["vec"] * b["vec"]).sum(-1)
    if name == "prolip":
        score = score - (a["log_var"].exp().sum(-1) + b["log_var"].exp().sum(-1)) / 2
    sign = torch.where(i == t, 1, -1).to(args.device)
    loss = -F.logsigmoid(sign * head.logits(score)).sum()
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def pairs(args: argparse.Namespace, chunk: int) -> dict[str, Any]:
    """Times and peak memory of both pair losses by number of pictures, in blocks of `chunk`."""
    rows = []
    for n in args.pairs:
        runs = {name: pair_loss(args, name, n, chunk) for name in ("siglip", "prolip")}
        times = in_turns(runs, args.repeat, 1, args.device)
        rows.append(
            {
                "n": n,
                "ratio": ratio(times, "prolip", "siglip"),
                "least": round(min(times["prolip"]) / min(times["siglip"]), 3),
                "seconds": {name: round(statistics.median(t), 4) for name, t in times.items()},
                "peak_mib": {name: round(peak(args, name, n, chunk), 1) for name in runs},
            }
        )
        print(f"chunk {chunk or 'default'}  " + "  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    return {"chunk": chunk, "rows": rows}


def peak(args: argparse.Namespace, name: str, n: int, chunk: int) -> float:
    """MiB beyond inputs, gradients included, of one forward and backward."""
    if args.device == "cuda":
        run = pair_loss(args, name, n, chunk)
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - rest) / 2**20
    own = [sys.executable, __file__, "--measure", name, "--pairs", str(n), "--chunk", str(chunk)]
    return float(subprocess.run([*own, "--dim", str(args.dim)], capture_output=True, check=True, text=True).stdout)


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
    found["agreement"] = check_pairs(args)
    if args.steps:
        found |= steps(args)
        print("\n".join(f"{name}: {value}" for name, value in found.items() if name != "setting"), flush=True)
    found["pairs"] = [pairs(args, chunk) for chunk in args.chunk if args.pairs]
    print(json.dumps({**found, "threads": torch.get_num_threads(), "torch": torch.__version__}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=[s for s in sizes() if s != "debug"], default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=64, help="pictures of a step; one in eight is masked")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the towers")
    parser.add_argument("--steps", type=int, default=5, help="steps of each, after the warm-up; 0: pair losses alone")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--pairs", type=int, nargs="*", default=[1024, 2048, 4096], help="pictures of the pair losses")
    parser.add_argument("--chunk", type=int, nargs="+", default=[0], help="rows and columns of a block; 0: the head's")
    parser.add_argument("--dim", type=int, default=512, help="embedding size of the pair losses")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each pair loss, after one to warm up")
    parser.add_argument("--measure", choices=["siglip", "prolip"], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
