"""Measure a step without a device: the learner's own code on tensors without content (torch's FakeTensorMode).

Every method is measured, a user's own included; nothing here knows what a method does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks

from kiloword.apps.plan.tracer import HEAD, Tracer, storage_of
from kiloword.config.recipes import ModelConfig
from kiloword.distributed import collectives
from kiloword.distributed.device import precision_of, simulated
from kiloword.losses.pairs import Blocks, learns
from kiloword.methods.method import PAIR, Method
from kiloword.model.decoder import Layer
from kiloword.model.heads import Head
from kiloword.model.trunks.trunk import trunks
from kiloword.training.compilation import recomputed_blocks
from kiloword.training.step import MainContrast, learner_of
from kiloword.types import Batch, Encoded, Features

PAIRS, TRUNK = "pair loss", " (trunk)"
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch takes on one GPU, but for the pair loss, in FLOP and bytes."""

    forward: Counter[str]  # FLOP by part
    backward: Counter[str]
    single: Counter[str]  # of both, products in full precision whatever the run's is
    encoding: Counter[str]  # of the forward ones, what the pair loss needs: towers and head
    saved: Counter[str]  # bytes that wait for the backward pass, by kind of checkpointing
    half: Counter[str]  # bytes of weights in half precision that wait too: "inside" of blocks, "outside"
    block: Counter[str]  # bytes of the largest block, by kind of checkpointing
    gathered: Counter[str]  # numbers of the matrices of all blocks called: in "encoding", in "all"
    recomputed: float  # FLOP that checkpointing "whole" repeats
    passing: float  # bytes that the forward pass allocates at most beside what it saves
    scratch: float  # bytes of one layer's attention in its backward pass

    def toward(self, other: MicroBatch, t: float) -> MicroBatch:
        """A micro-batch on the line through this one, at t = 0, and another, at t = 1."""

        def line(a: float, b: float) -> float:
            return max(0.0, a + (b - a) * t)

        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            end = getattr(other, name)
            values[name] = (
                Counter({k: line(x, end[k]) for k, x in value.items()})
                if isinstance(value, Counter)
                else line(value, end)
            )
        return MicroBatch(**values)


@dataclass(frozen=True)
class RowBytes:
    """Bytes of the features of one image or text."""

    learned: int  # with gradient
    constant: int

    @staticmethod
    def of(features: Features) -> RowBytes:
        """Of features with one row."""
        sizes = {True: 0, False: 0}
        for x in features.values():
            sizes[x.requires_grad] += x.nbytes
        return RowBytes(sizes[True], sizes[False])

    def plus(self, other: RowBytes, times: float) -> RowBytes:
        """The sum of these, and of others several times."""
        return RowBytes(self.learned + round(times * other.learned), self.constant + round(times * other.constant))


@dataclass(frozen=True)
class _Side:
    """The rows or columns of a contrast: one of them without content, and their number for each image."""

    features: Features
    an_image: float


@dataclass(frozen=True)
class PairLoss:
    """What the pair loss of one GPU takes."""

    image: RowBytes
    text: RowBytes
    forward: float = 0.0  # FLOP
    backward: float = 0.0
    block: float = 0.0  # bytes that one block of pairs needs while it is computed
    reduced: float = 0.0  # numbers of every text that are reduced over ranks


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating-point tensors of this type inside. torch cannot convert parameters without content afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Simulation:
    """A learner without content.

    Args: device: "cpu" or "cuda", whose kernels and sizes of blocks are simulated; precision: of the run.
    Attributes: uncounted: names of terms (or of the pair loss) that read values, which fake tensors do not have.
    """

    def __init__(self, config: ModelConfig, method: Method, device: str, precision: str) -> None:
        self.method, self.device, self.precision = method, device, precision
        self.mode, self.uncounted = FakeTensorMode(allow_non_fake_inputs=True), set[str]()
        self.contrasts: dict[str, tuple[_Side, _Side]] = {}
        self.captions = 1.0  # of an image
        with self.mode, _default_dtype(torch.float64 if precision == "fp64" else torch.float32):
            self.learner = learner_of(config, method, "cpu")
        self.learner.done = 0.5  # where losses that have a window are computed
        model = self.learner.model
        for trunk in trunks(model):  # frozen by default
            trunk.requires_grad_(False)
        self.weights = {storage_of(x) for x in (*self.learner.parameters(), *self.learner.buffers())}
        for name, tower in (("image tower", model.image_tower), ("text tower", model.text_tower)):
            self._name(tower, lambda part, name=name: f"{name} ({part})" if part else name)
            if isinstance(below := getattr(tower, "trunk", None), nn.Module):
                self._name(below, lambda _, name=name: f"{name}{TRUNK}")
        for name, part in (*model.more.items(), *self.learner.terms.items(), *self.learner.contrasts.items()):
            self._name(part, lambda _, name=name: name.replace("_", " "))
        for block in recomputed_blocks(model):
            block.forward = partial(self._run_block, block, block.forward)

    def _name(self, module: nn.Module, name: Any) -> None:
        """Attribute what a module runs to a part. Args: name: makes the part's name from that around it."""

        def enter(*_: Any) -> None:
            parts = self.tracer.parts
            parts.append(name(parts[-1] if parts else ""))

        def leave(*_: Any) -> None:
            self.tracer.parts.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def _run_block(self, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self.tracer.run_block(block, forward, *args, **kwargs)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor without content."""
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    @contextmanager
    def _traced(self) -> Iterator[Tracer]:
        self.tracer = Tracer(self.weights)
        with simulated(self.device), self.mode, self.tracer as tracer, saved_tensors_hooks(tracer.pack, tracer.unpack):
            yield tracer

    def micro_batch(self, batch: Batch) -> tuple[MicroBatch, Features, Features]:
        """Measure a micro-batch; its images and precomputed features need no content.

        Returns: what it takes, and the features of one image and one text as the pair loss takes them.
        """
        model = self.learner.model
        with self._traced() as tracer:
            tracer.count.forward.update(dict.fromkeys(("image tower", "text tower", HEAD), 0))  # listed in this order
            with precision_of(self.precision, "cpu")():
                batch = self.learner.above_trunks(batch)
                encoded = self.learner.encode(batch)
                inputs = MainContrast(model, self.method).inputs(model, batch, encoded)
                images, texts = inputs.rows, {**inputs.columns, **inputs.constants}
                contrasts = self._contrast_features(batch, encoded)
                self.captions = len(batch.texts) / len(batch)
                encoding, blocks = Counter(tracer.count.forward), len(tracer.calls)
                losses = self._terms(batch, encoded)
                del encoded
            sides = [*((images, texts) if self.method.pair_weight else ()), *(s for pair in contrasts for s in pair)]
            features = [x for side in sides for x in side.values() if x.requires_grad]
            image, text = _rows(images, 1), _rows(texts, 1)
            roots = [*losses, *features]
            del inputs, images, texts, contrasts, sides, losses, features
            measured = self._measured(tracer, encoding, blocks)
            torch.autograd.backward(roots, [torch.empty_like(x) for x in roots])
        return measured, image, text

    def _contrast_features(self, batch: Batch, encoded: Encoded) -> list[tuple[Features, Features]]:
        """Rows and columns of every contrast. Keeps one of each, and their numbers for each image."""
        made = []
        for name in self.method.contrasts:
            contrast: Any = self.learner.contrasts[name]
            rows, columns = contrast.features(self.learner.model, batch, encoded)
            made.append((rows, columns))
            placed = [{**side, "position": torch.zeros(len(side["vec"]), dtype=torch.int64)} for side in made[-1]]
            shares = [len(side["vec"]) / len(batch) for side in placed]
            self.contrasts[name] = _Side(_rows(placed[0], 1), shares[0]), _Side(_rows(placed[1], 1), shares[1])
        return made

    def _terms(self, batch: Batch, encoded: Encoded) -> list[Tensor]:
        """Sums of all terms; those that need values are noted."""
        losses = []
        for name, term in self.learner.terms.items():
            try:
                losses.append(term(self.learner.model, batch, encoded))
            except NEEDS_VALUES:
                self.uncounted.add(name)
        return [x for x in losses if x.requires_grad]

    def _measured(self, tracer: Tracer, encoding: Counter[str], blocks: int) -> MicroBatch:
        """What was counted when the forward pass ended; FLOP of the backward pass are added to it later."""
        calls = [(block, call) for block, call in tracer.calls if call.saves]
        largest = max((call for _, call in calls), key=lambda call: call.all, default=None)
        whole = float(sum(tracer.waiting("outside", "argument").values()))
        saved = {
            "none": sum(tracer.waiting("outside", "inside").values()) + sum(call.beside for _, call in calls),
            "whole": whole,
            "selective": whole + sum(call.selective for _, call in calls),
        }
        layers = [part for part in self.learner.model.modules() if isinstance(part, Layer) and part.cross is not None]
        keys: dict[nn.Module, int] = {
            layer.own: matrices(layer) for layer in layers
        }  # gathered apart from the pass, to make keys
        numbers = [(matrices(block) + keys.get(block, 0), n < blocks) for n, (block, _) in enumerate(tracer.calls)]
        return MicroBatch(
            tracer.count.forward,
            tracer.count.backward,
            tracer.count.single,
            encoding,
            Counter(saved),
            Counter({"outside": tracer.half_copies(), "inside": sum({b: c.half for b, c in calls}.values())}),
            Counter({"none": largest.all, "selective": largest.selective} if largest else {}),
            Counter({"encoding": sum(n for n, first in numbers if first), "all": sum(n for n, _ in numbers)}),
            sum(call.recomputed for _, call in calls),
            float(tracer.peak - tracer.alive),
            tracer.count.scratch,
        )

    def inference(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """FLOP of zero-shot classification of one image, in all and those in full precision.

        Args: batch: one image, and a prompt for each class.
        Returns: "image" and "texts", encoded; "scores" of the image with all classes.
        """
        model, counted, before = self.learner.model, dict[str, tuple[float, float]](), (0.0, 0.0)
        with self._traced() as tracer, torch.no_grad(), precision_of(self.precision, "cpu")():

            def count(name: str) -> None:
                nonlocal before
                now = float(tracer.count.forward.total()), float(tracer.count.single.total())
                counted[name], before = (now[0] - before[0], now[1] - before[1]), now

            images = model.encode_image(batch.images)[1]
            count("image")
            texts = model.encode_text(batch.texts)[1]
            count("texts")
            model.head.score(images, texts)
            count("scores")
        return counted

    def pair_loss(self, images: Features, texts: Features, n_images: int, n_texts: int, chunk: int = 0) -> PairLoss:
        """Measure the pair loss of local images with the texts of all ranks.

        Args: images, texts: features of one row each, as `micro_batch` returns them.
        """
        image, text = RowBytes.of(images), RowBytes.of(texts)
        with self._traced() as tracer:
            tracer.parts.append(PAIRS)
            reduced = collectives.reduced = list[int]()
            try:
                if self.method.pair_weight:
                    main: Any = self.learner.contrasts[PAIR]
                    main.loss(self._pairs(main.head, _rows(images, n_images), _rows(texts, n_texts), chunk))
                for name, (row, column) in self.contrasts.items():
                    of_batch = round(column.an_image * n_texts / self.captions)
                    contrast: Any = self.learner.contrasts[name]
                    rows = _rows(row.features, round(row.an_image * n_images))
                    contrast.loss(self._pairs(contrast.head, rows, _rows(column.features, of_batch), chunk))
                    text = text.plus(RowBytes.of(column.features), of_batch / n_texts)
            except NEEDS_VALUES:
                self.uncounted.add(PAIRS)
            finally:
                collectives.reduced = None
            if not (self.method.pair_weight or self.contrasts):
                return PairLoss(image, text)
            columns = sum(n for n in reduced if n >= n_texts) / n_texts
            count = tracer.count
            return PairLoss(image, text, count.forward[PAIRS], count.backward[PAIRS], tracer.block, columns)

    def _pairs(self, head: Head, rows: Features, columns: Features, chunk: int) -> _OfEachShape:
        pairs = _OfEachShape(head, rows, columns, chunk)
        pairs.tracer = self.tracer
        return pairs


class _OfEachShape(Blocks):
    """All pairs, of which one block of each shape is visited and counted for all of that shape."""

    tracer: Tracer

    def beside(self, name: str) -> _OfEachShape:
        inner = _OfEachShape(self.head.beside(name), self.images, self.texts, self.chunk)
        inner.tracer = self.tracer
        return inner

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        tracer, count = self.tracer, self.tracer.count
        first: dict[tuple[int, int], tuple[slice, slice]] = {}
        numbers: Counter[tuple[int, int]] = Counter()
        for rows, columns in super().blocks():
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            first.setdefault(shape, (rows, columns))
            numbers[shape] += 1
        for shape, n in numbers.items():
            alive, forward, backward = tracer.alive, count.forward[PAIRS], count.backward[PAIRS]
            tracer.peak = alive
            yield first[shape]
            tracer.block = max(tracer.block, tracer.peak - alive)
            count.forward[PAIRS] += (n - 1) * (count.forward[PAIRS] - forward)
            count.backward[PAIRS] += (n - 1) * (count.backward[PAIRS] - backward)


def _rows(features: Features, n: int) -> Features:
    """Features of n rows like these; zeros, as those that are not floating-point are real, and may be indices."""
    made = {name: torch.zeros(n, *x.shape[1:], dtype=x.dtype) for name, x in features.items()}
    return {name: x.requires_grad_(learns(name, x)) for name, x in made.items()}


def matrices(module: nn.Module) -> int:
    """Number of elements of a module's parameters but for vectors: of what FSDP shards."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)
