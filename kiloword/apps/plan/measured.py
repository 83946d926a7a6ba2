"""What this machine reaches: matrix products, a training step, and how many images its free memory holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.benchmark import Timer

from kiloword.apps.plan.options import GIB, Plan
from kiloword.apps.plan.planner import Planner
from kiloword.config.recipes import Recipe
from kiloword.distributed.by_device import settle
from kiloword.distributed.device import choose, free_bytes, precision_of
from kiloword.files import write_json
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.report import Table, say_blocks
from kiloword.terminal import say
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import Learner, backward

if TYPE_CHECKING:
    from kiloword.apps.plan.command import Bench

SIDE = 2048  # of the matrices whose product is the limit
LEAST_S = 2.0  # seconds that measurements of each kind take
SAFE = 0.75  # of the free memory: a process took up to 1.25 times the count, and half a GiB (research/bench.md)
MOST = 1 << 14  # images that are looked at


def bench(options: Bench) -> None:
    """Measure and print. Raises: ValueError for an unknown method, size or device."""
    device = choose(options.device)
    recipe = replace(default_recipe(options.method, options.size), batch=options.batch, precision=options.precision)
    recipe = settle(recipe, device)
    lines = measure(recipe, device)
    rows = [
        [one["what"], one["seconds"], f"{one['items'] / one['seconds']:,.1f}", one["flop"] / one["seconds"] / 1e12]
        for one in lines
    ]
    say_blocks([Table(rows, ["", "seconds", "a second", "TFLOP/s"], digits=4)])
    free = free_bytes(torch.device(device))
    images, takes = room(recipe, device, free)
    fitting = f"up to --batch {images}" if images else "not one image: choose a smaller --size"
    say(f"memory: {free / GIB:.1f} GiB are free: {fitting} ({takes / GIB:.1f} GiB, as `kiloword plan` counts).")
    if options.json is not None:
        write_json(options.json, lines)


def planner_of(recipe: Recipe, device: str) -> Planner:
    """One step of a recipe."""
    return Planner(Plan(gpu="cpu" if device == "cpu" else "h200"), recipe)


def measure(recipe: Recipe, device: str) -> list[dict[str, Any]]:
    """A product of two matrices [SIDE, SIDE] and a step on noise: what, seconds, items, and their FLOP."""
    slots, planner = preset(recipe.method), planner_of(recipe, "cpu")
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
    learner = Learner(build(recipe.model, slots), slots).to(device).train()
    noise = planner.batch(recipe.batch).each(
        lambda x: torch.randint(2, x.shape).to(x.dtype) if isinstance(x, FakeTensor) else x
    )
    noise = noise.to(device)
    optimizer, steps = Optimizer(learner, recipe.optim, 1000), count()
    precision = precision_of(recipe.precision, torch.device(device).type)

    def step() -> None:
        optimizer.step(next(steps), backward(learner, [noise], precision)["loss"])

    def seconds(run: Callable[[], object]) -> float:
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=LEAST_S).median)

    step_s, product_s = seconds(step), seconds(lambda: a @ b)
    flop = sum(planner.option("ddp", "none", 1).flop.values())
    return [
        {"what": f"matrix product, {recipe.precision}", "seconds": product_s, "items": 1, "flop": 2.0 * SIDE**3},
        {"what": "training step, images", "seconds": step_s, "items": recipe.batch, "flop": flop},
    ]


def room(recipe: Recipe, device: str, free: int) -> tuple[int, float]:
    """The largest power of two of images whose step takes at most three quarters of the free memory, in one process.

    Returns: images, 0 where not one fits, and bytes that they take, or that one takes.
    """
    images, takes = 0, 0.0
    while images < MOST:
        more = max(1, 2 * images)
        held = planner_of(replace(recipe, batch=more), device).option("ddp", "none", 1).bytes
        if held > SAFE * free:
            return images, takes or held
        images, takes = more, held
    return images, takes
