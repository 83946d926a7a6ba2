"""How long training stands still for a save: copied and written in the background, or written before it goes on.

Prepares a run of a size, makes a step so that the optimizer has its moments, and saves some times in both ways.

    python bench/save.py [--sizes s16 b32] [--times 5] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from kiloword.config.options import RunOptions
from kiloword.distributed.device import precision_of
from kiloword.methods.defaults import default_recipe
from kiloword.models.saving import Saver
from kiloword.training.resolve import Run, open_sources
from kiloword.training.setup import prepare, snapshot
from kiloword.training.step import backward


def ready(size: str, device: str, out: Path) -> Run:
    base = default_recipe("siglip", size, ("scenes?n=256",))
    recipe = replace(base, batch=4, steps=1000, optim=replace(base.optim, ema=0.99))
    run = prepare(recipe, out, open_sources(recipe), device=device, options=RunOptions(quiet=True, keep_states=1))
    step(run)
    return run


def step(run: Run) -> float:
    """Seconds of one step."""
    batch = next(iter(run.loader.batches(run.step, run.recipe.steps)))
    start = time.perf_counter()
    precision = precision_of(run.recipe.precision, run.device.type)
    backward(run.learner, batch.to(run.device).split(1), precision, run.reducer)
    run.optimizer.step(run.step)
    run.step += 1
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def saves(run: Run) -> Saver:
    """What saves a run."""
    return Saver(run.out, run.options.keep_states, partial(snapshot, run))


def measure(size: str, device: str, times: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, saves(run := ready(size, device, Path(folder) / "run")) as saver:
        blocked: dict[str, list[float]] = {"first": [], "background": [], "awaited": []}
        alone, beside = [step(run) for _ in range(times)], []
        for n in range(times + 1):
            start = time.perf_counter()
            saver.save()
            blocked["background" if n else "first"].append(time.perf_counter() - start)
            while saver.writing:
                beside.append(step(run))
            saver.finish()
            start = time.perf_counter()
            saver.save()
            saver.finish()
            blocked["awaited"].append(time.perf_counter() - start)
        on_disk = sum(path.stat().st_size for path in (Path(folder) / "run" / "state").rglob("*") if path.is_file())
    median = {name: round(statistics.median(seconds), 3) for name, seconds in blocked.items()}
    steps = {name: round(statistics.median(s), 3) if s else None for name, s in (("alone", alone), ("beside", beside))}
    return {"size": size, "state GB": round(on_disk / 1e9, 2), "stands still, s": median, "a step, s": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["s16", "b32"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in args.sizes:
        rows.append(measure(size, args.device, args.times))
        print(rows[-1], flush=True)
    print(json.dumps({"device": args.device, "rows": rows}))


if __name__ == "__main__":
    main()
