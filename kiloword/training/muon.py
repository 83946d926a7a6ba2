"""Muon: momentum, then orthogonalization, for many matrices at once, whole or sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.distributed.device import cpu_has_bf16

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic that raises small singular values fast; 5 rounds suffice
AT_ONCE = 1 << 26  # elements of matrices that are gathered and orthogonalized at once


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix, for all matrices of one shape at once.

    The update equals that of `torch.optim.Muon` (nesterov, "original" scaling), which takes one matrix at a time;
    batched it is 4 times faster at width 128 on CPU. The update of a sharded matrix is gathered, and each rank applies
    its rows.

    A parameter is a matrix [outputs, inputs], or n of them with inputs first, [n, inputs, outputs], of which a rank
    holds some whole.

    Args: stacked: parameters that hold several matrices, stacked by rows, and their number (3 for fused QKV [3 W, W]);
    rows: parameters that are this rank's rows of a sharded matrix, and the number of rows of the whole matrix.
    """

    found_inf: Tensor | None = None  # 1.0 skips the step (the name is that of torch's fused optimizers)
    _skip: Tensor | None = None  # bool, computed once a step

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
        self._skip = None if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            by_shape: dict[tuple[int, int, int], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() == 3:
                    self._turn_several(p, group)
                    continue
                key = (self.stacked.get(id(p), 1), self.rows.get(id(p), len(p)), p.shape[1])
                by_shape.setdefault(key, []).append(p)
            for (parts, rows, columns), members in by_shape.items():
                most = max(1, AT_ONCE // (rows * columns))
                for n in range(0, len(members), most):
                    self._turn(members[n : n + most], parts, rows, group)

    def _turn(self, members: list[Tensor], parts: int, rows: int, group: dict[str, Any]) -> None:
        """Update the weights of n parameters of one shape."""
        mine = self._momentum(members, group["momentum"])
        whole = gather_rows(mine, rows) if id(members[0]) in self.rows else mine  # [n, rows, columns]
        height, columns = rows // parts, whole.shape[2]
        changes = orthogonal(whole.reshape(-1, height, columns)).reshape(whole.shape)
        sharded, count = id(members[0]) in self.rows, mine.shape[1]
        first = min(collectives.rank() * share(rows), rows) if sharded else 0  # this rank's first row
        if count:  # 0 where a matrix has fewer rows than there are ranks
            step = group["lr"] * math.sqrt(max(1.0, height / columns))
            self._move(members, changes[:, first : first + count], step, group)

    def _turn_several(self, p: Tensor, group: dict[str, Any]) -> None:
        """Update the weights of a parameter [n, inputs, outputs]."""
        changes = orthogonal(self._momentum([p], group["momentum"])[0])
        step = group["lr"] * math.sqrt(max(1.0, p.shape[2] / p.shape[1]))
        self._move([p], changes[None], step, group)

    def _momentum(self, members: list[Tensor], momentum: float) -> Tensor:
        """The Nesterov momentum to orthogonalize, this rank's rows: [n, *shape of a parameter]."""
        for p in members:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in members]
        gradients, before = torch.stack([p.grad for p in members if p.grad is not None]), torch.stack(buffers)
        now = self._unless_skipped(before.lerp(gradients, 1 - momentum), before)
        torch._foreach_copy_(buffers, now.unbind())
        return gradients.lerp(now, momentum)

    def _move(self, members: list[Tensor], changes: Tensor, step: float, group: dict[str, Any]) -> None:
        """Apply weight decay and subtract the changes [n, rows, columns], unless the step is skipped."""
        weights = [p.detach() for p in members]
        shrink = self._unless_skipped(weights[0].new_full((), 1 - group["lr"] * group["weight_decay"]), 1.0)
        torch._foreach_mul_(weights, shrink)
        torch._foreach_add_(weights, self._unless_skipped(changes, 0.0).to(shrink.dtype).unbind(), alpha=-step)

    def _unless_skipped(self, x: Tensor, otherwise: Tensor | float) -> Tensor:
        return x if self._skip is None else torch.where(self._skip, otherwise, x)


def share(rows: int) -> int:
    """Rows of a sharded matrix on each rank except the last ones, as FSDP2 shards them."""
    return -(-rows // collectives.ranks())


def gather_rows(mine: Tensor, rows: int) -> Tensor:
    """Gather n matrices [n, rows, b], of which each rank holds its share of rows, by one collective."""
    padded = F.pad(mine, (0, 0, 0, share(rows) - mine.shape[1]))
    parts = [torch.empty_like(padded) for _ in range(collectives.ranks())]
    dist.all_gather(parts, padded)
    return torch.cat(parts, 1)[:, :rows]


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """U V^T of each matrix U S V^T, roughly (singular values end between 0.7 and 1.2), in bfloat16 where that is fast.

    Args: matrices [n, a, b]. Source: Newton-Schulz iteration of Muon (Jordan et al., 2024).
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.device.type != "cpu" or cpu_has_bf16() else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
