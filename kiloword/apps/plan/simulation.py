"""A learner's own step on tensors without content (FakeTensorMode): its FLOP, by torch's formulas, and its bytes.

Every method is counted, a user's own included; nothing here knows what a method does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kiloword.config.options import Checkpointing
from kiloword.config.recipes import ModelConfig, OptimConfig
from kiloword.distributed.device import precision_of, simulated
from kiloword.losses.pairs import Blocks, learns
from kiloword.methods.method import Method
from kiloword.model.trunks.trunk import trunks
from kiloword.training.engine import recompute, recomputed_blocks
from kiloword.training.optimizer import Optimizer
from kiloword.training.step import learner_of
from kiloword.types import Batch, Features

ATEN, PACKED = torch.ops.aten, torch.ops.torch_attn


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *_: Any, **__: Any) -> float:
    """FLOP of attention of packed sequences, which torch 2.11 does not count, and others one by one."""
    return 4.0 * prod(q.shape[1:]) * int((starts_q.diff().double() * starts_k.diff()).sum())


def packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, **_: Any
) -> float:
    """FLOP of its backward pass: five products for two."""
    return 2.5 * packed_attention(q, k, v, *more)


FLASH = ATEN._scaled_dot_product_flash_attention, ATEN._scaled_dot_product_flash_attention_backward
FORMULAS = {  # of operations that torch's counter does not know: in place, attention on a CPU, packed
    ATEN.addmm_: flop_registry[ATEN.addmm],
    ATEN.baddbmm_: flop_registry[ATEN.baddbmm],
    ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[FLASH[0]],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[FLASH[1]],
    PACKED._varlen_attn: packed_attention,
    PACKED._varlen_attn_backward: packed_backward,
}


class Count(TorchDispatchMode):
    """Operations on fake tensors: their FLOP, and bytes of what they make, now (`alive`) and at most (`peak`).

    Operations on index tensors compute, as results may depend on their values.
    Args: weights: tensors whose bytes do not count, nor those of their views.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._flop = 0.0
        self._storages = {x.untyped_storage()._cdata for x in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func._overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        dtype = kwargs.get("dtype", torch.int64 if packet in (ATEN.arange, ATEN.scalar_tensor) else torch.float32)
        real = not dtype.is_floating_point if not tensors else not any(isinstance(x, FakeTensor) for x in tensors)
        if real:
            with _disable_current_modes():
                return func(*args, **kwargs)
        if packet is ATEN.index:  # the size of a boolean selection depends on values
            args = (args[0], [place for x in args[1] for place in _places(x)])
        out = func(*args, **kwargs)
        if formula := FORMULAS.get(packet, flop_registry.get(packet)):
            with _disable_current_modes():  # it reads the lengths of packed texts
                self._flop += formula(*args, **kwargs, out_val=out)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (place := x.untyped_storage()._cdata) not in self._storages:
                size = x.untyped_storage().nbytes()
                self._storages.add(place)
                self.alive += size
                self.peak = max(self.peak, self.alive)
                weakref.finalize(x.untyped_storage(), self._freed, place, size)
        return out

    def flop(self) -> float:
        """FLOP since the last call."""
        flop, self._flop = self._flop, 0.0
        return flop

    def _freed(self, place: int, size: int) -> None:
        self._storages.discard(place)
        self.alive -= size


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return (index,)
    return index.nonzero().unbind(1)


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch takes on one GPU, without its pair losses."""

    flop: dict[str, float]  # "towers", each term, "backward"
    activations: float  # bytes that wait for the backward pass
    temporary: float  # bytes beside them, at the fullest moment of both passes
    sides: dict[str, list[tuple[Features, float]]]  # one row and column of every pair loss, and their numbers an image


class Simulation:
    """A learner without content, and an optimizer of its weights.

    Args: device: "cpu" or "cuda", whose kernels and sizes of blocks are simulated; precision: of the run.
    Attributes: states: bytes of the optimizer's; update: FLOP of its step.
    """

    def __init__(self, config: ModelConfig, method: Method, optim: OptimConfig, device: str, precision: str) -> None:
        self.device, self.precision = device, precision_of(precision, "cpu")
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.learner = learner_of(config, method, "cpu")
        self.learner.done = 0.5  # where losses that have a window are computed
        for trunk in trunks(self.learner.model):  # frozen by default
            trunk.requires_grad_(False)
        trained = [p for p in self.learner.parameters() if p.requires_grad]
        with self.counted() as count:
            optimizer = Optimizer(self.learner, optim, 2)
            for p in trained:
                p.grad = torch.empty_like(p)
            optimizer.step(0)
            self.states, self.update = sum(x.nbytes for x in optimizer.state_dict().values()), count.flop()
        for p in trained:  # gradients are counted apart
            p.grad = None
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor without content."""
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    @contextmanager
    def counted(self) -> Iterator[Count]:
        """Count what runs inside. Raises: ValueError for a loss that reads values, which fake tensors do not have."""
        count = Count((*self.learner.parameters(), *self.learner.buffers()))
        try:
            with simulated(self.device), self.mode, count:
                yield count
        except (DataDependentOutputException, DynamicOutputShapeException) as e:
            raise ValueError(f"a loss of {self.learner.method.name} reads values, so it cannot be planned.") from e

    def micro_batch(self, batch: Batch, kind: Checkpointing) -> MicroBatch:
        """Count a micro-batch forward and backward; its images and precomputed features need no content."""
        learner, flop, roots, sides = self.learner, dict[str, float](), list[Tensor](), {}
        for block in recomputed_blocks(learner.model):
            vars(block).pop("forward", None)  # of another kind
        recompute(learner.model, kind)
        with self.counted() as count:
            with self.precision():
                batch = learner.above_trunks(batch)
                encoded = learner.encode(batch)
                inputs = learner.inputs(batch, encoded)
                flop["towers"] = count.flop()
                for name, term in learner.terms.items():
                    roots.append(term(learner.model, batch, encoded))
                    flop[name.replace("_", " ")] = count.flop()
            for name, pair in inputs.items():
                both = pair.rows, {**pair.columns, **pair.constants}
                sides[name] = [(like(side, 1), len(side["vec"]) / len(batch)) for side in both]
                roots += [x for side in both for x in side.values()]
                del pair, both
            roots = list({id(x): x for x in roots if x.requires_grad}.values())
            del encoded, inputs
            activations = count.alive
            torch.autograd.backward(roots, [torch.empty_like(x) for x in roots])
            flop["backward"] = count.flop()
        return MicroBatch(flop, activations, count.peak - activations, sides)

    def pair_losses(self, micro: MicroBatch, images: int, all_images: int) -> tuple[float, float]:
        """FLOP and bytes of the pair losses of one GPU's images with the texts of all.

        Bytes: of features, the sums of their gradients, these scaled by the gradient of the loss, and one block.
        """
        flop = 0.0
        with self.counted() as count:
            for name, ((row, rows), (column, columns)) in micro.sides.items():
                contrast: Any = self.learner.contrasts[name]
                made = like(row, round(rows * images)), like(column, round(columns * all_images))
                pairs = FirstBlock(contrast.head, *made, 0)
                contrast.loss(pairs).sum.backward()
                flop += count.flop() * prod(pairs.shape) / prod(map(min, pairs.shape, pairs.step))
        return flop, count.peak


class FirstBlock(Blocks):
    """All pairs, of which only the first block is visited: others take as much."""

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        return islice(super().blocks(), 1)

    def beside(self, name: str) -> FirstBlock:
        return FirstBlock(self.head.beside(name), self.images, self.texts, self.chunk)


def like(features: Features, n: int) -> Features:
    """Features of n rows like these; zeros, as those that are not floating-point are real, and may be indices."""
    made = {name: torch.zeros(n, *x.shape[1:], dtype=x.dtype) for name, x in features.items()}
    return {name: x.requires_grad_(learns(name, x)) for name, x in made.items()}
