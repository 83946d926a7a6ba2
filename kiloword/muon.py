"""Muon: momentum, then the nearest orthogonal matrix, for many matrices at once, whole or sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kiloword import parallel

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that lifts small singular values fast; five rounds suffice
AT_ONCE = 1 << 26  # numbers of the matrices that are whole, and turned, at once


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix, for all matrices of one shape at once.

    The same update as `torch.optim.Muon` (nesterov, "original" scaling), which takes one matrix at a time: batched
    it is 4 times faster at width 128 on CPU. Of a sharded matrix the update is gathered, and each rank moves its rows.

    Args: stacked: parameters that are several matrices, one below the other, and how many (3 of fused QKV [3 W, W]);
    rows: of a parameter that is this rank's rows of a sharded one, how many rows that has on all ranks.
    """

    found_inf: Tensor | None = None  # 1.0: this step changes nothing (the name by which torch's fused ones know it)

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        stacked: Mapping[Tensor, int] | None = None,
        rows: Mapping[Tensor, int] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.stacked = {id(p): parts for p, parts in (stacked or {}).items()}
        self.rows = {id(p): n for p, n in (rows or {}).items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                key = (self.stacked.get(id(p), 1), self.rows.get(id(p), len(p)), p.shape[1])
                by_shape.setdefault(key, []).append((p, self._momentum(p, group)))
            for (parts, rows, columns), members in by_shape.items():
                for some in _portions(members, rows * columns):
                    self._turn(some, parts, rows, group)

    def _momentum(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """What is to be made orthogonal: this rank's rows."""
        buffer: Tensor = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        assert p.grad is not None
        if self.found_inf is None:
            buffer.lerp_(p.grad, 1 - group["momentum"])
        else:
            buffer.copy_(torch.where(self.found_inf > 0, buffer, buffer.lerp(p.grad, 1 - group["momentum"])))
        return p.grad.lerp(buffer, group["momentum"])

    def _turn(self, members: list[tuple[Tensor, Tensor]], parts: int, rows: int, group: dict[str, Any]) -> None:
        """Move the weights of parameters of one shape."""
        updates = [u for _, u in members]
        if id(members[0][0]) in self.rows:
            updates = gather_rows(updates, rows)
        height = rows // parts
        pieces = orthogonal(torch.stack([piece for u in updates for piece in u.chunk(parts)]))
        weights, changes = [], []
        for n, (p, _) in enumerate(members):
            for part in range(parts):
                for weight, change in _overlap(p, self._first(p, rows), pieces[n * parts + part], part * height):
                    weights.append(weight)
                    changes.append(change.to(weight.dtype))
        if weights:  # else fewer rows than ranks: this one has none
            self._move(weights, changes, group["lr"] * math.sqrt(max(1.0, height / pieces.shape[2])), group)

    def _move(self, weights: list[Tensor], changes: list[Tensor], step: float, group: dict[str, Any]) -> None:
        """Weights shrink by the decay and move against their changes, unless the step is skipped."""
        kept = weights[0].new_tensor(1 - group["lr"] * group["weight_decay"])
        if self.found_inf is not None:
            kept = torch.where(self.found_inf > 0, 1.0, kept)
            changes = [torch.where(self.found_inf > 0, 0.0, change) for change in changes]
        torch._foreach_mul_(weights, kept)
        torch._foreach_add_(weights, changes, alpha=-step)

    def _first(self, p: Tensor, rows: int) -> int:
        """Which row of the whole parameter this rank's first one is."""
        return min(parallel.rank() * share(rows), rows) if id(p) in self.rows else 0


def _portions(members: list[tuple[Tensor, Tensor]], size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    most = max(1, AT_ONCE // size)
    for n in range(0, len(members), most):
        yield members[n : n + most]


def _overlap(p: Tensor, first: int, piece: Tensor, at: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of p, which begins at row `first` of the whole, that a piece from row `at` on covers, and the piece's."""
    start, end = max(first, at), min(first + len(p), at + len(piece))
    if start < end:
        yield p[start - first : end - first], piece[start - at : end - at]


def share(rows: int) -> int:
    """Rows of a sharded matrix on each rank but the last ones: as FSDP2 cuts."""
    return -(-rows // parallel.ranks())


def gather_rows(mine: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Matrices [rows, b] of which each rank holds its share of the rows; one collective for all."""
    most = share(rows)
    padded = mine[0].new_zeros(len(mine), most, mine[0].shape[1])
    for n, x in enumerate(mine):
        padded[n, : len(x)] = x
    found = [torch.empty_like(padded) for _ in range(parallel.ranks())]
    dist.all_gather(found, padded)
    return list(torch.cat(found, 1)[:, :rows])


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """U V^T of each matrix U S V^T, roughly (singular values end between 0.7 and 1.2), in bfloat16.

    Args: matrices [n, a, b]. Source: Newton-Schulz iteration of Muon (Jordan et al., 2024).
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
