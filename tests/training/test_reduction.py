"""What ranks say to each other in a step, by threads of one process: the reducer of gradients, Muon on shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kiloword.distributed import collectives
from kiloword.training import accumulate, engine, muon
from kiloword.verify.batch import batch
from kiloword.verify.suite import learner


class Ranks:
    """Threads that take each other for ranks; `sums` are the lengths of what each has summed so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.ranks, self.own = ranks, threading.local()
        self.meet = threading.Barrier(ranks, timeout=60)
        self.there: list[Tensor] = [torch.empty(0)] * ranks
        self.sums: list[list[int]] = [[] for _ in range(ranks)]
        monkeypatch.setattr(collectives, "ranks", lambda: ranks)
        monkeypatch.setattr(collectives, "rank", lambda: self.own.rank)
        monkeypatch.setattr(dist, "new_group", lambda: None)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist, "all_gather", self.all_gather)

    def exchange(self, mine: Tensor) -> list[Tensor]:
        self.there[self.own.rank] = mine.clone()
        self.meet.wait()
        found = list(self.there)
        self.meet.wait()
        assert len({x.shape for x in found}) == 1, "ranks say different things at the same place"
        return found

    def all_reduce(self, x: Tensor, group: Any, async_op: bool) -> Any:
        """The sum is there when it has been waited for, not before."""
        assert async_op
        self.sums[self.own.rank].append(len(x))
        total = torch.stack(self.exchange(x)).sum(0)
        return SimpleNamespace(wait=lambda: x.copy_(total))

    def all_gather(self, found: list[Tensor], mine: Tensor) -> None:
        for into, x in zip(found, self.exchange(mine), strict=True):
            into.copy_(x)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns on each."""
        out: list[Any] = [None] * self.ranks

        def one(rank: int) -> None:
            self.own.rank = rank
            try:
                out[rank] = work(rank)
            except BaseException as e:
                out[rank] = e
                self.meet.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [e for e in out if isinstance(e, BaseException)]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return out


def module() -> nn.ModuleDict:
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(4, 5), "left": nn.Linear(5, 2), "right": nn.Linear(5, 2)}
    made = nn.ModuleDict(layers).double()
    for n, p in enumerate(made.parameters()):
        nn.init.constant_(p, 0.1 + n)
    return made


def loss(model: nn.ModuleDict, rank: int, n: int) -> Tensor:
    """Of one micro-batch; each rank has a layer that no other one uses."""
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + n))
    inside = model["second"](model["first"](x).tanh()).tanh()
    found: Tensor = model["left" if rank == 0 else "right"](inside).square().sum()
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_are_means_over_ranks_and_travel_while_backward_goes_on(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """In every step, of all micro-batches, in one order on all ranks; nothing is left of the step before."""
    ranks, pieces, steps = Ranks(monkeypatch, 2), 3, 3

    def work(rank: int) -> list[dict[str, Tensor]]:
        model, found, before = module(), [], []
        reducer = engine.Reducer(model, bucket=12) if overlap else engine.Reducer(model, False, bucket=12)
        assert len(reducer.buckets) > 4
        for step in range(steps):
            del ranks.sums[rank][:]
            reducer.begin()
            for n in range(pieces):
                if n == pieces - 1:
                    reducer.last()
                torch.autograd.backward(loss(model, rank, step * pieces + n))
                before.append(len(ranks.sums[rank]))
            reducer.finish()
            assert ranks.sums[rank] == [len(flat) for flat in reducer.flats]
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        assert not any(before[0::pieces] + before[1::pieces])
        # what the second rank uses comes first in the order, and what it does not use second
        assert all(sent > 0 for sent in before[2::pieces]) == any(before[2::pieces]) == (overlap and rank == 1)
        return found

    both = ranks.run(work)
    monkeypatch.undo()
    for step in range(steps):
        model = module()
        losses = [loss(model, rank, step * pieces + n) for rank in (0, 1) for n in range(pieces)]
        torch.autograd.backward([x / 2 for x in losses])
        for found in both:
            assert found[step].keys() == dict(model.named_parameters()).keys()
            for name, p in model.named_parameters():
                torch.testing.assert_close(found[step][name], p.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_the_last_micro_batch_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last backward pass may reduce buckets."""
    events: list[str] = []
    one = accumulate._complete
    monkeypatch.setattr(accumulate, "_complete", lambda *given: events.append("pass") or one(*given))
    reducer: Any = SimpleNamespace(**{n: lambda n=n: events.append(n) for n in ("begin", "last", "finish")})
    accumulate.backward(learner("siglip"), batch().split(4), reducer=reducer)
    assert events == ["begin", "pass", "pass", "pass", "last", "pass", "finish"]


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
    ranks = Ranks(monkeypatch, 3)

    def work(rank: int) -> dict[str, Tensor]:
        def rows(x: Tensor) -> Tensor:
            share = -(-len(x) // 3)
            return x[rank * share : (rank + 1) * share]

        return muons(rows, False, skip)

    found = ranks.run(work)
    for name, value in one.items():
        torch.testing.assert_close(torch.cat([part[name] for part in found]), value, rtol=1e-6, atol=1e-6, msg=name)
