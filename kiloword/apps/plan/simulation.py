"""Tensors without content (FakeTensorMode): FLOP of operations on them, by torch's formulas, and their bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kiloword.losses.pairs import Blocks, learns
from kiloword.types import Features

ATEN, PACKED = torch.ops.aten, torch.ops.torch_attn


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *_: Any, **__: Any) -> float:
    """FLOP of attention of packed sequences, which torch 2.11 does not count, and others one by one."""
    return 4.0 * prod(q.shape[1:]) * int((starts_q.diff().double() * starts_k.diff()).sum())


FLASH = ATEN._scaled_dot_product_flash_attention, ATEN._scaled_dot_product_flash_attention_backward
FORMULAS = {  # of operations that torch's counter does not know: in place, attention on a CPU, packed
    ATEN.addmm_: flop_registry[ATEN.addmm],
    ATEN.baddbmm_: flop_registry[ATEN.baddbmm],
    ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[FLASH[0]],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[FLASH[1]],
    PACKED._varlen_attn: packed_attention,
    # five products for two; its arguments are the gradient, q, k, v, the output and its log-sum-exp, and those lengths
    PACKED._varlen_attn_backward: lambda *x, **_: 2.5 * packed_attention(*x[1:4], *x[6:]),
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
