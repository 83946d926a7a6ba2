"""Low-rank adapters of a pretrained tower's linear layers and 1x1 convolutions (LoRA, arXiv:2106.09685).

An adapter is a module `lora` of the layer it adapts, and a forward hook that adds its output: no other module, and no
name of another parameter, changes. `merge` adds it to the layer's weight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from kiloword.config.recipes import LoraConfig
from kiloword.errors import count, suggestion
from kiloword.model.blocks import STACKED, Init, depths, trunk_layers
from kiloword.model.model import Model, first_values

MARK = ".lora."  # in the names of adapters: LAYER.lora.a beside LAYER.weight
TARGET = re.compile(r"(?:(image|text):)?(?:(\d+)(?:-(\d+))?:)?([\w.,]+)")
Layer = nn.Linear | nn.Conv2d


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """weight + scale B A (arXiv:2106.09685, eq. 3), in the dtype of the weight.

    Args: weight [O, I] or [O, I, 1, 1] of n stacked matrices; a [n r, I], b [O, r], n of rank r; scale: alpha / r.
    """
    stacked = len(a) // b.shape[1]
    changes = [up @ down for down, up in zip(a.chunk(stacked), b.chunk(stacked), strict=True)]
    return (weight + scale * torch.cat(changes).view_as(weight)).to(weight.dtype)


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


def attach(model: Model, config: LoraConfig, seed: int, pretrained: Collection[str], new: Collection[str] = ()) -> str:
    """Adapt the layers that the targets name, and freeze all else in the base of their towers.

    The base is the trunk of a tower that has one, and else the whole tower. Adapters start from the seed and their
    names, so that a run begins as its base model.

    Args: pretrained: towers that may be adapted, "image", "text"; new: names of parameters that are not pretrained,
    such as tokens that the method adds; they are trained.
    Returns: a note about them. Raises: ValueError for a target without layers.
    """
    if not pretrained:
        raise ValueError("--lora.rank: LoRA adapts pretrained weights, and both towers start from random ones: --init.")
    auto = {"auto": "all" if model.config.image.trunk.whole else "qkv,out"}
    layers = {p: layer for one in config.targets for p, layer in _layers(model, auto.get(one, one), pretrained)}
    adapted = Counter(path.partition("_")[0] for path in layers)
    for tower in adapted:
        for name, p in model.named_parameters():
            if name.startswith(_base(model, tower)):
                p.requires_grad_(p.requires_grad and name in new)
    for path, layer in layers.items():
        stacked = STACKED.get(f".{path.rpartition('.')[2]}.weight", 1)
        layer.lora = LowRank(layer, config.rank, config.alpha, stacked)
        for name, values in first_values(layer.lora, seed, ("a", "b"), f"{path}{MARK}"):
            getattr(layer.lora, name).data.copy_(values)
        layer.register_forward_hook(_add)
    where = " and ".join(f"{count(n, 'layer')} of the {tower} tower" for tower, n in sorted(adapted.items()))
    return f"LoRA of rank {config.rank}, alpha {config.alpha:g}, on {where}."


def _base(model: Model, tower: str) -> str:
    """What stands before the names of what a tower's adapters adapt."""
    return f"{tower}_tower.{'trunk.' if trunk_layers(getattr(model, f'{tower}_tower')) else ''}"


def _layers(model: Model, target: str, pretrained: Collection[str]) -> Iterator[tuple[str, Layer]]:
    """Layers of a target, "[image:|text:][BLOCKS:]NAME,...", by path. Raises: ValueError as `attach`.

    torch's attention reads the weights of its layers and calls none of them: they cannot be adapted.
    """
    parts = TARGET.fullmatch(target)
    if parts is None:
        raise ValueError(
            f"--lora.targets {target!r}: expected [image:|text:][BLOCKS:]NAME,..., such as qkv,out or image:8-11:qkv."
        )
    tower, first, last, names = parts.groups()
    there: dict[str, Any] = {}
    for kind in [kind for kind in pretrained if tower in (None, kind)]:
        of = depths(getattr(model, f"{kind}_tower"))
        for path, part in model.named_modules():
            block = of.get(f"{path.partition('.')[2]}.weight", -1)
            inside = path.startswith(_base(model, kind)) and (not first or int(first) <= block <= int(last or first))
            linear = isinstance(part, nn.Linear) and not isinstance(part, NonDynamicallyQuantizableLinear)
            if isinstance(part, nn.Conv2d):
                linear = part.kernel_size == (1, 1) and part.padding == (0, 0) and part.groups == 1
            if inside and linear:
                there[path] = part
    for name in names.split(","):
        found = {path: layer for path, layer in there.items() if name == "all" or f".{path}".endswith(f".{name}")}
        if not found:
            ends = sorted({path.rpartition(".")[2] for path in there})
            raise ValueError(
                f"--lora.targets {target}: no linear layer and no 1x1 convolution of a pretrained tower is named "
                f"{name!r} there, but {', '.join(ends) or 'none'}.{suggestion(name, ends)}"
            )
        yield from found.items()
