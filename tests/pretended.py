"""A training step on a CUDA device that is not there: tensors without content on "cuda", and what ran, by name.

Torch asks the guard of a device for its streams wherever a graph is built; that of "meta", which does nothing, stands
in. The engine of the backward pass would want threads and events of the device as well: `_walk` replaces it.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kiloword.apps.plan.options import Plan
from kiloword.apps.plan.planner import Planner
from kiloword.config.recipes import OptimConfig
from kiloword.distributed.device import precision_of
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.training.optimizer import Average, Optimizer
from kiloword.training.step import backward, learner_of
from kiloword.types import Batch

GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # of libc10: a guard a device type
CUDA, META = 1, 14  # places in it
NO_KERNEL = """view _unsafe_view t transpose permute expand slice select unbind split split_with_sizes unsqueeze squeeze
detach alias as_strided lift_fresh unfold diagonal _reshape_alias empty empty_like new_empty empty_strided narrow lift
new_empty_strided view_as resize_"""  # views, and what gives memory without writing it
NO_META = ("_fused_sgd_",)  # which return nothing, and of which torch knows no shapes
VALUES_ASKED = "nonzero masked_select unique _unique2 unique_dim unique_consecutive equal is_nonzero bincount"


@contextmanager
def pretended() -> Iterator[FakeTensorMode]:
    """Inside, tensors can be made on "cuda", and graphs of them go backward. Skips where torch has no such place."""
    try:
        lib = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
        guards = (ctypes.c_void_p * (META + 1)).in_dll(lib, GUARDS)
    except (StopIteration, OSError, ValueError) as e:
        pytest.skip(f"this torch does not show its device guards: {e}")
    if torch.version.cuda or guards[CUDA]:
        pytest.skip("this torch has CUDA of its own")
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=False) as mode:
        patch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patch.setattr("torch.cuda.is_bf16_supported", lambda: True)
        patch.setattr("torch.autograd._engine_run_backward", _walk)
        patch.setattr("kiloword.losses.pairs._graph_is_kept", lambda: False)
        guards[CUDA] = guards[META]
        try:
            yield mode
        finally:
            guards[CUDA] = None


class Watch(TorchDispatchMode):
    """What runs inside: kernels by name, casts among them, waits for the device, and work on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.casts = 0
        self.waits: Counter[str] = Counter()
        self.on_cpu: Counter[str] = Counter()  # beside the batch as the host keeps it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fake = any(isinstance(x, FakeTensor) for x in tensors) or name == "lift_fresh"
        if tensors and not fake:  # the batch as the host keeps it
            with _disable_current_modes():
                return func(*args, **kwargs)
        kinds = {x.device.type for x in tensors}
        if (why := _wait(func, name, kinds, args, kwargs)) is not None:
            self.waits[f"{why} in {_where()}"] += 1
            if name not in ("_to_copy", "copy_"):
                return _made_up(func, name, args)
        elif kinds == {"cuda", "cpu"}:
            self.on_cpu[f"{name} of both devices in {_where()}"] += 1
        out = func(*args, **kwargs) if name not in NO_META else None
        made = {x.device.type for x in tree_leaves(out) if isinstance(x, Tensor)} if func._schema.returns else kinds
        if made and name not in NO_KERNEL.split():
            if made == {"cpu"}:
                self.on_cpu[f"{name} in {_where()}"] += why is None
            else:
                self.kernels[name] += _launches(name, args)
                self.casts += name == "_to_copy" and kinds == {"cuda"}
        return out


def _launches(name: str, args: Any) -> int:
    """Of one call: one a tensor where lists of tensors differ in shape, which torch's fused kernels do not take."""
    first, *others = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)] or [()]
    alike = all(x.shape == y.shape for other in others for x, y in zip(first, other, strict=True))
    return 1 if alike or not name.startswith("_foreach_") else len(first)


def _wait(func: Any, name: str, kinds: set[str], args: Any, kwargs: Any) -> str | None:
    """Why the host waits for the device, or has it wait for memory that is not pinned; None where it does not."""
    if name in ("_to_copy", "copy_"):
        to, source = (kwargs.get("device"), args[0]) if name == "_to_copy" else (args[0].device, args[1])
        to = source.device if to is None else torch.device(to)
        return None if to.type == source.device.type else f"{source.device.type} to {to.type}"
    if "cuda" not in kinds:
        return None
    if name in ("_local_scalar_dense", *VALUES_ASKED.split()):
        return "item" if name == "_local_scalar_dense" else name
    if name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
        return name
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return "boolean index" if any(i is not None and i.dtype == torch.bool for i in args[1]) else None
    return None


def _made_up(func: Any, name: str, args: Any) -> Any:
    """A result whose size or value only the device would know."""
    x = args[0]
    if name == "_local_scalar_dense":
        return 1.0 if x.is_floating_point() else x.dtype == torch.bool or 20
    if name in ("nonzero", "repeat_interleave"):
        return torch.empty(x.numel() // 2, *([x.dim()] if name == "nonzero" else []), dtype=torch.int64, device="cuda")
    if name == "index":
        return x.new_empty(len(x) // 2, *x.shape[1:])
    if name.endswith("_"):
        return x
    raise NotImplementedError(f"{name}: say in `_made_up` what it returns")


def _where() -> str:
    """The innermost function of the package that is at work: "module.function"."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("kiloword."):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "torch"
    return f"{frame.f_globals['__name__'].removeprefix('kiloword.')}.{frame.f_code.co_name}"


def moved(batch: Batch, mode: FakeTensorMode) -> Batch:
    """A batch on the device, without content; what stays on the host keeps its content."""
    mode.allow_non_fake_inputs = True
    try:
        return batch.to("cuda:0")  # the guard of "meta" knows no current device
    finally:
        mode.allow_non_fake_inputs = False


def placed(module: nn.Module) -> nn.Module:
    """A module of torch's meta device with its parameters and buffers on the device."""
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cuda"), p.requires_grad))
        for name, b in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(b.shape, dtype=b.dtype, device="cuda"))
    return module


def _walk(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    keep: bool,
    create: bool,
    inputs: Sequence[Tensor],
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> tuple[Tensor | None, ...]:
    """Backward through the graph of `outputs`, node by node; arguments are those of torch's engine."""
    wanted = [get_gradient_edge(x) for x in inputs]
    found: dict[tuple[Any, int], Tensor] = {}
    for output, gradient in zip(outputs, gradients, strict=True):
        _add(found, get_gradient_edge(output), torch.ones_like(output) if gradient is None else gradient)
    kept = [None] * len(wanted)
    with torch.no_grad():
        for node in _sorted([get_gradient_edge(x).node for x in outputs], {edge.node for edge in wanted}):
            mine = [found.pop((node, n), None) for n in range(len(node._input_metadata))]
            for n, edge in enumerate(wanted):
                kept[n] = mine[edge.output_nr] if edge.node is node else kept[n]
            if hasattr(node, "variable"):
                if accumulate_grad and not wanted and mine[0] is not None:
                    p = node.variable
                    p.grad = mine[0] if p.grad is None else p.grad.add_(mine[0])
            elif any(g is not None for g in mine):
                _pass(node, mine, found)
    return tuple(kept)


def _sorted(roots: Sequence[Any], targets: set[Any]) -> list[Any]:
    """Nodes of a graph, each after all that lead to it; those alone that lead to `targets`, where there are any."""
    order: list[Any] = []
    state: dict[Any, bool] = {}  # node: leads to a target; not yet there: not seen
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        after = [following for following, _ in node.next_functions if following is not None]
        if done:
            state[node] = not targets or node in targets or any(state[x] for x in after)
            order += [node] if state[node] else []
        elif node not in state:
            state[node] = False
            stack += [(node, True), *((x, False) for x in after if x not in state)]
    return order[::-1]


def _pass(node: Any, mine: list[Tensor | None], found: dict[tuple[Any, int], Tensor]) -> None:
    """One node's gradients by its inputs are added to what was found for those."""
    if isinstance(node, BackwardCFunction):  # of Python: gets zeros for what nothing depends on
        out = node.apply(*(_or_zeros(*pair) for pair in zip(mine, node._input_metadata, strict=True)))
        edges = [edge for edge in node.next_functions if edge[0] is not None]  # of tensors alone
        out = [g for g, needed in zip(out, node.needs_input_grad, strict=False) if needed]  # more may follow
    else:
        out, edges = node(*mine), node.next_functions
    out = out if isinstance(out, tuple | list) else (out,)
    for gradient, (following, number) in zip(out, edges, strict=True):
        if gradient is not None and following is not None:
            _add(found, GradientEdge(following, number), gradient)


def _or_zeros(gradient: Tensor | None, metadata: Any) -> Tensor | None:
    if gradient is not None or metadata.device.type == "cpu":  # the state of a generator, which kernels hand out
        return gradient
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)


def _add(found: dict[tuple[Any, int], Tensor], edge: Any, gradient: Tensor) -> None:
    metadata = edge.node._input_metadata[edge.output_nr]
    assert gradient.device == metadata.device, f"{edge.node.name()} got a gradient on {gradient.device}"
    gradient = gradient.to(metadata.dtype).sum_to_size(metadata.shape)
    place = (edge.node, edge.output_nr)
    found[place] = found[place] + gradient if place in found else gradient


@dataclass(frozen=True)
class Step:
    """What a step was made of, and what it left."""

    watch: Watch
    passes: int  # kernels of the forward and the backward pass, the rest are the optimizer's
    report: dict[str, Tensor]
    missing: list[str]  # parameters that should have got a gradient


def step(
    name: str, precision: str, micro: int, optimizer: str, settings: dict[str, Any], size: str = "debug", steps: int = 1
) -> Step:
    """The last of some steps of a run, of four images with two captions each."""
    method, recipe = preset(name, settings), default_recipe(name, size)
    batch = Planner(Plan(captions=2), replace(recipe, batch=4), method).batch(4)
    batch = batch.each(lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, FakeTensor) else x)
    batches, learner = batch.split(micro), learner_of(recipe.model, method)
    with pretended() as mode:
        parts = [moved(batch, mode) for batch in batches]
        moving = Optimizer(placed(learner), OptimConfig(name=optimizer), 1000)
        average = Average(learner, 0.99)
        for n in range(steps):
            with Watch() as watch:
                report = backward(learner, parts, precision_of(precision, "cuda"))
                missing = [n for n, p in learner.named_parameters() if p.requires_grad and p.grad is None]
                passes = sum(watch.kernels.values())
                report |= moving.step(n, report["loss"])
                learner.model.head.clamp_()
                learner.after_step(n + 1)
                average.update(n)
    return Step(watch, passes, report, missing)
