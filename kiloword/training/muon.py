"""Muon: momentum, then orthogonalization, for many matrices at once, whole or sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kiloword.distributed import collectives
from kiloword.distributed.device import cpu_has_bf16


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

    at_once = 1 << 26  # elements of matrices that are gathered and orthogonalized at once
    found_inf: Tensor | None = None  # 1.0 skips the step (the name is that of torch's fused optimizers)

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
        self.stacked, self.rows = stacked or {}, rows or {}
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[torch.Size, int, int | None], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    rows = self.rows.get(p) if p.dim() == 2 else None  # of several matrices a rank has some whole
                    alike.setdefault((p.shape, self.stacked.get(p, 1), rows), []).append(p)
            for (shape, parts, rows), members in alike.items():
                most = self.at_once // max(1, rows * shape[1] if rows else shape.numel()) or 1
                for n in range(0, len(members), most):
                    self._turn(members[n : n + most], parts, rows, group)

    def _turn(self, members: list[Tensor], parts: int, rows: int | None, group: dict[str, Any]) -> None:
        """Update n parameters of one shape, unless the step is skipped."""
        buffers = [self.state[p]["momentum_buffer"] for p in members]
        gradients, before = torch.stack([p.grad for p in members if p.grad is not None]), torch.stack(buffers)
        skip = before.new_zeros((), dtype=torch.bool) if self.found_inf is None else self.found_inf > 0
        now = torch.where(skip, before, before.lerp(gradients, 1 - group["momentum"]))
        torch._foreach_copy_(buffers, now.unbind())
        whole = nesterov = gradients.lerp(now, group["momentum"])
        if rows is not None:
            share = -(-rows // collectives.ranks())  # rows of each rank but the last ones, as FSDP2 shards them
            padded = F.pad(nesterov, (0, 0, 0, share - nesterov.shape[1]))
            everyone = [torch.empty_like(padded) for _ in range(collectives.ranks())]
            dist.all_gather(everyone, padded)
            whole = torch.cat(everyone, 1)[:, :rows]
        height, columns = whole.shape[-2] // parts, whole.shape[-1]
        matrices = whole.reshape(whole.shape[:-2].numel() * parts, height, columns)
        changes = orthogonal(matrices).reshape(whole.shape)
        if rows is not None:  # this rank's, none where a matrix has fewer rows than there are ranks
            changes = changes[:, collectives.rank() * share :][:, : nesterov.shape[1]]
        wide = columns / height if whole.dim() == 4 else height / columns  # outputs over inputs
        weights = [p.detach() for p in members]
        shrink = torch.where(skip, 1.0, weights[0].new_full((), 1 - group["lr"] * group["weight_decay"]))
        torch._foreach_mul_(weights, shrink)
        changes = torch.where(skip, 0.0, changes).to(shrink.dtype)
        torch._foreach_add_(weights, changes.unbind(), alpha=-group["lr"] * math.sqrt(max(1.0, wide)))


def orthogonal(matrices: Tensor) -> Tensor:
    """U V^T of each matrix U S V^T, roughly (singular values end between 0.7 and 1.2), in bfloat16 where that is fast.

    Args: matrices [n, a, b]. Source: Newton-Schulz iteration of Muon (Jordan et al., 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315  # quintic that raises small singular values fast; 5 rounds suffice
    x = matrices.bfloat16() if matrices.device.type != "cpu" or cpu_has_bf16() else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
