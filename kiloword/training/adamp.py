"""AdamP: Adam whose step leaves the norm of scale-invariant weights alone. Source: arXiv:2006.08217, algorithm 2."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
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
        self.sharded = {id(p) for p in sharded}
        fill_moments(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group)

    def _move(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        skip = torch.zeros((), device=p.device) if self.found_inf is None else self.found_inf
        gradient = torch.where(skip > 0, 0.0, gradient)
        state["step"] += 1 - skip
        taken = (1 - skip).to(p.dtype)
        state["exp_avg"].lerp_(gradient, (1 - beta1) * taken)
        state["exp_avg_sq"].lerp_(gradient.square(), (1 - beta2) * taken)
        n = state["step"].double().clamp_min(1)  # of a skipped first step
        first, second = (1 - beta1**n).to(p.dtype), (1 - beta2**n).to(p.dtype)
        change = state["exp_avg"] / first / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
        ratio: Tensor | float = 1.0
        if p.dim() > 1:
            change, ratio = self._projected(p, gradient, change, group)
        p.mul_(1 - taken * (group["lr"] * group["weight_decay"] * ratio)).sub_(change * (group["lr"] * taken))

    def _projected(
        self, p: Tensor, gradient: Tensor, change: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor | float]:
        """The change without its part along the weights, where that applies, and the factor of the weight decay."""
        x, g, u, eps = p.flatten(1), gradient.flatten(1), change.flatten(1), group["eps"]
        sums = torch.stack([(x * x).sum(1), (g * g).sum(1), (x * g).sum(1), (x * u).sum(1)])  # [4, rows]
        most, total = _cosine(sums, eps).amax(0, keepdim=True) if len(x) else sums.new_full((1,), -1.0), sums.sum(1)
        count = float(p.numel())
        if id(p) in self.sharded:
            most = collectives.extreme_over_ranks(most, "most")
            total = collectives.sum_over_ranks(total)
            count = collectives.add_up(p.numel())
        by_row = most < group["delta"] / x.shape[1] ** 0.5
        whole = ~by_row & (_cosine(total[:, None], eps) < group["delta"] / count**0.5)
        row_part = sums[3] / (sums[0].sqrt() + eps).square()
        part = torch.where(by_row, row_part, torch.where(whole, total[3] / (total[0].sqrt() + eps).square(), 0.0))
        ratio = torch.where(by_row | whole, p.new_full((), group["wd_ratio"]), p.new_ones(()))
        return (u - x * part[:, None]).view_as(change), ratio


def _cosine(sums: Tensor, eps: float) -> Tensor:
    """|cosine| of weights and gradients from their sums of products [4, n], as torch's cosine similarity: [n]."""
    weights, gradients = sums[0].sqrt().clamp_min(eps), sums[1].sqrt().clamp_min(eps)
    return (sums[2] / (weights * gradients)).abs()


def fill_moments(adam: torch.optim.Optimizer) -> None:
    """Begin the state of an Adam before its first step, with zeros."""
    for group in adam.param_groups:
        for p in group["params"]:
            adam.state[p]["step"] = torch.zeros((), device=p.device)
            adam.state[p] |= {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
