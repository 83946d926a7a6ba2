"""How often a training step waits for the GPU: torch's synchronisation warnings of one step, by line, for every preset.

One step is made before, so that what is done once is not counted. Prints one JSON line.

    python bench/syncs.py
    python bench/syncs.py --dry    # the same steps on a CPU, at size debug, where nothing is counted
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from pathlib import Path

import torch

from kiloword.config.recipes import OptimConfig, sizes
from kiloword.distributed.device import precision_of
from kiloword.methods.registry import PRESETS, preset
from kiloword.models.build import build
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import Learner, backward
from plan_measure import batch_of


def waits(name: str, args: argparse.Namespace, micro: int, optimizer: str) -> dict[str, int]:
    """File and line of each wait of the second step, with how often."""
    method = preset(name)
    learner = Learner(build(sizes()[args.size], method), method).to(args.device)
    steps = Optimizer(learner, OptimConfig(name=optimizer), 10)
    batch = batch_of(learner.model.config, args.batch, 2, method)
    parts = [part.to(args.device) for part in batch.split(micro)]
    precision = precision_of("bf16", args.device)
    for number in (0, 1):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if args.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("warn" if number else "default")
            steps.step(number, backward(learner, parts, precision)["loss"])
            if args.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    found = [w for w in warned if "synchronizing" in str(w.message)]
    return dict(Counter(f"{Path(w.filename).name}:{w.lineno}" for w in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch", type=int, default=32, help="images, of two captions each")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at size debug")
    args = parser.parse_args()
    if args.dry:
        args.device, args.size, args.batch = "cpu", "debug", 8
    found = {}
    for name in PRESETS:
        for micro, optimizer in ((1, "adamw"), (2, "muon")):
            found[f"{name}, {micro} micro-batches, {optimizer}"] = waits(name, args, micro, optimizer)
    counted = None if args.device == "cpu" else found
    print(json.dumps({"steps": len(found), "waits": counted, "setting": vars(args), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
