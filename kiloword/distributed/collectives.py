"""This rank, the number of ranks, and collectives over them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kiloword.distributed import launch


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


FIRST_S = 2.0  # seconds in which torchrun finds the rank that failed first, and reports that one
_patient: dist.ProcessGroup | None = None  # of all ranks, for what takes one of them longer than the timeout


@contextmanager
def process_group(device: str = "cpu", timeout_s: int = 600) -> Iterator[None]:
    """Join the process group that torchrun announces in the environment; with a single process, do nothing.

    It ends with a barrier: gloo processes that exit while a peer still communicates abort in half of the runs.
    Raises: ValueError when another rank ended, or did not answer for `timeout_s`.
    """
    global _patient
    if dist.is_initialized() or launch.adopt() == 1:
        yield
        return
    cuda = device.startswith("cuda")
    clean = not cuda  # NCCL may wait for ranks that are gone
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        # collectives on CPU tensors use gloo, and do not wait for the device
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s))
        _patient = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        yield
        dist.barrier()
        clean = True
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            time.sleep(FIRST_S)
        why = re.sub(r"^\[.*?\] |\. This is.*|\.$", "", str(e).partition("\n")[0])  # without gloo's place and advice
        raise ValueError(
            f"another rank has ended, or gave no answer for {timeout_s} s ({why}). The rank that failed says more."
        ) from e
    finally:
        if clean and dist.is_initialized():
            dist.destroy_process_group()
        _patient = None


def sum_over_ranks(x: Tensor, by: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum over ranks, without gradient. Args: by: another reduction."""
    if ranks() == 1:
        return x.detach()
    x = x.detach().clone()
    dist.all_reduce(x, by)
    return x


def sharded(x: Tensor) -> bool:
    """Whether x is a DTensor, without importing DTensor, which takes most of a second."""
    return hasattr(x, "full_tensor")


def local(x: Tensor) -> Tensor:
    """The local tensor: this rank's rows of a sharded tensor, or the whole tensor."""
    return x.to_local() if sharded(x) else x  # type: ignore[attr-defined]


def whole(x: Tensor) -> Tensor:
    """The whole tensor, with every rank's rows. A collective for sharded tensors."""
    return x.full_tensor() if sharded(x) else x  # type: ignore[attr-defined]


@torch.no_grad()
def fill(x: Tensor, values: Tensor) -> None:
    """Copy values of the whole tensor into this rank's local tensor: its rows as FSDP shards them, or all."""
    if sharded(x):
        parts = values.chunk(ranks())  # fewer chunks than ranks where there are few rows
        values = parts[rank()] if rank() < len(parts) else values[:0]
    local(x).copy_(values)


def extreme_over_ranks(x: Tensor, which: Literal["most", "least"]) -> Tensor:
    """The elementwise maximum or minimum over ranks, without gradient."""
    return sum_over_ranks(x, dist.ReduceOp.MAX if which == "most" else dist.ReduceOp.MIN)


def any_rank(*mine: bool) -> tuple[bool, ...]:
    """Whether each of these is true on any rank. A collective."""
    if ranks() == 1:
        return mine
    return tuple(bool(n) for n in sum_over_ranks(torch.tensor([float(m) for m in mine])).tolist())


def add_up(mine: int) -> int:
    """The sum of an integer over ranks."""
    return mine if ranks() == 1 else int(sum_over_ranks(torch.tensor(mine)))


def wait(patient: bool = False) -> None:
    """Wait until every rank is here. Args: patient: without timeout."""
    if ranks() > 1:
        dist.barrier(_patient if patient else None)


Item = TypeVar("Item")


def all_lists(mine: list[Item]) -> list[Item]:
    """Every rank's items in rank order; a single small collective where no rank has any."""
    return [item for items in objects(mine) for item in items] if any_rank(bool(mine))[0] else mine


def objects(mine: Item) -> list[Item]:
    """Every rank's object, in rank order; tensors must be on the CPU."""
    out: list[Any] = [mine] * ranks()
    if ranks() > 1:
        dist.all_gather_object(out, mine)
    return out
