"""Rows of all ranks on every rank, and gradients back to those they came from, against concatenation and sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.distributed.gather import gather_features
from threads import over_threads

KINDS = {"vec": (5,), "log_var": (), "tokens": (2, 3)}


def features(rank: int, rows: int) -> dict[str, Tensor]:
    """A rank's own: some learn, in two dtypes; others are integers, flags and rows of an odd number of bytes."""
    draw = torch.Generator().manual_seed(rank)
    found = {name: torch.randn(rows, *shape, generator=draw).double() for name, shape in KINDS.items()}
    found["tokens"] = found["tokens"].float()
    found = {name: value.requires_grad_() for name, value in found.items()}
    found |= {"position": 10 * rank + torch.arange(rows), "mineable": torch.arange(rows) % 2 == rank % 2}
    return {**found, "side": torch.full((rows, 3), rank, dtype=torch.int8)}


def weight(rank: int, like: Tensor) -> Tensor:
    """What a rank's loss makes of a gathered tensor; no two ranks or places alike."""
    return (rank + 1) * torch.arange(1, like.numel() + 1, dtype=like.dtype).view_as(like)


def gathered(counts: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On this rank: what arrives, and the gradients of its own rows when every rank has a loss; "log_var" has none."""
    mine = features(collectives.rank(), counts[collectives.rank()])
    out = gather_features(mine)
    loss = sum((out[name] * weight(collectives.rank(), out[name])).sum().double() for name in ("vec", "tokens"))
    assert isinstance(loss, Tensor)
    loss.backward()
    return out, {name: value.grad for name, value in mine.items() if value.grad is not None}


@pytest.mark.parametrize("counts", [[2, 2, 2], [3, 0, 1]])
def test_rows_arrive_in_rank_order_and_gradients_are_sums_over_ranks(counts: list[int]) -> None:
    ranks = over_threads(3, lambda: gathered(counts))
    own = [features(rank, rows) for rank, rows in enumerate(counts)]
    for name in own[0]:
        whole = torch.cat([some[name] for some in own])
        assert all(torch.equal(out[name], whole) and out[name].dtype == whole.dtype for out, _ in ranks), name
    for name in ("vec", "tokens"):
        whole = torch.cat([some[name] for some in own])
        expected = torch.stack([weight(rank, whole) for rank in range(3)]).sum(0).split(counts)
        assert all(torch.equal(ranks[rank][1][name], expected[rank]) for rank in range(3)), name
    assert all(not gradients["log_var"].any() for _, gradients in ranks if "log_var" in gradients)
