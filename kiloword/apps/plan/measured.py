"""What this machine reaches: matrix products, a training step, encoding, reading; each beside the rate of products.

And how many images of a step its free memory holds, by the count of `kiloword plan`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kiloword.apps.plan.options import GIB, Plan, card
from kiloword.apps.plan.planner import Planner
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.data.reading import captions_of
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.by_device import settle
from kiloword.distributed.device import choose, cores, free_bytes, precision_of
from kiloword.files import write_json
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.terminal import say
from kiloword.training.optimizer import Optimizer
from kiloword.training.resolve import make_loader, open_sources
from kiloword.training.step import Learner, backward

if TYPE_CHECKING:
    from kiloword.apps.plan.command import Bench

SIDE = 2048  # of the matrices whose product is the limit
LEAST, LEAST_S = 3, 3.0  # measurements of each kind, and seconds that they and their products take together
ROWS = 64  # whose captions make the vocabulary
SAFE = 0.75  # of the free memory: a process took up to 1.25 times the count, and half a GiB (docs/bench.md)
MOST = 1 << 14  # images that are looked at


@dataclass(frozen=True)
class Measured:
    """One line: what was measured, seconds of it, images or texts in it, and its FLOP where they are known."""

    what: str
    seconds: float
    items: int = 0
    unit: str = ""
    flop: float = 0.0
    product_s: float = 0.0  # of a product of two matrices [SIDE, SIDE], measured in turns with it

    @property
    def share(self) -> float:
        """The rate over that of products of matrices."""
        return self.flop / self.seconds * self.product_s / (2.0 * SIDE**3)


def bench(options: Bench) -> None:
    """Print measurements as they come. Raises: ValueError for unknown names, and data that cannot be read."""
    say(f"{'':<24}{'seconds':>10}{'a second':>16}{'TFLOP/s':>10}{'of products':>13}")
    lines = list[dict[str, Any]]()
    for line in measure(options):
        speed = f"{line.items / line.seconds:,.0f} {line.unit}" if line.items else ""
        rate, share = (f"{line.flop / line.seconds / 1e12:.3f}", f"{line.share:.2f}") if line.flop else ("", "")
        say(f"{line.what:<24}{line.seconds:>10.4f}{speed:>16}{rate:>10}{share:>13}")
        lines.append(asdict(line))
    images, takes, free = room(options)
    fitting = f"up to --batch {images}" if images else "not one image: choose a smaller --size"
    say(f"memory: {free / GIB:.1f} GiB are free: {fitting} ({takes / GIB:.1f} GiB, as `kiloword plan` counts).")
    if options.json is not None:
        write_json(options.json, lines)


def recipe_of(options: Bench, batch: int) -> Recipe:
    """The defaults of `train`. Raises: ValueError for an unknown method or size."""
    recipe = default_recipe(options.method, options.size, options.data or ("photos",))
    return settle(replace(recipe, batch=batch, precision=options.precision), choose(options.device))


def planner_of(recipe: Recipe, device: str) -> Planner:
    """One step of a recipe."""
    precision: Literal["bf16", "fp32"] = "bf16" if recipe.precision == "bf16" else "fp32"
    plan = Plan(model=recipe.model, optim=recipe.optim, batch=recipe.batch, samples=1, precision=precision)
    plan = replace(plan, gpu="cpu" if device == "cpu" else plan.gpu)
    return Planner(plan, preset(recipe.method), card(plan))


def measure(options: Bench) -> Iterator[Measured]:
    """Products of matrices, a step, encoding, and reading where there is data."""
    device, recipe = choose(options.device), recipe_of(options, options.batch)
    source = open_sources(recipe) if options.data else None  # first, as a misspelled name ends the command
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))

    def line(what: str, run: Callable[[], Any], items: int = 0, unit: str = "", flop: float = 0.0) -> Measured:
        seconds, product_s = in_turns(run, lambda: a @ b, device)
        return Measured(what, seconds, items, unit, flop, product_s)

    yield line(f"matrix product, {recipe.precision}", lambda: a @ b, flop=2.0 * SIDE**3)
    slots, planner = preset(recipe.method), planner_of(recipe, "cpu")
    learner, fake = Learner(build(recipe.model, slots), slots).to(device).train(), planner.batch(recipe.batch)
    noise, model = fake.each(_filled).to(device), learner.model
    optimizer, steps = Optimizer(learner, recipe.optim, 1000), count()
    precision = precision_of(recipe.precision, torch.device(device).type)

    def step() -> None:
        optimizer.step(next(steps), backward(learner, [noise], precision)["loss"])

    yield line("training step", step, recipe.batch, "images", sum(planner.option("ddp", "none", 1).flop.values()))
    learner.eval()
    for unit in ("images", "texts"):
        with planner.simulation("none").counted() as counted, torch.no_grad(), precision_of(recipe.precision, "cpu")():
            getattr(planner.learner.model, f"encode_{unit[:-1]}")(getattr(fake, unit))
        inputs, encode = getattr(noise, unit), getattr(model, f"encode_{unit[:-1]}")
        with torch.no_grad(), precision():
            yield line(f"encode {unit}", lambda: encode(inputs), len(inputs), unit, counted.flop())  # noqa: B023
    if source is not None:
        captions = list(captions_of(source, ROWS))
        tokenizer = Tokenizer.train(captions, recipe.model.text.vocab)
        batches = make_loader(recipe, source, slots, tokenizer, RunOptions(workers=0)).batches(0, 10_000)
        seconds, _ = in_turns(lambda: next(batches), lambda: None, "cpu")
        yield Measured(f"read, one of {cores()} cores", seconds, recipe.batch, "images")


def room(options: Bench) -> tuple[int, float, int]:
    """The largest power of two of images whose step takes at most three quarters of the free memory, in one process.

    Returns: images, 0 where not one fits; bytes that they take, or that one takes; bytes that are free.
    """
    device, images, takes = choose(options.device), 0, 0.0
    free = free_bytes(torch.device(device))
    while images < MOST:
        more = max(1, 2 * images)
        held = planner_of(recipe_of(options, more), device).option("ddp", "none", 1).bytes
        if held > SAFE * free:
            return images, takes or held, free
        images, takes = more, held
    return images, takes, free


def _filled(x: Tensor) -> Tensor:
    """Content in place of a tensor that has none."""
    if not isinstance(x, FakeTensor):
        return x
    if x.dtype in (torch.uint8, torch.bool):
        return torch.randint(0, 2 if x.dtype == torch.bool else 256, x.shape).to(x.dtype)
    return torch.randn(x.shape)


def in_turns(run: Callable[[], Any], other: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds of two calls that take turns, so that both meet the same machine: medians, without the first turn."""
    times = list[float](), list[float]()
    while len(times[0]) <= LEAST or sum(times[0][1:]) + sum(times[1][1:]) < LEAST_S:
        for call, seconds in zip((run, other), times, strict=True):
            start = time.perf_counter()
            call()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])
