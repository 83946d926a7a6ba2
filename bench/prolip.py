"""What Gaussians and their terms cost: steps of `prolip`, with and without its terms, against steps of `siglip`.

Towers are the same (`siglip` reads its texts in both directions too), but `prolip` has one token more an image, one or
two more a text, and a linear layer a side. First asserts that towers start equal; then takes turns and prints ratios of
times and of FLOPs as one JSON line. On a CPU seconds are the processor's, which other work hardly changes.

    python bench/prolip.py --size tiny --batch 64 --dtype bf16 --steps 20
    python bench/prolip.py --size b32 --batch 32 --steps 3 --warmup 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

sys.path.insert(0, str(Path(__file__).parent))
from kiloword.config.recipes import sizes
from kiloword.methods.prolip.inclusion import mask_words
from kiloword.methods.registry import preset
from kiloword.model.image import grid
from kiloword.model.model import Model
from kiloword.models.build import build
from kiloword.training.step import Learner, backward
from kiloword.types import Batch, Texts
from step import LENGTHS, wait

ARMS: dict[str, tuple[str, dict[str, float]]] = {
    "siglip": ("siglip", {}),
    "pairs alone": ("prolip", {"image_in_text": 0, "masked": 0, "vib": 0}),
    "without masked": ("prolip", {"masked": 0}),
    "prolip": ("prolip", {}),
}


class Arm:
    """One contestant of the steps; `like` another, it has that one's weights and optimizer: terms have none."""

    def __init__(self, args: argparse.Namespace, name: str, like: Arm | None = None) -> None:
        config, method = sizes()[args.size], preset(*ARMS[name])
        bare = replace(config, text=replace(config.text, causal=False))
        model: Model = like.learner.model if like else build(bare, method).to(args.device)
        self.args = args
        self.learner: Learner = Learner(model, method)
        self.optimizer: torch.optim.Optimizer = (
            like.optimizer if like else torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        )
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
        half = self.args.dtype == "bf16"
        cast = partial(torch.autocast, self.args.device, torch.bfloat16, enabled=half)
        backward(self.learner, [self.batches[turn % len(self.batches)]], cast)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

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
    arms = {name: Arm(args, name) for name in ("siglip", "prolip")}
    arms = {name: arms.get(name) or Arm(args, name, arms["prolip"]) for name in ARMS}
    check_towers(arms)
    flops = {name: arm.gflop() for name, arm in arms.items()}
    times = in_turns({name: arm.step for name, arm in arms.items()}, args.steps, args.warmup, args.device)
    full = arms["prolip"].learner.model.config
    images, texts = grid(full.image) ** 2 + 1, arms["siglip"].batches[0].texts
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
        "tokens_of_siglip": {"image": images, "caption": round(len(texts.ids) / len(texts), 2)},
        "tokens_more": {"image": 1, "caption": len(full.text.extra_tokens)},
        "seconds": {name: [round(x, 4) for x in t] for name, t in times.items()},
    }


def mask_words_seconds(arm: Arm) -> float:
    """Of choosing and hiding the words of one image's caption in eight."""
    batch, text = arm.batches[0], arm.learner.model.config.text
    some = batch.texts.cut(0, -(-len(batch) // 8))
    times = in_turns({"it": lambda n: mask_words(some, batch.seeds[: len(some)], 0.75, text)}, 20, 3, arm.args.device)
    return statistics.median(times["it"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=[s for s in sizes() if s != "debug"], default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=64, help="images; one in eight is masked")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=10, help="steps of each, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    found = {"setting": vars(args), **steps(args)}
    print(json.dumps({**found, "threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
