"""Transformer blocks, and initial distributions of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import Activation, ImageConfig, TextConfig
from kiloword.model.attention import KeyValueCache, Packing, attention

STACKED = {".qkv.weight": 3, ".kv.weight": 2}  # parameters of several stacked matrices, and their number
Keys = tuple[Tensor, Tensor]
"""Keys and values of a memory: each [N, M, H, d], or packed [S, H, d]."""


@dataclass(frozen=True)
class Init:
    """Initial distribution N(mean, std^2) of a parameter; std 0: a constant.

    Modules return it from a method `initial() -> dict[str, Init]`, keyed by parameter names.
    """

    mean: float = 0.0
    std: float = 0.0


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Three variants of GELU: exact, x sigmoid(1.702 x) (OpenAI's weights), tanh (SigLIP's later weights)."""
    if kind == "quick_gelu":
        return F.silu(1.702 * x) / 1.702
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def take(x: Tensor, places: Tensor) -> Tensor:
    """x [N, L, W], places [N, n] int64 -> [N, n, W]."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def as_bool(places: Tensor, n: int) -> Tensor:
    """Places [N, m] int64 of n -> mask [N, n] bool."""
    return places.new_zeros(len(places), n, dtype=torch.bool).scatter(1, places, True)


class Mlp(nn.Module):
    """Two linear layers with an activation between them: [..., width] to [..., width]."""

    def __init__(self, width: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.fc = nn.Linear(width, hidden)
        self.proj = nn.Linear(hidden, width)
        self.activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(activate(self.fc(x), self.activation))
        return out


def dividing(heads: int, width: int) -> int:
    """The number of heads. Raises: ValueError where it does not divide the width."""
    if width % heads:
        raise ValueError(f"width {width} cannot be split into {heads} heads; choose heads that divide it")
    return heads


class SelfAttention(nn.Module):
    """Multi-head self-attention with one fused projection; rows of its weight: q, k, v, each head by head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = dividing(heads, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self, x: Tensor, packing: Packing | None = None, causal: bool = False, cache: KeyValueCache | None = None
    ) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        mixed = attention(q, k, v, packing, packing, causal, cache)
        out: Tensor = self.out(mixed.flatten(-2))
        return out


class Unit(nn.Module):
    """A part of a tower that is recomputed, compiled and sharded by itself."""


class Residual(Unit):
    """A block of a tower of `depth`, initialised like CLIP's text tower (arXiv:2103.00020, public code)."""

    depth: int

    def initial(self) -> dict[str, Init]:
        width = self.get_parameter("attention.out.weight").shape[1]
        add = Init(std=(2 * self.depth * width) ** -0.5)
        return {"attention.out.weight": add, "mlp.fc.weight": Init(std=(2 * width) ** -0.5), "mlp.proj.weight": add}


class Block(Residual):
    """Pre-norm transformer block, or post-norm as in BERT; x is dense [N, L, W] or, with a packing, [S, W]."""

    def __init__(self, config: ImageConfig | TextConfig, depth: int, post_norm: bool = False) -> None:
        """Args: depth: of the tower; it scales the initial weights of residual branches."""
        super().__init__()
        self.depth, self.post_norm, width = depth, post_norm, config.width
        self.norm1 = nn.LayerNorm(width, config.norm_eps)
        self.attention = SelfAttention(width, config.heads)
        self.norm2 = nn.LayerNorm(width, config.norm_eps)
        self.mlp = Mlp(width, config.mlp, config.activation)

    def forward(
        self,
        x: Tensor,
        packing: Packing | None = None,
        causal: bool = False,
        cache: KeyValueCache | None = None,
        only: Tensor | None = None,
    ) -> Tensor:
        """only [N, n] int64: for dense x, return only these tokens [N, n, W]; all are attended to."""
        if self.post_norm:
            x = self.norm1(x + self.attention(x, packing, causal, cache))
            normed: Tensor = self.norm2(x + self.mlp(x))
            return normed
        x = x + self.attention(self.norm1(x), packing, causal, cache)
        x = x if only is None else take(x, only)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class CrossAttention(nn.Module):
    """Multi-head attention to a memory of any width; the rows of `kv` are k, v, each head by head."""

    def __init__(self, width: int, heads: int, memory: int) -> None:
        super().__init__()
        self.heads = dividing(heads, width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(memory, 2 * width)
        self.out = nn.Linear(width, width)

    def keys(self, memory: Tensor) -> Keys:
        """Keys and values of a memory, dense [N, M, W'] or packed [S, W'], each [..., H, d]."""
        k, v = self.kv(memory).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        return k, v

    def forward(self, x: Tensor, keys: Keys, packing: Packing | None, packing_k: Packing | None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1))
        if packing is None:  # rows of x that share a memory (beams) become queries of one sequence
            memories = len(keys[0]) if packing_k is None else len(packing_k)
            q = q.reshape(memories, -1, *q.shape[-2:])
        mixed = attention(q, *keys, packing, packing_k)
        out: Tensor = self.out(mixed.flatten(-2).view(x.shape))
        return out


class CrossBlock(Residual):
    """Pre-norm block of cross-attention and MLP; x is dense [N, L, W] or, with a packing, [S, W]."""

    def __init__(self, config: ImageConfig | TextConfig, depth: int, memory: int) -> None:
        """Args: depth: as of `Block`; memory: its width."""
        super().__init__()
        self.depth, width = depth, config.width
        self.norm1 = nn.LayerNorm(width, config.norm_eps)
        self.norm_memory = nn.LayerNorm(memory, config.norm_eps)
        self.attention = CrossAttention(width, config.heads, memory)
        self.norm2 = nn.LayerNorm(width, config.norm_eps)
        self.mlp = Mlp(width, config.mlp, config.activation)

    def keys(self, memory: Tensor) -> Keys:
        """Keys and values for `forward`, from a memory [N, M, W'] or packed [S, W']."""
        return self.attention.keys(self.norm_memory(memory))

    def forward(
        self, x: Tensor, keys: Keys, packing: Packing | None = None, packing_k: Packing | None = None
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), keys, packing, packing_k)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Tower(nn.Module):
    """Blocks, their norm, and a second path: blocks beside the last ones."""

    def add_blocks(self, config: ImageConfig | TextConfig, beside: int, learns: bool) -> None:
        """Args: beside: number of blocks of the second path; learns: whether the tower has tokens of its own.

        Raises: ValueError for fewer blocks than beside, or none where words, patches or own tokens need some.
        """
        kind = "image" if isinstance(config, ImageConfig) else "text"
        if not config.depth and not config.trunk.name:
            raise ValueError(f"a {kind} tower of depth 0 needs a trunk below it: --{kind}-tower, or a larger depth.")
        if not config.depth and learns:
            raise ValueError(
                f"without a block nothing fills the tokens of the {kind} tower (class, mixture, variance): choose "
                f"--model.{kind}.depth 1 or more, or omit them (--model.image.no-class-token)."
            )
        if beside > config.depth:
            raise ValueError(f"{beside} blocks for the variance beside a tower of {config.depth}: expected no more.")
        self.blocks = nn.ModuleList(Block(config, config.depth) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.uncertainty_blocks = nn.ModuleList(Block(config, config.depth) for _ in range(beside))

    def through_blocks(self, x: Tensor, *args: object, only: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What the last blocks of both paths give, not normed; None without a second path. Args: only: as of `Block`,
        for the last block of the first path."""
        beside = None
        for n, block in enumerate(self.blocks):
            if n == len(self.blocks) - len(self.uncertainty_blocks):
                beside = x
                for other in self.uncertainty_blocks:
                    beside = other(beside, *args)
            x = block(x, *args, only=only if n + 1 == len(self.blocks) else None)
        return x, beside


# layers of a tower by depth: what freezing, layer-wise learning rates and gradual unfreezing go by


def layers_of(tower: nn.Module) -> list[list[str]]:
    """Prefixes of parameter names by depth: first the trunk's, then the tower's.

    The first layer of the tower itself also holds its stem and embeddings, the last one its final norm; blocks beside
    the last ones are of their depth. A tower without blocks of its own is one layer.
    """
    trunk = getattr(tower, "trunk", None)
    below = [] if trunk is None else [[f"trunk.{prefix}" for prefix in layer] for layer in trunk.blocks()]
    units = [name for name, part in tower.named_modules() if isinstance(part, Unit) and not name.startswith("trunk.")]
    beside = [name for name in units if name.startswith("uncertainty_blocks.")]
    layers: list[list[str]] = [[name] for name in units if name not in beside] or [[]]
    for n, name in enumerate(beside):
        layers[n - len(beside)].append(name)
    tops = {name.partition(".")[0] for name, _ in tower.named_parameters()}
    layers[0] += sorted(tops - {name.partition(".")[0] for name in units} - {"trunk", "norm"})
    if "norm" in tops:
        layers[-1].append("norm")
    return below + layers


def depths(tower: nn.Module) -> dict[str, int]:
    """Parameter name -> its layer in `layers_of`; 0 for one that no layer names."""
    layers = {f"{prefix.rstrip('.')}.": depth for depth, layer in enumerate(layers_of(tower)) for prefix in layer}
    names = [name for name, _ in tower.named_parameters()]
    return {name: next((n for prefix, n in layers.items() if f"{name}.".startswith(prefix)), 0) for name in names}


def trunk_layers(tower: nn.Module) -> int:
    """Number of layers of the tower's trunk, the first ones of `layers_of`; 0 without a trunk."""
    trunk = getattr(tower, "trunk", None)
    return 0 if trunk is None else len(trunk.blocks())


def layer_factors(module: nn.Module, decay: float) -> dict[str, float]:
    """Learning-rate multipliers of layer-wise decay by parameter name. Parameters that are not listed have 1.

    Layer l of a tower's n layers (`layers_of`, l = 0 at the bottom) has decay^(n - l). Embeddings below the first block
    have decay^(n + 1). Parameters above the towers have 1. Source: arXiv:2106.08254, and its public code.
    """
    factors: dict[str, float] = {}
    for path, part in module.named_modules():
        if path.endswith(("image_tower", "text_tower")):
            top = len(layers_of(part))
            for name, depth in depths(part).items():
                below = not depth and ".0." not in name  # in no first block
                factors[f"{path}.{name}"] = decay ** (top - depth + below)
    return factors
