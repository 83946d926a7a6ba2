"""Muon on shards, by threads of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.training import muon
from threads import over_threads

SHAPES: dict[str, tuple[int, ...]] = {"a": (7, 4), "b": (7, 4), "qkv": (6, 5), "few": (2, 4), "c": (7, 4)}
SHAPES["several"] = (2, 3, 5)


def muons(rows: Callable[[Tensor], Tensor], whole: bool, skip: int = -1) -> dict[str, Tensor]:
    """Matrices after three steps of which one may be skipped, and their momenta."""
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    own = {name: rows(x).clone().requires_grad_() for name, x in full.items()}
    counts = None if whole else {p: len(full[name]) for name, p in own.items()}
    optimizer = muon.Muon(list(own.values()), 0.1, 0.9, 0.2, {own["qkv"]: 3}, counts)
    for step in range(3):
        for name, p in own.items():
            p.grad = rows(torch.randn(SHAPES[name], generator=generator)).clone()
        optimizer.found_inf = None if skip < 0 else torch.tensor(float(step == skip))
        optimizer.step()
    momenta = {f"momentum of {name}": optimizer.state[p]["momentum_buffer"] for name, p in own.items()}
    return {name: p.detach() for name, p in own.items()} | momenta


@pytest.mark.parametrize("most", [muon.AT_ONCE, 60])
@pytest.mark.parametrize("skip", [-1, 1])
def test_muon_moves_the_rows_that_each_rank_has(monkeypatch: pytest.MonkeyPatch, most: int, skip: int) -> None:
    """Uneven shares, and ranks that have no row of a matrix; all at once, or in several portions."""
    one = muons(lambda x: x, True, skip)
    monkeypatch.setattr(muon, "AT_ONCE", most)

    def rows(x: Tensor) -> Tensor:
        share = -(-len(x) // 3)
        return x[collectives.rank() * share :][:share]

    found = over_threads(3, lambda: muons(rows, False, skip))
    for name, value in one.items():
        torch.testing.assert_close(torch.cat([part[name] for part in found]), value, rtol=1e-6, atol=1e-6, msg=name)
