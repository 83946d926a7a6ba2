"""Parallelism of a learner over ranks: replicated (ddp), or with sharded towers (fsdp). Results are the same.

FSDP2 averages the gradients of the parameters that it shards; `Reducer` averages those of replicated parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from kiloword.distributed import collectives
from kiloword.model.adapters import MARK
from kiloword.model.blocks import Unit
from kiloword.model.decoder import Layer
from kiloword.model.model import Model, first_values
from kiloword.training.learner import Learner

BUCKET = 1 << 22  # elements reduced at once: 16 MiB of fp32
ENTRIES = (
    "image_tokens",
    "encode_text",
    "image_trunk",
    "with_tokens",
)  # by which callers enter a model; none calls another


class Reducer:
    """Mean over ranks of the gradients of replicated parameters, in buckets that never change.

    Torch's DDP rebuilds its buckets after the first step, so that a resumed run would add in another order; here the
    order is that of the parameters, last ones first, as the backward pass finishes them. Gradients are views of the
    buckets, so that nothing is copied.

    Args: overlap: reduce a bucket as soon as the backward pass has finished it and those before it.
    """

    def __init__(self, module: nn.Module, overlap: bool = True, bucket: int = BUCKET) -> None:
        replicated = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        self.buckets = list(_buckets(replicated[::-1], bucket)) if collectives.ranks() > 1 else []
        self.flats = [b[0].new_zeros(sum(p.numel() for p in b)) for b in self.buckets]
        self._ready = [0] * len(self.buckets)
        self._works: list[dist.Work | None] = []
        self._last = False
        # a separate group, so that gathers and reductions of the backward pass may interleave in any order
        self._group = dist.new_group() if overlap and self.buckets else None
        for n, members in enumerate(self.buckets):
            for p in members if overlap else ():
                p.register_post_accumulate_grad_hook(partial(self._arrived, n))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Before the first backward pass of a step."""
        for members, flat in zip(self.buckets, self.flats, strict=True):
            flat.zero_()
            parts = torch.split(flat, [p.numel() for p in members])
            for p, part in zip(members, parts, strict=True):
                p.grad = part.view_as(p)

    def last(self) -> None:
        """Before the last backward pass of a step, which may reduce the buckets that it finishes."""
        self._last, self._ready, self._works = True, [0] * len(self.buckets), []

    def finish(self) -> None:
        """After the last backward pass: all gradients are means over ranks when this returns."""
        self._last = False
        while len(self._works) < len(self.buckets):  # buckets with parameters that got no gradient on this rank
            self._send()
        for work, flat in zip(self._works, self.flats, strict=True):
            if work is not None:
                work.wait()
            flat /= collectives.ranks()
        self._works = []

    def _arrived(self, bucket: int, p: Tensor) -> None:
        if not self._last:
            return
        self._ready[bucket] += 1
        # in order, so that every rank reduces the same bucket
        while (n := len(self._works)) < len(self.buckets) and self._ready[n] == len(self.buckets[n]):
            self._send()

    def _send(self) -> None:
        self._works.append(dist.all_reduce(self.flats[len(self._works)], group=self._group, async_op=True))


def _buckets(parameters: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Parameters in order, split where the number of elements exceeds `most` or the dtype changes."""
    group: list[Tensor] = []
    for p in parameters:
        if group and (sum(q.numel() for q in group) + p.numel() > most or p.dtype != group[0].dtype):
            yield group
            group = []
        group.append(p)
    if group:
        yield group


def shard(learner: Learner, half: bool = False) -> None:
    """Shard blocks and towers over all ranks; head, terms, adapters and all vectors (biases, norms) stay replicated.

    The matrices of a block are gathered for its forward and backward pass and freed afterwards; the rest of the towers
    (tables, stems) is gathered once per micro-batch. With one rank nothing is done.

    Args: half: gather blocks in bf16, the dtype of autocast; otherwise bf16 copies would stay on each rank until the
    backward pass. Their gradients are averaged in fp32.
    """
    if collectives.ranks() == 1:
        return
    # features may be views of a tower's tokens; nothing here writes into them
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model = learner.model
    mesh = init_device_mesh(model.mean.device.type, (collectives.ranks(),))
    # activations between blocks keep the dtype of autocast
    bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    small = {p for name, p in model.named_parameters() if p.dim() < 2 or MARK in name}
    replicated = small | set(model.head.parameters())
    for part in units(model):
        fully_shard(part, mesh=mesh, mp_policy=bf16 if half else MixedPrecisionPolicy(), ignored_params=replicated)
        if hasattr(part, "keys"):  # keys of a memory, computed outside a layer's forward pass
            register_fsdp_forward_method(part, "keys")
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=replicated)
    for entry in ENTRIES:
        register_fsdp_forward_method(model, entry)


def units(model: Model) -> list[nn.Module]:
    """The modules that are sharded separately: blocks of the towers, layers of the decoders."""
    towers = [model.image_tower, model.text_tower, *model.more.values()]
    layers = [m for tower in towers for m in tower.modules() if isinstance(m, Layer)]
    inside = {m for layer in layers for m in layer.modules()}
    blocks = [m for t in towers for m in t.modules() if isinstance(m, Unit) and m not in inside]
    return [*blocks, *layers]


def materialise(learner: Learner, seed: int) -> None:
    """Allocate the shards of towers that were built without storage, and give them the initial values of ddp.

    Each rank computes the whole values of one parameter at a time. Towers with storage are left unchanged.

    Raises: ValueError on all ranks, naming a parameter whose initial values differ between ranks.
    """
    model = learner.model
    bare = [name for name, p in model.named_parameters() if p.is_meta]
    model._apply(lambda x: torch.empty_like(x, device=model.mean.device) if x.is_meta else x)  # type: ignore[no-untyped-call]
    parameters, norms = dict(model.named_parameters()), {}
    for name, values in first_values(model, seed, bare):
        collectives.fill(parameters[name], values)
        norms[f"model.{name}"] = _norm(values)
    _compare(norms)


def check_same(module: nn.Module) -> None:
    """Check that all ranks have the same replicated weights; call it before sharding too, to check all of them.

    Raises: ValueError on all ranks, naming a parameter that differs. `materialise` checks those without storage.
    """
    if collectives.ranks() > 1:
        held = {n: p.detach() for n, p in module.named_parameters() if not (isinstance(p, DTensor) or p.is_meta)}
        _compare({name: _norm(p) for name, p in held.items()})


def _norm(x: Tensor) -> float:
    """The norm in fp64, without a whole fp64 copy. A float, as small tensors among large ones fragment memory."""
    return float(torch.stack([part.double().norm() for part in torch.split(x.flatten(), BUCKET)]).norm())


def _compare(norms: dict[str, float]) -> None:
    """Compare the norms of parameters over ranks. Raises: ValueError as `check_same`."""
    if not norms:
        return
    values = torch.tensor(list(norms.values()), dtype=torch.float64).nan_to_num()
    most, least = (collectives.extreme_over_ranks(values, which) for which in ("most", "least"))
    differing = [name for name, other in zip(norms, (most != least).tolist(), strict=True) if other]
    if differing:
        raise ValueError(
            f"{differing[0]} is not the same on all ranks ({len(differing)} of {len(norms)} parameters differ): start "
            "all of them with one version of kiloword and torch, from the same files."
        )


def settle(module: nn.Module) -> None:
    """Reshard parameters that were gathered outside a step; otherwise later changes of the weights would be ignored."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
