"""Parameters by part, and bytes of weights, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kiloword.config.recipes import OptimConfig
from kiloword.methods.llip.pooling import Attention
from kiloword.training.engine import units
from kiloword.training.learner import Learner
from kiloword.training.optimizer import groups

NORM = 16  # bytes: the optimizer's running gradient norm and its weight
TABLES = ("tokens", "positions", "class_token", "extra_tokens", "uncertainty_token", "mask_token")


def parts(learner: Learner) -> dict[str, int]:
    """Part of the model -> number of parameters: towers and decoders without their tables, head, embeddings."""
    counts = {"image tower": 0, "text tower": 0}
    counts |= {name.replace("_", " "): 0 for name in learner.model.more} | {"head": 0, "embeddings": 0}
    for name, p in learner.named_parameters():
        words = name.split(".")
        if words[-1] in TABLES:
            part = "embeddings"
        elif words[0] == "terms":
            part = "terms"
        else:
            part = (words[2] if words[1] == "more" else words[1]).replace("_", " ")
        counts[part] = counts.get(part, 0) + p.numel()
    return counts


def total(learner: Learner) -> int:
    return sum(p.numel() for p in learner.parameters())


@dataclass(frozen=True)
class Held:
    """Bytes that one GPU holds when it holds everything."""

    weights: float
    gradients: float
    optimizer: float
    average: float


def bytes_of(learner: Learner, optim: OptimConfig, precision: str) -> Held:
    """Weights and gradients in fp32 (under bf16 too: autocast keeps them so), states as the optimizer makes them.

    AdamW has two moments a parameter and a step count of 4 bytes a tensor, Muon one moment, both together a running
    gradient norm; an average of the weights is one more copy of what learns.
    """
    size = 8 if precision == "fp64" else 4
    learning = [p for p in learner.parameters() if p.requires_grad]
    grown = sum(p.numel() for p in learning)
    states = float(NORM)
    for kind, members in groups(learner, optim).items():
        numbers = sum(p.numel() for _, p in members)
        states += numbers * size if kind.endswith("muon") else 2 * numbers * size + 4 * len(members)
    return Held(total(learner) * size, grown * size, states, grown * size if optim.ema else 0.0)


def in_products(learner: Learner) -> int:
    """Numbers of the weights that matrix products read: those of which autocast makes copies in half precision."""
    counts = 0
    for part in learner.model.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            counts += part.weight.numel()
        elif isinstance(part, Attention):
            counts += part.key.numel() + part.value.numel()
    return counts


@dataclass(frozen=True)
class ShardedParameters:
    """Parameters as FSDP holds them, in numbers."""

    sharded: int  # matrices in blocks, gathered one by one
    root: int  # of towers and decoders, in no block: gathered once a micro-batch
    replicated: int  # vectors, head and terms
    largest: int  # block
    blocks: int


def shards(learner: Learner) -> ShardedParameters:
    """How `engine.shard` cuts a learner."""
    sizes = [matrices(unit) for unit in units(learner.model)]
    root = matrices(learner.model) - matrices(learner.model.head) - sum(sizes)
    return ShardedParameters(sum(sizes), root, total(learner) - sum(sizes) - root, max(sizes), len(sizes))


def matrices(module: nn.Module) -> int:
    """Numbers of its parameters but for vectors: of what can be sharded."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)
