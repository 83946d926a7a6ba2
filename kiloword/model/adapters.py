"""Low-rank adapters of a pretrained tower's linear layers and 1x1 convolutions (LoRA, arXiv:2106.09685).

An adapter is a module `lora` of the layer it adapts, and a forward hook that adds its output: no other module, and no
name of another parameter, changes. `merge` adds it to the layer's weight.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kiloword.config.recipes import LoraConfig
from kiloword.errors import article, count, suggestion
from kiloword.model.blocks import STACKED, Init
from kiloword.model.layers import depths, layers_of, trunk_layers
from kiloword.model.model import Model, first_values

MARK = ".lora."  # in the names of adapters: LAYER.lora.a beside LAYER.weight
PARTS = ("a", "b", "scale")
_TARGET = re.compile(r"(?:(image|text):)?(?:(\d{1,4})(?:-(\d{1,4}))?:)?(\w+(?:\.\w+)*(?:,\w+(?:\.\w+)*)*)")
Layer = nn.Linear | nn.Conv2d


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """weight + scale B A (arXiv:2106.09685, eq. 3), in the dtype of the weight.

    Args: weight [O, I] or [O, I, 1, 1] of n stacked matrices; a [n r, I], b [O, r], n matrices of rank r each; scale:
    alpha / r.
    """
    stacked = len(a) // b.shape[1]
    changes = [up @ down for down, up in zip(a.chunk(stacked), b.chunk(stacked), strict=True)]
    return (weight + scale * torch.cat(changes).view_as(weight)).to(weight.dtype)


def adapters_of(name: str, known: Mapping[str, object]) -> list[str]:
    """Names of the adapter's tensors of the parameter `name`, in the order of `merge`; none where it has none."""
    names = [f"{name.removesuffix('.weight')}{MARK}{part}" for part in PARTS]
    return names if name.endswith(".weight") and names[0] in known else []


class LowRank(nn.Module):
    """scale B A x of a layer (eq. 3): A starts as N(0, 1/I), B as 0, so that the layer starts unchanged.

    A fused projection such as `qkv` is several matrices; each has its own A and B of this rank, as separate ones would.

    Args: layer: nn.Linear, or nn.Conv2d with a 1x1 kernel in one group; stacked: number of matrices in its weight.
    """

    scale: Tensor

    def __init__(self, layer: Layer, rank: int, alpha: float, stacked: int = 1) -> None:
        super().__init__()
        weight, self.stacked = layer.weight, stacked
        outputs, inputs = weight.shape[:2]
        like: Any = {"dtype": weight.dtype, "device": "cpu" if weight.is_meta else weight.device}
        self.a = nn.Parameter(torch.empty(stacked * rank, inputs, **like))
        self.b = nn.Parameter(torch.empty(outputs, rank, **like))
        self.register_buffer("scale", torch.tensor(alpha / rank, **like))
        self.stride = layer.stride if isinstance(layer, nn.Conv2d) else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I], or [N, I, H, W] of a convolution -> [..., O]."""
        if self.stride is not None:
            x = x[..., :: self.stride[0], :: self.stride[1]].movedim(1, -1)
        inner = (nn.functional.linear(x, self.a) * self.scale).chunk(self.stacked, -1)
        out = torch.cat(
            [nn.functional.linear(z, b) for z, b in zip(inner, self.b.chunk(self.stacked), strict=True)], -1
        )
        return out if self.stride is None else out.movedim(-1, 1)

    def initial(self) -> dict[str, Init]:
        return {"a": Init(std=self.a.shape[1] ** -0.5), "b": Init()}


def _add(layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Forward hook of an adapted layer."""
    added: Tensor = layer.lora(inputs[0])  # type: ignore[operator]
    return out + added


@dataclass(frozen=True)
class _Target:
    """Layers to adapt, as the user wrote them."""

    text: str
    tower: str  # "" is any
    blocks: range | None
    names: tuple[str, ...]

    @staticmethod
    def read(text: str) -> _Target:
        """Raises: ValueError for text of another form."""
        parts = _TARGET.fullmatch(text)
        if parts is None:
            raise ValueError(
                f"--lora.targets {text!r}: expected [image:|text:][BLOCKS:]NAME,..., such as qkv,out or image:8-11:qkv."
            )
        tower, first, last, names = parts.groups()
        blocks = None if first is None else range(int(first), int(last or first) + 1)
        return _Target(text, tower or "", blocks, tuple(names.split(",")))


def attach(model: Model, config: LoraConfig, seed: int, pretrained: Collection[str], new: Collection[str] = ()) -> str:
    """Adapt the layers that the targets name, and freeze all else in the base of their towers.

    The base is the trunk of a tower that has one, and else the whole tower. Adapters start from the seed and their
    names, so that a run begins as its base model.

    Args: pretrained: towers that may be adapted, "image", "text"; new: names of parameters that are not pretrained,
    such as tokens that the method adds; they are trained.
    Returns: a note about them. Raises: ValueError for a target without layers, or a rank above that of a matrix.
    """
    if not pretrained:
        raise ValueError("--lora.rank: LoRA adapts pretrained weights, and both towers start from random ones: --init.")
    layers = {
        path: layer for target in config.targets for path, layer in _layers(model, _Target.read(target), pretrained)
    }
    for tower in {path.partition(".")[0] for path in layers}:
        prefix, base = _base(getattr(model, tower))
        for name, p in base.named_parameters():
            p.requires_grad_(p.requires_grad and f"{tower}.{prefix}{name}" in new)
    for path, layer in layers.items():
        stacked = STACKED.get(f".{path.rpartition('.')[2]}.weight", 1)
        most = min(len(layer.weight) // stacked, layer.weight.shape[1])
        if config.rank > most:
            raise ValueError(
                f"--lora.rank is {config.rank}, but {path} has matrices of {len(layer.weight) // stacked} x "
                f"{layer.weight.shape[1]}: expected at most {most}."
            )
        layer.lora = LowRank(layer, config.rank, config.alpha, stacked)
        for name, values in first_values(layer.lora, seed, ("a", "b"), f"{path}{MARK}"):
            getattr(layer.lora, name).data.copy_(values)
        layer.register_forward_hook(_add)
    where = " and ".join(
        f"{count(n, 'layer')} of the {tower} tower"
        for tower in ("image", "text")
        if (n := sum(path.startswith(f"{tower}_tower.") for path in layers))
    )
    return f"LoRA of rank {config.rank}, alpha {config.alpha:g}, on {where}."


def _base(tower: nn.Module) -> tuple[str, nn.Module]:
    """What adapters adapt: the prefix of its names in the tower, and the module."""
    trunk = getattr(tower, "trunk", None)
    return ("", tower) if trunk is None else ("trunk.", trunk)


def _layers(model: Model, target: _Target, pretrained: Collection[str]) -> Iterator[tuple[str, Layer]]:
    """Paths in the model and modules of a target's layers. Raises: ValueError as `attach`."""
    if target.tower and target.tower not in pretrained:
        raise ValueError(
            f"--lora.targets {target.text}: the {target.tower} tower starts from random weights, and LoRA adapts "
            "pretrained ones. Give --init MODEL, or omit this target."
        )
    towers = [target.tower] if target.tower else list(pretrained)
    candidates = {
        path: part
        for tower in towers
        for path, part in _modules(f"{tower}_tower", getattr(model, f"{tower}_tower"), target)
    }
    for name in target.names:
        named = {path: part for path, part in candidates.items() if f".{path}".endswith(f".{name}")}
        fitting = {path: part for path, part in named.items() if _fits(part)}
        if not fitting:
            raise ValueError(_no_layer(name, target, named, [path for path, part in candidates.items() if _fits(part)]))
        yield from fitting.items()  # type: ignore[misc]


def _modules(path: str, tower: nn.Module, target: _Target) -> Iterator[tuple[str, nn.Module]]:
    """Modules in the base of a tower, in the target's blocks, by path in the model. Raises: ValueError as `attach`.

    torch's attention is omitted: it reads the weights of its layers and calls none of them.
    """
    prefix, base = _base(tower)
    layer_of, count = depths(tower), trunk_layers(tower) or len(layers_of(tower))
    if target.blocks is not None and (not target.blocks or target.blocks[-1] >= count):
        raise ValueError(f"--lora.targets {target.text}: the base of {path} has the blocks 0 to {count - 1}.")
    for name, part in base.named_modules():
        called = not isinstance(base.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)
        at = f"{prefix}{name}"
        if called and (target.blocks is None or layer_of.get(f"{at}.weight", -1) in target.blocks):
            yield f"{path}.{at}", part


def _fits(part: nn.Module) -> bool:
    """Whether a module can be adapted."""
    if isinstance(part, nn.Conv2d):
        return part.kernel_size == (1, 1) and part.padding == (0, 0) and part.groups == 1
    return isinstance(part, nn.Linear)


def _no_layer(name: str, target: _Target, named: Mapping[str, nn.Module], known: Iterable[str]) -> str:
    """The message for a name that matches no layer that can be adapted."""
    where = f"--lora.targets {target.text}: "
    if named:
        path, part = next(iter(named.items()))
        kind = type(part).__name__
        return f"{where}{path} is {article(kind)}; LoRA adapts linear layers and 1x1 convolutions of one group."
    ends = sorted({path.rpartition(".")[2] for path in known})
    return f"{where}no layer's name ends in {name!r}; there are {', '.join(ends) or 'none'}.{suggestion(name, ends)}"
