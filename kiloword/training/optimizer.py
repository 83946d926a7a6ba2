"""The optimizer: parameter groups, Muon, AdamW, AdamP, a warm-up and cosine schedule, clipping, weight averaging."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kiloword.config.recipes import OptimConfig
from kiloword.distributed import collectives
from kiloword.distributed.collectives import local
from kiloword.model.adapters import MARK
from kiloword.model.blocks import STACKED
from kiloword.model.heads import Head
from kiloword.model.layers import layer_factors
from kiloword.model.resnet import statistics
from kiloword.training.adamp import AdamP
from kiloword.training.engine import settle
from kiloword.training.muon import Muon

MEMORY, SETTLED = 0.98, 20  # usual gradient norm: decay of its running mean, and number of steps before it is used
LONGEST_WARMUP = 2000  # steps, where the warm-up is a share of the run; of CLIP (arXiv:2103.00020, table 18)
USUAL = "usual:gradient_norm"
KEPT = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")  # state of a parameter in AdamW and Muon


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


def of_trunk(name: str) -> bool:
    """Whether a parameter is a pretrained one of a trunk, not of an adapter in it."""
    return ".trunk." in name and MARK not in name


def is_hidden_matrix(name: str, p: Tensor) -> bool:
    """Whether it is a matrix in a block of a tower or a layer of a decoder, which Muon may orthogonalize.

    An adapter's are not: their product is what changes a layer. Nor are those of a trunk: Muon moves all singular
    values alike, also those that pretraining by AdamW left small (the mismatch of arXiv:2502.16982, section 3.5).
    """
    return p.dim() == 2 and (".blocks." in name or ".layers." in name) and MARK not in name and not of_trunk(name)


def above_trunks(module: nn.Module) -> set[str]:
    """Names of the matrices between trunks and the shared space: first layers of their towers, those of the pooling.

    Muon may orthogonalize them: they are inner layers of a network that begins with the trunk. In a tower without one
    they are its input and output, which take AdamW (docs/log.md).
    """
    towers = [name for name, tower in module.named_modules() if getattr(tower, "trunk", None) is not None]
    first = {f"{path}.{layer}.weight" for path in towers for layer in ("patches", "stem")}
    if not towers:
        return set()

    def between(name: str, p: Tensor) -> bool:
        weight = p.dim() == 2 and name.endswith(".weight")
        return (weight and name in first) or (".pooling." in name and (weight or p.dim() == 3))

    return {name for name, p in module.named_parameters() if between(name, p)}


def decays(name: str, p: Tensor) -> bool:
    """Whether weight decay applies: to matrices only, not to 1-D parameters, positions, tokens or embedding tables.

    The weight of an `nn.Linear` is none of these, whatever its name: see `groups`.

    A kernel of a convolution is none of these, whatever its name (`patch_embeddings.projection` of transformers).
    """
    tables = ("position", "pos_embed", "token", "embedding", "probe")
    return p.dim() > 3 or (p.dim() >= 2 and not any(word in name for word in tables))


def groups(module: nn.Module, config: OptimConfig) -> dict[str, list[tuple[str, Tensor]]]:
    """Group name -> trainable parameters of a module with their names, in order.

    Groups: "muon", "decay", "plain", "scale"; "text muon" and so on for the text tower. "scale" holds the scale and
    bias of every `Head`.
    """
    out: dict[str, list[tuple[str, Tensor]]] = {}
    inner = above_trunks(module)
    scales = {id(p) for part in module.modules() if isinstance(part, Head) for p in part.scales()}
    layers = {f"{path}.weight" for path, part in module.named_modules() if isinstance(part, nn.Linear)}
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        if id(p) in scales:
            kind = "scale"
        elif config.name == "muon" and (name in inner or is_hidden_matrix(name, p)):
            kind = "muon"
        else:
            kind = "decay" if name in layers or decays(name, p) else "plain"
        out.setdefault(f"text {kind}" if "text_tower." in name else kind, []).append((name, p))
    return out


def stated_factors(module: nn.Module) -> dict[str, float]:
    """Parameter name -> multiplier of its learning rate, of modules with `lr_factors() -> {own parameter: factor}`."""
    return {
        f"{path}.{name}" if path else name: factor
        for path, owner in module.named_modules()
        if hasattr(owner, "lr_factors")
        for name, factor in owner.lr_factors().items()
    }


class Optimizer:
    """AdamW or AdamP, and optionally Muon, with one step, one schedule and one flat state.

    It holds this rank's rows of a sharded parameter as a plain tensor, because fused optimizers and norms refuse a mix
    of plain tensors and DTensors. A step whose gradient norm is NaN, infinite or far above the usual one is skipped.

    Attributes: frozen: names of parameters that this step leaves as they are; their gradients are dropped.
    """

    frozen: Collection[str] = ()

    def __init__(self, module: nn.Module, config: OptimConfig, steps: int) -> None:
        self.config, self.steps = config, steps
        named = groups(module, config)
        self.sharded = {name: p for members in named.values() for name, p in members if isinstance(p, DTensor)}
        leaves = {
            group: [(name, local(p.detach()) if name in self.sharded else p) for name, p in members]
            for group, members in named.items()
        }
        self.by_name = {name: p for members in leaves.values() for name, p in members}
        self.names = {p: name for name, p in self.by_name.items()}
        self.factors = layer_factors(module, config.layer_decay)
        self.stated = stated_factors(module)
        self.parts = self._parts(leaves)
        device = next(iter(self.names)).device
        self.usual = torch.zeros(2, dtype=torch.float64, device=device)  # running sums of norms and of their weights

    def _parts(self, named: dict[str, list[tuple[str, Tensor]]]) -> list[torch.optim.Optimizer]:
        config, adam, muon = self.config, list[dict[str, Any]](), list[dict[str, Any]]()
        for group, members in named.items():
            factor = config.text_lr if group.startswith("text ") else 1.0
            factor *= config.scale_lr if group == "scale" else 1.0
            decay = config.weight_decay if group.endswith("decay") else 0.0
            for layer, parameters in self._by_layer(members).items():
                if group.endswith("muon"):
                    muon.append({"params": parameters, "base_lr": config.muon_lr * factor * layer})
                else:
                    adam.append({"params": parameters, "base_lr": config.lr * factor * layer, "weight_decay": decay})
        parts: list[torch.optim.Optimizer] = []
        if adam:
            betas = (float(config.beta1), float(config.beta2))  # torch refuses the integer 0
            if config.name == "adamp":
                sharded = [self.by_name[name] for name in self.sharded]
                projection: dict[str, Any] = {"delta": config.delta, "wd_ratio": config.wd_ratio, "sharded": sharded}
                parts.append(AdamP(adam, config.lr, betas, config.eps, **projection))
            else:
                parts.append(torch.optim.AdamW(adam, lr=config.lr, betas=betas, eps=config.eps, fused=True))
        if muon:
            stacked = {p: n for p, name in self.names.items() for end, n in STACKED.items() if name.endswith(end)}
            rows = {p: len(self.sharded[name]) for p, name in self.names.items() if name in self.sharded}
            parts.append(Muon(muon, config.muon_lr, config.momentum, config.muon_weight_decay, stacked, rows))
        return parts

    def _by_layer(self, members: list[tuple[str, Tensor]]) -> dict[float, list[Tensor]]:
        """The parameters of a group by their multiplier of layer-wise decay and of trunks."""
        out: dict[float, list[Tensor]] = {}
        for name, p in members:
            factor = self.factors.get(name, 1.0) * (self.config.trunk_lr if of_trunk(name) else 1.0)
            factor *= self.stated.get(name, 1.0)
            out.setdefault(factor, []).append(p)
        return out

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

    @property
    def usual_norm(self) -> float:
        """Running mean of the gradient norms of steps that were not skipped; 0 before the first."""
        total, weight = self.usual.tolist()
        return total / weight if weight else 0.0

    @torch.no_grad()
    def _judge(self, norm: Tensor, loss: Tensor | None) -> Tensor:
        """1.0 for a step to skip, else 0.0 and the norm enters the usual one; does not wait for the device."""
        norm = norm.double()
        mean = self.usual[0] / self.usual[1].clamp_min(1e-12)
        settled = self.usual[1] > 1 - MEMORY**SETTLED
        limit = self.config.explode or math.inf
        skip = ~torch.isfinite(norm) | (settled & (norm > limit * mean))
        skip = skip if loss is None else skip | ~torch.isfinite(loss)
        updated = MEMORY * self.usual + (1 - MEMORY) * torch.stack([norm, torch.ones_like(norm)])
        self.usual.copy_(torch.where(skip, self.usual, updated))
        return skip.float()

    def clip(self) -> Tensor:
        """Clip the gradients to the norm `clip`; returns their norm before, over all ranks."""
        for name, p in self.sharded.items():  # this rank's rows
            self.by_name[name].grad = None if p.grad is None else local(p.grad)
        for leaf in self.names:  # those of losses that are not computed now: as if they had weight 0
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name in self.frozen:
            self.by_name[name].grad = None
        plain = [p.grad for p, name in self.names.items() if p.grad is not None and name not in self.sharded]
        mine = [p.grad for p, name in self.names.items() if p.grad is not None and name in self.sharded]
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
        """Flat state: "exp_avg:NAME" and so on; entries of sharded parameters are sharded like these."""
        states = ((self.names[p], state) for part in self.parts for p, state in part.state.items())
        flat = {f"{key}:{name}": self._as_parameter(name, x) for name, state in states for key, x in state.items()}
        return {**flat, USUAL: self.usual}

    def _as_parameter(self, name: str, value: Tensor) -> Tensor:
        """A state entry of a sharded parameter, as a DTensor with the same sharding."""
        if name not in self.sharded or value.dim() == 0:
            return value
        like = self.sharded[name]
        return DTensor.from_local(value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())

    def load_state_dict(self, flat: dict[str, Tensor]) -> None:
        """Load a result of `state_dict`, or tensors that were read into `empty_state`."""
        owner = {p: part for part in self.parts for g in part.param_groups for p in g["params"]}
        for full, value in flat.items():
            if full == USUAL:
                self.usual.copy_(value)
                continue
            key, name = full.split(":", 1)
            p = self.by_name[name]
            owner[p].state[p][key] = local(value).to(p.device).clone()

    def empty_state(self, names: Collection[str]) -> dict[str, Tensor]:
        """Zeros for the entries of a flat state, in their shapes and shards, to read into; none for unknown entries."""
        out = {USUAL: torch.zeros_like(self.usual)} if USUAL in names else {}
        for full in names:
            key, _, name = full.partition(":")
            if name in self.by_name and key in KEPT:
                p = self.by_name[name]
                kind = torch.float32 if key == "step" else p.dtype
                zeros = torch.zeros(() if key == "step" else p.shape, dtype=kind, device=p.device)
                out[full] = self._as_parameter(name, zeros)
        return out


class Average:
    """Exponential moving average of trained weights and batch norms' statistics, evaluated and saved in their place."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        settle(module)  # reshard parameters that a forward pass gathered
        live = {n: p for n, p in module.named_parameters() if p.requires_grad} | statistics(module)
        self.shadow = {n: p.detach().clone() for n, p in live.items()} if decay else {}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int, skipped: Tensor | None = None) -> None:
        """Update after `step` (from 0); the decay warms up so that early weights are forgotten.

        Args: skipped: scalar on the device, 1 for a skipped step ("skipped_step" of `Optimizer.step`), which leaves the
        average unchanged.
        """
        if not self.decay:
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        live = dict(module.named_parameters()) | statistics(module)
        means, now = [local(x) for x in self.shadow.values()], [local(live[name]) for name in self.shadow]
        if means[0].is_cuda:
            _fused_lerp(means, now, 1 - decay, skipped)
            return
        taken = torch.ones(()) if skipped is None else 1 - skipped
        weights = {kind: taken.to(kind) * (1 - decay) for kind in {x.dtype for x in means}}
        torch._foreach_lerp_(means, now, [weights[x.dtype] for x in means])

    @contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module has the averaged weights."""
        self.swap(module)
        try:
            yield
        finally:
            self.swap(module)

    @torch.no_grad()
    def swap(self, module: nn.Module) -> None:
        """Exchange live and averaged weights; call again to exchange them back."""
        settle(module)
        live = dict(module.named_parameters()) | statistics(module)
        for name, mean in self.shadow.items():
            current = local(live[name]).clone()
            local(live[name]).copy_(local(mean))
            local(mean).copy_(current)


def _fused_lerp(means: list[Tensor], now: list[Tensor], weight: float, skipped: Tensor | None) -> None:
    """means += weight (now - means), unless `skipped` is 1, in a few launches for all tensors of a dtype.

    `torch._foreach_lerp_` with weights on the device launches one kernel per tensor. This is an SGD step from `means`:
    with weight decay 1 and the negative gradient `now` it computes means -= weight (means - now).
    """
    off: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    for kind in {x.dtype for x in means}:
        mine, live = ([x for x in tensors if x.dtype == kind] for tensors in (means, now))
        torch._fused_sgd_(mine, live, [], weight_decay=1.0, lr=weight, maximize=True, found_inf=skipped, **off)
