"""What this machine reaches: matrix products, a training step, encoding, reading; each beside the rate of products.

And how many images of a step its free memory holds, by the count of `kiloword plan`.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kiloword.apps.plan.advice import Option, Planner
from kiloword.apps.plan.request import GIB, Plan, card, check
from kiloword.config.options import RunOptions
from kiloword.config.recipes import Recipe
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.distributed.by_device import settle
from kiloword.distributed.device import choose, cores, free_bytes, precision_of
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training.optimizer import Optimizer
from kiloword.training.resolve import make_loader, open_sources
from kiloword.training.step import Learner, backward
from kiloword.types import BadSample, Batch, Source

SIDE = 2048  # of the matrices whose product is the limit
PRODUCT_FLOP = 2.0 * SIDE**3
LEAST, LEAST_S = 3, 3.0  # measurements of each kind, and seconds that they and their products take together
ROWS = 64  # whose captions make the vocabulary
SAFE = 0.75  # of the free memory: a process took up to 1.25 times the count, and half a GiB (docs/bench.md)
MOST = 14  # doublings of one image that are looked at
BATCHES = 10_000  # of the data, more than are read in that time


@dataclass(frozen=True)
class Measured:
    """One line: what was measured, seconds of it, images or texts in it, and its FLOP where they are known."""

    what: str
    seconds: float
    items: int = 0
    unit: str = ""
    flop: float = 0.0
    product_s: float = 0.0  # of a product of two matrices [SIDE, SIDE], measured in turns with it; 0: not measured

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flop / self.seconds

    @property
    def share(self) -> float:
        """The rate over that of products of matrices."""
        return self.rate * self.product_s / PRODUCT_FLOP


@dataclass(frozen=True)
class Room:
    """How many images a step may have: what it takes fills at most three quarters of the free memory."""

    images: int  # 0: not even one
    free: int  # bytes
    takes: float  # bytes, counted

    def __str__(self) -> str:
        free, takes = f"{self.free / GIB:.1f} GiB are free", f"{self.takes / GIB:.1f} GiB, as `kiloword plan` counts"
        if not self.images:
            return f"{free}; a step of one image takes {takes}: choose a smaller --size."
        return f"{free}: up to --batch {self.images} ({takes}); larger batches with --micro {self.images}."


def measure(
    method: str, size: str, batch: int, precision: Literal["auto", "fp32", "bf16"], device: str, data: Sequence[str]
) -> Iterator[Measured]:
    """Measurements, which come as they are made; the first is the rate of matrix products in their precision.

    Args: batch: images in a step; data: sources to read, none: nothing is read.
    Raises: ValueError for an unknown method, size or device, a batch below 1, and data that cannot be read.
    """
    device = choose(device)
    recipe = _recipe(method, size, batch, precision, device, data)
    source = open_sources(recipe) if data else None  # first, as a name that is misspelled ends the command
    return _measurements(Bench(recipe, device), source)


def _measurements(bench: Bench, source: Source | None) -> Iterator[Measured]:
    recipe, seconds = bench.recipe, _median(bench.product, bench.device)
    yield Measured(f"matrix product, {recipe.precision}", seconds, flop=PRODUCT_FLOP, product_s=seconds)
    yield bench.step()
    yield from bench.encoding()
    if source is not None:
        yield reading(recipe, source)


def room(method: str, size: str, precision: Literal["auto", "fp32", "bf16"], device: str) -> Room:
    """The largest power of two of images whose step the free memory of a device holds, in one process.

    Each has one caption, or six where the method takes all, as `kiloword plan` counts.

    Raises: ValueError for an unknown method, size or device.
    """
    device = choose(device)
    recipe, free = _recipe(method, size, 1, precision, device, ()), free_bytes(torch.device(device))
    memory_card = card("cpu" if device == "cpu" else "custom", flops=1, memory=SAFE * free / GIB)
    slots = preset(recipe.method)

    @cache
    def option(doublings: int) -> Option:
        planned = _plan(replace(recipe, batch=2**doublings))
        return Planner(planned, slots, memory_card).option("ddp", "none", 1)

    fitting = bisect_left(range(MOST + 1), True, key=lambda doublings: not option(doublings).fits)
    return Room(2 ** (fitting - 1) if fitting else 0, free, option(max(fitting - 1, 0)).bytes)


def _recipe(
    method: str, size: str, batch: int, precision: Literal["auto", "fp32", "bf16"], device: str, data: Sequence[str]
) -> Recipe:
    recipe = default_recipe(method, size, tuple(data) or ("photos",))
    return settle(replace(recipe, batch=batch, precision=precision), device)


def _plan(recipe: Recipe) -> Plan:
    """One step of the recipe in one micro-batch."""
    precision: Literal["bf16", "fp32"] = "bf16" if recipe.precision == "bf16" else "fp32"
    plan = Plan(
        size=recipe.size,
        model=recipe.model,
        optim=recipe.optim,
        batch=recipe.batch,
        samples=1,
        micro=recipe.batch,
        precision=precision,
    )
    check(plan)
    return plan


def product(precision: str, device: str) -> Callable[[], Tensor]:
    """A product of two matrices [SIDE, SIDE]: the limit, which torch reaches on this device with its threads."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
    return lambda: a @ b


class Bench:
    """A method's learner with fresh weights, and a batch of noise of the shapes that training has."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.recipe, self.device, self.method = recipe, device, preset(recipe.method)
        self.planner = Planner(_plan(recipe), self.method, card("cpu"), varied=True)
        self.learner = Learner(build(recipe.model, self.method), self.method).to(device).train()
        self.batch = _noise(self.planner.batch(recipe.batch)).to(device)
        self.precision = precision_of(recipe.precision, torch.device(device).type)
        self.product = product(recipe.precision, device)

    def step(self) -> Measured:
        """Forward and backward pass, and the optimizer's step."""
        optimizer, steps = Optimizer(self.learner, self.recipe.optim, 1000), count()

        def run() -> None:
            values = backward(self.learner, [self.batch], self.precision)
            optimizer.step(next(steps), values["loss"])

        flop = self.planner.option("ddp", "none", 1).step.total
        seconds, product_s = _turns(run, self.product, self.device)
        return Measured("training step", seconds, self.recipe.batch, "images", flop, product_s)

    def encoding(self) -> Iterator[Measured]:
        """Images alone, then texts alone, without gradients."""
        model, work = self.learner.model.eval(), self.planner.micro_batch(self.recipe.batch).forward

        def encoded(encode: Callable[[], Any]) -> tuple[float, float]:
            with torch.no_grad(), self.precision():
                return _turns(encode, self.product, self.device)

        seconds, product_s = encoded(lambda: model.encode_image(self.batch.images))
        yield Measured("encode images", seconds, len(self.batch), "images", work["image tower"], product_s)
        seconds, product_s = encoded(lambda: model.encode_text(self.batch.texts))
        yield Measured("encode texts", seconds, len(self.batch.texts), "texts", work["text tower"], product_s)


def reading(recipe: Recipe, source: Source) -> Measured:
    """Batches of the data, decoded and augmented in this process. Raises: ValueError for data that cannot be read."""
    captions = list[str]()
    for row in range(min(len(source), ROWS)):
        with suppress(BadSample):
            captions += source.record(row).captions
    tokenizer = Tokenizer.train(captions, recipe.model.text.vocab)
    loader = make_loader(recipe, source, preset(recipe.method), tokenizer, RunOptions(workers=0))
    batches = loader.batches(0, BATCHES)
    seconds = _median(lambda: next(batches), "cpu")
    return Measured(f"read, one of {cores()} cores", seconds, recipe.batch, "images")


def _noise(batch: Batch) -> Batch:
    """The batch of a plan with content in place of its tensors that have none."""

    def filled(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            return x
        if x.dtype in (torch.uint8, torch.bool):
            return torch.randint(0, 2 if x.dtype == torch.bool else 256, x.shape).to(x.dtype)
        return torch.randn(x.shape)

    return batch.each(filled)


def _median(run: Callable[[], Any], device: str) -> float:
    """Seconds of a call: the median of three or more, after one that is not counted."""
    return _turns(run, lambda: None, device)[0]


def _turns(run: Callable[[], Any], other: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds of two calls that take turns, so that both meet the same machine: medians, without the first turn."""
    times = list[float]()
    others = list[float]()
    while len(times) <= LEAST or sum(times[1:]) + sum(others[1:]) < LEAST_S:
        others.append(_seconds(other, device))
        times.append(_seconds(run, device))
    return statistics.median(times[1:]), statistics.median(others[1:])


def _seconds(run: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
