"""The optimizer: parameter groups, Muon, AdamW, AdamP, a warm-up and cosine schedule, clipping, weight averaging."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kiloword.config.recipes import OptimConfig
from kiloword.distributed import collectives
from kiloword.distributed.collectives import local
from kiloword.model.adapters import MARK
from kiloword.model.blocks import STACKED, layer_factors
from kiloword.model.heads import Head
from kiloword.model.resnet import statistics
from kiloword.training.adamp import AdamP, fill_moments
from kiloword.training.engine import settle
from kiloword.training.muon import Muon

MEMORY, SETTLED = 0.98, 20  # usual gradient norm: decay of its running mean, and number of steps before it is used
LONGEST_WARMUP = 2000  # steps, where the warm-up is a share of the run; of CLIP (arXiv:2103.00020, table 18)
USUAL = "usual:gradient_norm"


def schedule(step: int, steps: int, config: OptimConfig) -> float:
    """Factor of the learning rate at `step` (from 0) of `steps`: linear warm-up, then half a cosine."""
    warmup = warmup_steps(steps, config)
    if step < warmup:
        return min((step + 1) / max(warmup, 1), 1.0)
    progress = (step - warmup) / max(steps - warmup, 1)
    return config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def warmup_steps(steps: int, config: OptimConfig) -> float:
    """Number of warm-up steps of a run of `steps`: a share of them, at most 2,000, or the config's number."""
    return config.warmup if config.warmup >= 1 else min(config.warmup * steps, LONGEST_WARMUP)


def orthogonalized(module: nn.Module) -> set[str]:
    """Names of the parameters that Muon moves: matrices in a block of a tower or a layer of a decoder.

    An adapter's are not: their product is what changes a layer. Nor are those of a trunk: Muon moves all singular
    values alike, also those that pretraining by AdamW left small (the mismatch of arXiv:2502.16982, section 3.5).
    Above trunks so are first layers of towers and the pooling's: inner layers of a network that begins with the trunk.
    In a tower without one they are its input and output, which take AdamW (research/log.md).
    """
    towers = [path for path, tower in module.named_modules() if getattr(tower, "trunk", None) is not None]
    first = {f"{path}.{layer}.weight" for path in towers for layer in ("patches", "stem")}

    def inner(name: str, p: Tensor) -> bool:
        if MARK in name or ".trunk." in name:
            return False
        pooled = bool(towers) and ".pooling." in name
        if p.dim() != 2:
            return pooled and p.dim() == 3
        return ".blocks." in name or ".layers." in name or name in first or (pooled and name.endswith(".weight"))

    return {name for name, p in module.named_parameters() if inner(name, p)}


def groups(module: nn.Module, config: OptimConfig) -> dict[str, list[tuple[str, Tensor]]]:
    """Group name -> trainable parameters of a module with their names, in order.

    Groups: "muon"; "decay" and "plain", with and without weight decay: it applies to weights of linear layers, kernels
    and other matrices, but not to 1-D parameters, positions, tokens and embedding tables; "scale", the scale and bias
    of every `Head`; "text muon" and so on for the text tower.
    """
    out: dict[str, list[tuple[str, Tensor]]] = {}
    hidden = orthogonalized(module) if config.name == "muon" else ()
    scales = {id(p) for part in module.modules() if isinstance(part, Head) for p in part.scales()}
    layers = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)}
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        table = any(word in name for word in ("position", "pos_embed", "token", "embedding", "probe"))
        decays = id(p) in layers or p.dim() > 3 or (p.dim() > 1 and not table)
        kind = "scale" if id(p) in scales else "muon" if name in hidden else "decay" if decays else "plain"
        out.setdefault(f"text {kind}" if "text_tower." in name else kind, []).append((name, p))
    return out


class Optimizer:
    """AdamW or AdamP, and optionally Muon, with one step, one schedule and one flat state.

    It holds this rank's rows of a sharded parameter as a plain tensor, because fused optimizers and norms refuse a mix
    of plain tensors and DTensors. A step whose gradient norm is NaN, infinite or far above the usual one is skipped.

    Attributes: frozen: names of parameters that this step leaves as they are; their gradients are dropped; names: of
    parameters, by the tensors that are moved; parts: torch's optimizers.
    """

    frozen: Collection[str] = ()

    def __init__(self, module: nn.Module, config: OptimConfig, steps: int) -> None:
        self.config, self.steps = config, steps
        self.sharded = {n: p for n, p in module.named_parameters() if p.requires_grad and isinstance(p, DTensor)}
        self.names: dict[Tensor, str] = {}
        by_layer = layer_factors(module, config.layer_decay)
        stated = {
            f"{path}.{name}".removeprefix("."): factor
            for path, owner in module.named_modules()
            for name, factor in getattr(owner, "lr_factors", dict)().items()
        }
        alike: dict[tuple[bool, float, float], list[Tensor]] = {}  # by Muon or not, learning rate, weight decay
        rates = {
            "muon": (config.muon_lr, config.muon_weight_decay),
            "decay": (config.lr, config.weight_decay),
            "plain": (config.lr, 0.0),
            "scale": (config.lr * config.scale_lr, 0.0),
        }
        for group, members in groups(module, config).items():
            rate, decay = rates[group.removeprefix("text ")]
            rate *= config.text_lr if group.startswith("text ") else 1.0
            for name, p in members:
                leaf = local(p.detach()) if name in self.sharded else p
                self.names[leaf] = name
                trunk = config.trunk_lr if ".trunk." in name and MARK not in name else 1.0
                factor = by_layer.get(name, 1.0) * trunk * stated.get(name, 1.0)
                alike.setdefault((group.endswith("muon"), rate * factor, decay), []).append(leaf)
        adam, muon = (
            [{"params": p, "base_lr": lr, "weight_decay": decay} for (of, lr, decay), p in alike.items() if of == which]
            for which in (False, True)
        )
        rows = {p: len(self.sharded[name]) for p, name in self.names.items() if name in self.sharded}
        self.parts: list[torch.optim.Optimizer] = []
        betas = (float(config.beta1), float(config.beta2))  # torch refuses the integer 0
        if adam and config.name == "adamp":
            self.parts.append(AdamP(adam, config.lr, betas, config.eps, 0.0, config.delta, config.wd_ratio, rows))
        elif adam:
            self.parts.append(torch.optim.AdamW(adam, lr=config.lr, betas=betas, eps=config.eps, fused=True))
            fill_moments(self.parts[0])
        if muon:
            stacked = {p: n for p, name in self.names.items() for end, n in STACKED.items() if name.endswith(end)}
            self.parts.append(Muon(muon, config.muon_lr, config.momentum, stacked=stacked, rows=rows))
        self.usual = next(iter(self.names)).new_zeros(2, dtype=torch.float64)  # running sums: norms, and their weights

    def step(self, step: int, loss: Tensor | None = None) -> dict[str, Tensor]:
        """Clip the gradients, update the weights, drop the gradients.

        Args: step: from 0; loss: the loss of these gradients; a step is also skipped when it is NaN or infinite.
        Returns: "gradient_norm" before clipping and "skipped_step", 1 for a skipped step; scalars on the device.
        """
        norm = self.clip()
        skip = self._judge(norm, loss)
        factor = schedule(step, self.steps, self.config)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["base_lr"] * factor
            part.found_inf = skip  # type: ignore[attr-defined]
            part.step()
        self.zero_grad()
        return {"gradient_norm": norm, "skipped_step": skip}

    @torch.no_grad()
    def _judge(self, norm: Tensor, loss: Tensor | None) -> Tensor:
        """1.0 for a step to skip, else 0.0 and the norm enters the usual one; does not wait for the device."""
        norm = norm.double()
        mean = self.usual[0] / self.usual[1]
        settled = self.usual[1] > 1 - MEMORY**SETTLED
        limit = self.config.explode or math.inf
        skip = ~torch.isfinite(norm) | (settled & (norm > limit * mean))
        skip = skip if loss is None else skip | ~torch.isfinite(loss)
        updated = MEMORY * self.usual + (1 - MEMORY) * torch.stack([norm, torch.ones_like(norm)])
        self.usual.copy_(torch.where(skip, self.usual, updated))
        return skip.float()

    def clip(self) -> Tensor:
        """Clip the gradients to the norm `clip`; returns their norm before, over all ranks."""
        plain, mine = list[Tensor](), list[Tensor]()  # mine: of this rank's rows
        for p, name in self.names.items():
            if name in self.sharded:
                whole = self.sharded[name].grad
                p.grad = None if whole is None else local(whole)
            if name in self.frozen:
                p.grad = None
                continue
            if p.grad is None:  # of losses that are not computed now: as if they had weight 0
                p.grad = torch.zeros_like(p)
            (mine if name in self.sharded else plain).append(p.grad)
        norm = torch.nn.utils.get_total_norm(plain)
        if self.sharded:
            squares = collectives.sum_over_ranks(torch.nn.utils.get_total_norm(mine) ** 2)
            norm = (norm**2 + squares).sqrt()
        if self.config.clip > 0:
            torch._foreach_mul_(plain + mine, (self.config.clip / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def zero_grad(self) -> None:
        """Drop the gradients; of replicated parameters they are views of DDP's buckets, which stay."""
        for p, name in self.names.items():
            if name in self.sharded or p.grad is None or collectives.ranks() == 1:
                self.sharded.get(name, p).grad = p.grad = None
            else:
                p.grad.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Flat state, to read and to fill: "exp_avg:NAME" and so on; of sharded parameters sharded like these."""
        flat = {USUAL: self.usual}
        for part in self.parts:
            for p, state in part.state.items():
                like = self.sharded.get(self.names[p])
                for key, x in state.items():
                    if like is not None and x.dim():
                        mesh, place = like.device_mesh, like.placements
                        x = DTensor.from_local(x, mesh, place, shape=like.shape, stride=like.stride())
                    flat[f"{key}:{self.names[p]}"] = x
        return flat


class Average:
    """Exponential moving average of trained weights and batch norms' statistics, evaluated and saved in their place."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        settle(module)  # reshard parameters that a forward pass gathered
        learned = {n: p for n, p in module.named_parameters() if p.requires_grad} | statistics(module) if decay else {}
        self.shadow = {n: x.detach().clone() for n, x in learned.items()}
        self._means, self._live = ([local(x.detach()) for x in of.values()] for of in (self.shadow, learned))

    def update(self, step: int) -> None:
        """Update after `step` (from 0); the decay warms up so that early weights are forgotten."""
        if self.decay:
            torch._foreach_lerp_(self._means, self._live, 1 - min(self.decay, (1 + step) / (10 + step)))

    @contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has the averaged weights."""
        self._swap(module)
        try:
            yield
        finally:
            self._swap(module)

    def _swap(self, module: nn.Module) -> None:
        settle(module)
        for mean, live in zip(self._means, self._live, strict=True):
            current = live.clone()
            live.copy_(mean)
            mean.copy_(current)
