"""What reading K mixture tokens by text costs: a training step of `llip` against one of `siglip` with K registers.

Both have the same towers and tokens; the second reads the first token alone. First asserts that towers start equal;
then takes turns and prints the ratio of the steps (forward, backward, AdamW) with all times as one JSON line.

    python bench/tokens.py --size tiny --batch 64 --dtype bf16
    python bench/tokens.py --size b32 --batch 32 --dtype fp32 --steps 4
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from kiloword.config.recipes import ModelConfig, sizes
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training.step import Learner
from kiloword.types import Batch, Texts


def batch(config: ModelConfig, images: int, seed: int, device: str) -> Batch:
    """Noise with captions of 8 to 20 tokens, about Flickr8k's mean of 14."""
    rng = np.random.default_rng(seed)
    size, numbers = config.image.size, torch.arange(images)
    sequences = [rng.integers(6, config.text.vocab - 1, n).tolist() for n in rng.integers(8, 21, images)]
    return Batch(
        images=torch.from_numpy(rng.integers(0, 256, (images, 3, size, size), dtype=np.uint8)),
        texts=Texts.pack(sequences),
        image_of_text=numbers,
        seeds=numbers,
        position=numbers,
        composed=torch.zeros(images, dtype=torch.bool),
    ).to(device)


class Side:
    """One contestant."""

    def __init__(self, args: argparse.Namespace, pool: str) -> None:
        method = preset("llip", {"k": args.k, "pool": pool})
        self.args = args
        self.learner = Learner(build(sizes()[args.size], method), method).to(args.device)
        self.optimizer = torch.optim.AdamW(self.learner.parameters(), lr=1e-5, fused=True)

    def step(self, some: Batch) -> float:
        """Seconds."""
        wait(self.args.device)
        began = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.dtype == "bf16"):
            loss = self.learner(some, {})["loss"]
        loss.backward()
        self.optimizer.step()
        wait(self.args.device)
        return time.perf_counter() - began


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def check(llip: Side, registers: Side) -> None:
    """The same towers: same names, same numbers."""
    a, b = ({n: p for n, p in side.learner.named_parameters() if "_tower." in n} for side in (llip, registers))
    assert a.keys() == b.keys()
    assert all(torch.equal(p, b[n]) for n, p in a.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=[s for s in sizes() if s != "debug"], default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=64, help="images")
    parser.add_argument("--k", type=int, default=16, help="tokens")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--steps", type=int, default=20, help="steps of each, after the warm-up")
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    sides = {"llip": Side(args, "contextual"), "registers": Side(args, "first")}
    check(sides["llip"], sides["registers"])
    batches = [batch(sizes()[args.size], args.batch, seed, args.device) for seed in range(3)]
    times: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(args.warmup + args.steps):
        for name in sides if n % 2 else list(sides)[::-1]:
            took = sides[name].step(batches[n % len(batches)])
            if n >= args.warmup:
                times[name].append(took)
    ratios = [a / b for a, b in zip(times["llip"], times["registers"], strict=True)]
    print(
        json.dumps(
            {
                "setting": vars(args),
                "ratio": round(statistics.median(ratios), 3),  # above 1: llip is dearer
                "ratio_of_least": round(min(times["llip"]) / min(times["registers"]), 3),
                "seconds": {k: [round(x, 4) for x in v] for k, v in times.items()},
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
