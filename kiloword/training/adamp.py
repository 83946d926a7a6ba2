"""AdamP: Adam whose step leaves the norm of scale-invariant weights alone. Source: arXiv:2006.08217, algorithm 2."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.distributed import collectives


class AdamP(torch.optim.Optimizer):
    """AdamW, without the part of a step along the weights where these are nearly orthogonal to their gradient.

    That is where the cosine of every row (channel) and its gradient, or of the whole tensor and its gradient, is below
    `delta` / sqrt(number of elements). Such tensors decay by `wd_ratio` of the weight decay. Vectors step as in AdamW.

    Args: sharded: parameters that are this rank's rows of a tensor whose other rows other ranks hold.
    """

    found_inf: Tensor | None = None  # 1.0 skips the step (the name is that of torch's fused optimizers)

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        sharded: Collection[Tensor] = (),
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "delta": delta, "wd_ratio": wd_ratio})
        self.sharded = set(sharded)
        fill_moments(self)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group)

    def _move(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), eps = self.state[p], group["betas"], group["eps"]
        skip = torch.zeros((), device=p.device) if self.found_inf is None else self.found_inf
        gradient = torch.where(skip > 0, 0.0, gradient)
        state["step"] += 1 - skip
        taken = (1 - skip).to(p.dtype)
        state["exp_avg"].lerp_(gradient, (1 - beta1) * taken)
        state["exp_avg_sq"].lerp_(gradient.square(), (1 - beta2) * taken)
        n = state["step"].double().clamp_min(1)  # of a skipped first step
        first, second = (1 - beta1**n).to(p.dtype), (1 - beta2**n).to(p.dtype)
        change = state["exp_avg"] / first / ((state["exp_avg_sq"] / second).sqrt() + eps)
        ratio = taken.new_ones(())
        if p.dim() > 1:
            x, g, u = p.flatten(1), gradient.flatten(1), change.flatten(1)
            by_row = torch.stack([(x * x).sum(1), (g * g).sum(1), (x * g).sum(1), (x * u).sum(1)])  # [4, rows]
            whole, count = by_row.sum(1), p.numel()
            if p in self.sharded:
                whole, count = collectives.sum_over_ranks(whole), collectives.add_up(count)
            along = x.new_zeros(1)
            for sums, n in ((whole[:, None], count), (by_row, x.shape[1])):  # rows have precedence
                weights, gradients = sums[0].sqrt(), sums[1].sqrt()
                cosines = (sums[2] / (weights.clamp_min(eps) * gradients.clamp_min(eps))).abs()
                most = F.pad(cosines, (0, 1), value=-1.0).amax(0, keepdim=True)  # a rank may have no row
                if p in self.sharded:
                    most = collectives.extreme_over_ranks(most, "most")
                projected = most < group["delta"] / n**0.5
                along = torch.where(projected, sums[3] / (weights + eps).square(), along)
                ratio = torch.where(projected, group["wd_ratio"], ratio)
            change = (u - x * along[:, None]).view_as(p)
        p.mul_(1 - taken * (group["lr"] * group["weight_decay"] * ratio)).sub_(change * (group["lr"] * taken))


def fill_moments(adam: torch.optim.Optimizer) -> None:
    """Begin the state of an Adam before its first step, with zeros."""
    for group in adam.param_groups:
        for p in group["params"]:
            adam.state[p]["step"] = torch.zeros((), device=p.device)
            adam.state[p] |= {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
