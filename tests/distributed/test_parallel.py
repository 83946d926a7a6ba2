"""What ranks say to each other, by threads as ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kiloword.distributed import collectives
from threads import over_threads


def said() -> dict[str, Any]:
    rank = collectives.rank()
    x = torch.tensor([float(rank), 5.0 - rank], requires_grad=True)
    total = collectives.sum_over_ranks(x)
    extremes = {which: collectives.extreme_over_ranks(x, which) for which in ("most", "least")}  # type: ignore[arg-type]
    assert not any(y.requires_grad for y in (total, *extremes.values()))
    assert x.tolist() == [rank, 5.0 - rank]
    collectives.wait()
    return {
        "ranks": collectives.ranks(),
        "sum": total.tolist(),
        **{which: y.tolist() for which, y in extremes.items()},
        "any": collectives.any_rank(rank == 1, False, True),
        "whole": collectives.add_up(rank + 1),
        "items": collectives.all_lists([rank] * rank),
        "nothing": collectives.all_lists([]),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_numbers_and_lists_of_all_ranks(ranks: int) -> None:
    last = ranks - 1
    expected = {
        "ranks": ranks,
        "sum": [sum(range(ranks)), sum(5.0 - r for r in range(ranks))],
        "most": [last, 5],
        "least": [0, 5 - last],
        "any": (ranks > 1, False, True),
        "whole": ranks * (ranks + 1) // 2,
        "items": [1, 2, 2][: ranks * (ranks - 1) // 2],
        "nothing": [],
    }
    assert over_threads(ranks, said) == [expected] * ranks
    if ranks == 1:
        assert said() == expected  # without a process group


def shards(rows: int) -> tuple[list[list[float]], list[list[float]]]:
    """This rank's rows of a sharded table as `fill` and as torch cut them."""
    values, mesh = torch.arange(2.0 * rows).view(rows, 2), init_device_mesh("cpu", (collectives.ranks(),))
    sharded = [distribute_tensor(x, mesh, [Shard(0)]) for x in (torch.zeros_like(values), values)]
    collectives.fill(sharded[0], values)
    plain = torch.zeros_like(values)
    collectives.fill(plain, values)
    assert all(torch.equal(collectives.whole(x), values) for x in (sharded[0], plain))
    mine, torchs = (collectives.local(x).tolist() for x in sharded)
    return mine, torchs


@pytest.mark.parametrize("rows", [2, 4, 7])
def test_rows_of_a_sharded_table_are_those_that_torch_cuts(rows: int) -> None:
    """Ranks get none where rows are few."""
    found = over_threads(3, lambda: shards(rows))
    assert all(mine == torchs for mine, torchs in found)
    assert sum(len(mine) for mine, _ in found) == rows
    assert (found[2][0] == []) == (rows < 5)
