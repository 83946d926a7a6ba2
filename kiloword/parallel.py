"""Ranks: one gather with gradient, one reduction of gradients. Methods never import this file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kiloword.types import Features


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def process_group(device: str = "cpu", timeout_s: int = 600) -> Iterator[None]:
    """Join the group that torchrun announces in the environment; with a single process, do nothing.

    Leaves through a barrier: gloo processes that exit while a peer still talks abort in half of the runs.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Gather(torch.autograd.Function):
    """Concatenate equal shares over ranks; backward sums what every rank says about this rank's share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = [torch.empty_like(x) for _ in range(ranks())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        if gradient.is_cuda:
            mine = gradient.new_empty(len(gradient) // ranks(), *gradient.shape[1:])
            dist.reduce_scatter_tensor(mine, gradient)
            return mine
        dist.all_reduce(gradient)  # gloo has no reduce-scatter
        return gradient.chunk(ranks())[rank()]


def gather_features(features: Features) -> Features:
    """Every rank's rows, in rank order, with gradient; numbers of rows may differ between ranks.

    Args: features, every value [n, ...] with this rank's n.
    Returns: the same keys, every value [sum of n, ...]. Floating values travel as one buffer, the rest as int64.
    """
    if ranks() == 1:
        return features
    counts = _row_counts(len(next(iter(features.values()))), next(iter(features.values())).device)
    floats = {k: v for k, v in features.items() if v.is_floating_point()}
    others = {k: v for k, v in features.items() if not v.is_floating_point()}
    out: Features = {}
    for group, wire in ((floats, None), (others, torch.int64)):
        if group:
            out |= _gather_group(group, counts, wire)
    return {k: out[k] for k in features}


def _row_counts(n: int, device: torch.device) -> list[int]:
    out = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks())]
    dist.all_gather(out, torch.tensor([n], device=device))
    return [int(c) for c in torch.cat(out).tolist()]


def _gather_group(group: Features, counts: Sequence[int], wire: torch.dtype | None) -> Features:
    """One collective for several tensors: flatten to [n, F], pad to the longest rank, gather, cut, unflatten."""
    flat = torch.cat([v.flatten(1) if v.dim() > 1 else v[:, None] for v in group.values()], 1)  # [n, F]
    flat = flat if wire is None else flat.to(wire)
    most = max(counts)
    if len(flat) < most:
        flat = torch.cat([flat, flat.new_zeros(most - len(flat), flat.shape[1])])
    gathered = _Gather.apply(flat).unflatten(0, (len(counts), most))  # type: ignore[no-untyped-call]
    rows = torch.cat([gathered[r, :n] for r, n in enumerate(counts)])  # [sum of n, F]
    widths = [v[0].numel() if len(v) else v.flatten(1).shape[1] for v in group.values()]
    return {
        k: part.reshape(len(rows), *v.shape[1:]).to(v.dtype)
        for (k, v), part in zip(group.items(), torch.split(rows, widths, 1), strict=True)
    }


def stack_over_ranks(x: Tensor) -> Tensor:
    """[ranks, ...] without gradient; shapes must agree."""
    x = x.detach()
    if ranks() == 1:
        return x[None]
    out = [torch.empty_like(x) for _ in range(ranks())]
    dist.all_gather(out, x.contiguous())
    return torch.stack(out)


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum over ranks, without gradient."""
    if ranks() == 1:
        return x.detach()
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def any_rank(*mine: bool) -> tuple[bool, ...]:
    """Which of these is true on any rank; all ranks must ask at the same place."""
    if ranks() == 1:
        return mine
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return tuple(bool(n) for n in sum_over_ranks(torch.tensor([float(m) for m in mine], device=device)).tolist())


def add_up(mine: int) -> int:
    """The sum of a number over ranks."""
    if ranks() == 1:
        return mine
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return int(sum_over_ranks(torch.tensor(mine, device=device)))


def wait() -> None:
    """Until every rank is here."""
    if ranks() > 1:
        dist.barrier()


Item = TypeVar("Item")


def all_lists(mine: list[Item]) -> list[Item]:
    """Every rank's items in rank order; costs one number where no rank has any."""
    if ranks() == 1 or not any_rank(bool(mine))[0]:
        return mine
    out: list[list[Item]] = [[] for _ in range(ranks())]
    dist.all_gather_object(out, mine)
    return [item for items in out for item in items]


def average_gradients(module: nn.Module, bucket: int = 1 << 24) -> None:
    """Mean of gradients over ranks in a fixed layout, so that a resumed run adds in the same order.

    DDP rebuilds its buckets after the first step, which changes the last bits of a resumed run from 3 ranks on.
    Sharded parameters (FSDP2) are reduced by their wrapper and left alone.
    """
    if ranks() == 1:
        return
    own: list[Tensor] = [p for p in module.parameters() if p.requires_grad and not hasattr(p, "full_tensor")]
    for p in own:
        if p.grad is None:  # unused on this rank, perhaps not on another
            p.grad = torch.zeros_like(p)
    for group in _buckets(own, bucket):
        flat = torch.cat([p.grad.flatten() for p in group if p.grad is not None])
        dist.all_reduce(flat)
        flat /= ranks()
        for p, part in zip(group, torch.split(flat, [p.numel() for p in group]), strict=True):
            assert p.grad is not None
            p.grad.copy_(part.view_as(p))


def _buckets(parameters: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Parameters in order, split where the element count passes `most` or the dtype changes."""
    group: list[Tensor] = []
    for p in parameters:
        if group and (sum(q.numel() for q in group) + p.numel() > most or p.dtype != group[0].dtype):
            yield group
            group = []
        group.append(p)
    if group:
        yield group
