"""What ranks say to each other in a step, by threads of one process: means of gradients, Muon on shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kiloword.distributed import collectives
from kiloword.training import engine, muon
from parts import drawn
from threads import over_threads


class Layers(nn.Module):
    """Each rank has a layer that no other one uses."""

    def __init__(self, start: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
        for n, p in enumerate(self.parameters()):
            nn.init.constant_(p, start + n)

    def forward(self, rank: int, n: int) -> Tensor:
        """The loss of one micro-batch."""
        found: Tensor = self.layers[rank](self.layers[2](drawn(6, 3, seed=10 * rank + n)).tanh()).square().sum()
        return found


def test_gradients_are_means_over_ranks_of_all_micro_batches() -> None:
    """Of the first rank's weights."""

    def work() -> dict[str, Tensor | None]:
        rank = collectives.rank()
        model = Layers(0.1 + rank)
        run: Any = engine.replicated(model)  # type: ignore[arg-type]
        for n in range(2):
            run.require_backward_grad_sync = n == 1
            run(rank, n).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    both, model = over_threads(2, work), Layers()
    torch.autograd.backward([model(rank, n) / 2 for rank in (0, 1) for n in (0, 1)])
    for found in both:
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-12, msg=name)


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
