"""Ranks: who they are, and what they say to each other. Methods never import this file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kiloword.distributed import heartbeat, launch


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def process_group(device: str = "cpu", timeout_s: int = 600) -> Iterator[None]:
    """Join the group that torchrun announces in the environment; with a single process, do nothing.

    Leaves through a barrier: gloo processes that exit while a peer still talks abort in half of the runs.
    Raises: RanksEnded when another rank ended, or gave no answer for `timeout_s`.
    """
    if dist.is_initialized() or launch.adopt() == 1:
        yield
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with heartbeat.met(timeout_s) as met:
        assert met is not None
        met.gather(timeout_s)
        met.abrupt = cuda
        patience = timedelta(seconds=timeout_s + (60 if cuda else 0))  # NCCL aborts the process: `met` comes first
        # what the hosts decide is said on the hosts: the devices need not be waited for
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=met.group_store, rank=met.rank, world_size=met.ranks, timeout=patience)
        try:
            yield
            dist.barrier()
        except Exception as e:  # told before the connections close
            raise met.ended(e) from e
        finally:
            dist.destroy_process_group()


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum over ranks, without gradient."""
    if ranks() == 1:
        return x.detach()
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def sharded(x: Tensor) -> bool:
    """Whether it is a DTensor, whose module takes most of a second to import: who only uses a model does without."""
    return hasattr(x, "full_tensor")


def local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor: its rows of a sharded one, or all."""
    return x.to_local() if sharded(x) else x  # type: ignore[attr-defined]


def whole(x: Tensor) -> Tensor:
    """A tensor with every rank's rows; all ranks must ask."""
    return x.full_tensor() if sharded(x) else x  # type: ignore[attr-defined]


@torch.no_grad()
def fill(x: Tensor, values: Tensor) -> None:
    """Copy whole values into what this rank holds of a tensor: its rows of a sharded one, as FSDP cuts them."""
    if sharded(x):
        parts = values.chunk(ranks())  # fewer than ranks where rows are few
        values = parts[rank()] if rank() < len(parts) else values[:0]
    local(x).copy_(values)


def extreme_over_ranks(x: Tensor, which: Literal["most", "least"]) -> Tensor:
    """The largest or smallest of each number over ranks, without gradient."""
    if ranks() == 1:
        return x.detach()
    x = x.detach().clone()
    dist.all_reduce(x, dist.ReduceOp.MAX if which == "most" else dist.ReduceOp.MIN)
    return x


def any_rank(*mine: bool) -> tuple[bool, ...]:
    """Which of these is true on any rank; all ranks must ask at the same place."""
    if ranks() == 1:
        return mine
    return tuple(bool(n) for n in sum_over_ranks(torch.tensor([float(m) for m in mine])).tolist())


def add_up(mine: int) -> int:
    """The sum of a number over ranks."""
    if ranks() == 1:
        return mine
    return int(sum_over_ranks(torch.tensor(mine)))


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
