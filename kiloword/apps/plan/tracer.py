"""Count what runs on tensors without content: FLOP, saved activations, allocated bytes."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from kiloword.model.attention import WIDEST_HEAD
from kiloword.training.compilation import is_expensive

HEAD = "head"  # what runs outside of the towers and terms
SCRATCH = 128  # rows of a block of the backward pass of attention
IN_PLACE = {  # which torch's counter does not know
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.aten.baddbmm_: flop_registry[torch.ops.aten.baddbmm],
}
FORMULAS = {**flop_registry, **IN_PLACE}


@dataclass(eq=False)
class Saved:
    """A tensor that waits for the backward pass.

    place: "outside" of blocks; "inside": an argument of a block, saved by its operations; "argument": any of them, as
    activation checkpointing saves them.
    """

    x: Tensor
    part: str
    place: str


@dataclass
class Count:
    """What was counted."""

    forward: Counter[str] = field(default_factory=Counter)  # FLOP by part
    backward: Counter[str] = field(default_factory=Counter)
    single: Counter[str] = field(default_factory=Counter)  # of both, products in full precision
    saved: weakref.WeakSet[Saved] = field(default_factory=weakref.WeakSet)
    expensive: float = 0.0  # bytes of the results that selective checkpointing saves
    before_last: float = 0.0  # FLOP before the last tensor was saved: recomputing stops there
    scratch: float = 0.0  # bytes, the largest of any attention


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, measured alone."""

    shape: torch.Size  # of its output
    dtype: torch.dtype
    saves: tuple[int, ...]  # places of the tensors among its arguments that its operations save
    beside: float  # bytes that they save beside those
    all: float  # bytes that they save
    selective: float  # bytes of results that selective checkpointing saves
    recomputed: float  # FLOP that checkpointing "whole" repeats
    half: float  # bytes of weights in half precision that it saves
    count: Count


class Tracer(TorchDispatchMode):
    """Counts what runs inside, of a learner on fake tensors whose index tensors are real.

    Args: weights: storages of parameters and buffers, which do not count.
    """

    def __init__(self, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.count = weights, Count()
        self.parts: list[str] = []  # names of what runs, innermost last
        self.alive = self.peak = 0  # bytes allocated, now and at most
        self.block = 0  # bytes, the most of a block of pairs
        self.calls: list[tuple[nn.Module, BlockCall]] = []  # of blocks
        self._replayed: str | None = None  # part of the operation whose backward pass runs
        self._half: dict[int, int] = {}  # bytes of the weights that autocast converted, by storage
        self._storages: set[int] = set()
        self._blocks: dict[Any, BlockCall] = {}
        self._others: list[Any] = []  # keeps arguments whose ids are in `_blocks`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if _is_real(func, tensors, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "index":
            args = (args[0], _indices(args[1]))
        out = func(*args, **kwargs)
        made = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        for x in made:
            self._allocated(x)
        if "attention" in name or "attn" in name:
            self._attention(name, args, made[0])
        elif func._overloadpacket in FORMULAS:
            self._multiplied(FORMULAS[func._overloadpacket](*args, **kwargs, out_val=out), made[0].dtype)
        if is_expensive(func):
            self.count.expensive += sum(x.nbytes for x in made)
        if name == "_to_copy" and made[0].dtype.itemsize == 2 and storage_of(tensors[0]) in self.weights:
            self._half[storage_of(made[0])] = made[0].nbytes
        return out

    def _multiplied(self, flop: int, dtype: torch.dtype) -> None:
        if torch._C._current_graph_task_id() == -1:
            part, flops = self.part, self.count.forward
        else:
            part, flops = self._replayed or self.part, self.count.backward
        flops[part] += flop
        if dtype.itemsize > 2:
            self.count.single[part] += flop

    @property
    def part(self) -> str:
        return self.parts[-1] if self.parts else HEAD

    def _attention(self, name: str, args: Any, out: Tensor) -> None:
        """Two products of every query with every key, hidden keys too; backward four, as of plain products."""
        backward = "backward" in name
        q, k = args[backward : backward + 2]
        heads, width = q.shape[1], q.shape[-1]
        if "varlen" in name:  # [S, H, d]; the starts of both sequences
            starts, starts_k = args[6:8] if backward else args[3:5]
            with _disable_current_modes():  # starts are real
                pairs = int((starts.diff().long() * starts_k.diff()).sum())
            rows = len(q) + SCRATCH * (len(starts) - 1)
        else:  # [N, H, L, d]
            pairs = len(q) * q.shape[2] * k.shape[2]
            rows = len(q) * math.ceil(q.shape[2] / SCRATCH) * SCRATCH
        self._multiplied((8 if backward else 4) * pairs * heads * width, out.dtype)
        if q.dtype.itemsize == 2:
            self.count.scratch = max(self.count.scratch, attention_scratch(rows, heads, width))

    def _allocated(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        if place not in self._storages:
            self._storages.add(place)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, place, size)

    def _freed(self, place: int, size: int) -> None:
        self._half.pop(place, None)  # another tensor may get this storage
        if place in self._storages:  # not of a block that was measured apart
            self._storages.remove(place)
            self.alive -= size

    def pack(self, x: Tensor, place: str = "outside") -> Saved:
        """Hook of autograd: save a tensor for the backward pass."""
        self.count.before_last = self.count.forward.total()
        # detached, as a result that its graph holds would keep that graph for ever
        saved = Saved(x if storage_of(x) in self.weights else x.detach(), self.part, place)
        self.count.saved.add(saved)
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Hook of autograd: the backward pass of an operation begins."""
        self._replayed = saved.part
        return saved.x

    def waiting(self, *places: str) -> dict[int, int]:
        """Bytes of the activations that wait for the backward pass, by storage."""
        storages = [saved.x.untyped_storage() for saved in self.count.saved if saved.place in places]
        ignored = self.weights | set(self._half)
        return {x._cdata: x.nbytes() for x in storages if x._cdata not in ignored}

    def half_copies(self) -> float:
        """Bytes of weights in half precision that wait for the backward pass."""
        waiting = {storage_of(s.x) for s in self.count.saved}
        return float(sum(n for place, n in self._half.items() if place in waiting))

    def run_block(self, block: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Stand in for a block's forward pass, which is measured once for each kind of block and arguments."""
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        others = [x for x in leaves if not isinstance(x, Tensor)]
        shapes = [(x.shape, x.dtype) for x in (*tensors, *block.parameters())]
        key = (type(block), tuple(shapes), tuple(map(id, others)), torch.is_grad_enabled())
        if key not in self._blocks:
            self._others += others
            self._blocks[key] = self._measured(block, forward, args, kwargs, tensors)
        call = self._blocks[key]
        self.calls.append((block, call))
        self.count.forward[self.part] += call.count.forward.total()
        self.count.single[self.part] += call.count.single.total()
        self.count.scratch = max(self.count.scratch, call.count.scratch)
        self.alive += int(call.beside + call.half)
        out: Tensor = _Repeated.apply(self, call, *tensors)  # type: ignore[no-untyped-call]
        return out

    def _measured(
        self, block: nn.Module, forward: Callable[..., Tensor], args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> BlockCall:
        """Run a block forward and backward on leaves of its arguments; what runs around it does not see that."""
        outer, self.count = (self.count, self.alive, self.peak, self._storages), Count()
        self._storages = set()
        leaves = {id(x): x.detach().requires_grad_(x.requires_grad) for x in tensors}
        args, kwargs = tree_map_only(Tensor, lambda x: leaves[id(x)], (args, kwargs))
        out = forward(*args, **kwargs)
        count, saved, arguments = self.count, self.waiting("outside"), [storage_of(x) for x in tensors]
        saves = tuple(n for n, storage in enumerate(arguments) if storage in saved)
        beside = float(sum(size for storage, size in saved.items() if storage not in arguments))
        call = BlockCall(
            out.shape,
            out.dtype,
            saves,
            beside,
            float(sum(saved.values())),
            count.expensive,
            count.before_last,
            self.half_copies(),
            count,
        )
        if out.requires_grad:
            learning = [x for x in (*leaves.values(), *block.parameters()) if x.requires_grad]
            torch.autograd.grad(out, learning, torch.empty_like(out), allow_unused=True)
        self.count, self.alive, self.peak, self._storages = outer
        return call


class _Repeated(torch.autograd.Function):
    """A block that was measured before: outputs and gradients of its shapes."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, call: BlockCall, *tensors: Tensor) -> Tensor:
        ctx.tracer, ctx.call, ctx.part = tracer, call, tracer.part
        ctx.gradients = [(x.shape, x.dtype) if x.requires_grad else None for x in tensors]
        if any(ctx.gradients):
            saved = [("inside", tensors[n]) for n in call.saves]
            saved += [("argument", x) for x in tensors if isinstance(x, FakeTensor)]
            ctx.saved = [tracer.pack(x, place) for place, x in saved]
        return torch.empty(call.shape, dtype=call.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        ctx.tracer.count.backward[ctx.part] += ctx.call.count.backward.total()
        made = (None if g is None else torch.empty(g[0], dtype=g[1]) for g in ctx.gradients)
        return None, None, *made


def attention_scratch(rows: int, heads: int, width: int) -> float:
    """Bytes in which the backward pass of fused attention in half precision sums gradients of queries, in fp32.

    4 R H d, the head width d rounded up to 32 (64 above 128); 0 for heads that no fused kernel takes. Rows R of dense
    queries [N, L]: N L, L rounded up to 128; of S packed ones in T sequences: S + 128 T, as each may take 128 more.
    """
    step = 32 if width <= 128 else 64
    return 0.0 if width > WIDEST_HEAD else 4.0 * rows * heads * math.ceil(width / step) * step


def storage_of(x: Tensor) -> int:
    storage: int = x.untyped_storage()._cdata
    return storage


def _is_real(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation computes on real tensors alone, or makes an index tensor from nothing."""
    if tensors:
        return not any(isinstance(x, FakeTensor) for x in tensors)
    if func._overloadpacket is torch.ops.aten.scalar_tensor:
        return True
    dtype = kwargs.get("dtype", torch.int64 if func._overloadpacket is torch.ops.aten.arange else None)
    return dtype in (torch.int64, torch.int32, torch.bool)


def _indices(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Indices without boolean ones, the size of whose selection only their values tell."""
    out: list[Tensor | None] = []
    for index in indices:
        real = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        out += index.nonzero().unbind(1) if real and index is not None else [index]
    return out
