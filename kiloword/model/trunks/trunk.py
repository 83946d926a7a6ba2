"""A trunk: the tower of another library below one of kiloword, with its own parameters, in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kiloword.distributed.device import device_type
from kiloword.model.blocks import Init

# Images at once through a frozen trunk on a CPU: larger maps leave its caches, and each gets fresh pages of the system.
FEW = 4
KEPT_AT_1 = ("weight", "gamma", "lambda1", "scale")  # last words of vectors that multiply: norms, layer scales


class Trunk(nn.Module):
    """Base class of all trunks; `tokens` of a subclass is its forward pass.

    It always is in eval mode: batch norm uses its running statistics and nothing is dropped, so that results do not
    depend on how a batch is dealt to ranks. While none of its parameters is trained it keeps no activations.

    Attributes: prefix: number of tokens before the map; size: of the images that it was made for.
    """

    prefix = 0
    size: int

    def only_floats(self) -> None:
        """Leave counts and indices, which nothing learned, out of what is saved. Call it after adding modules."""
        for part in self.modules():
            part._non_persistent_buffers_set |= {
                n for n, x in part._buffers.items() if x is None or not x.is_floating_point()
            }
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.track_running_stats = False  # of training, which it never enters; else it expects its count

    def tokens(self, *inputs: Any) -> Tensor:
        """Images [I, 3, H, W], normalised, to [I, prefix + P, width]; of texts, what its tower gives it."""
        raise NotImplementedError

    def blocks(self) -> list[list[str]]:
        """Prefixes of parameter names by depth: the stem and what goes with it first, all parameters covered once."""
        raise NotImplementedError

    def forward(self, *inputs: Any) -> Tensor:
        if self.training:  # as every module begins
            self.train()
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        with torch.set_grad_enabled(trained):
            at_once = trained or len(inputs) > 1 or torch.compiler.is_exporting()
            if at_once or device_type(inputs[0].device) != "cpu" or not len(inputs[0]):
                return self.tokens(*inputs)
            return torch.cat([self.tokens(few) for few in inputs[0].split(FEW)])

    def train(self, mode: bool = True) -> Trunk:
        """Stay in eval mode."""
        super().train(False)
        return self

    def initial(self) -> dict[str, Init]:
        """Random weights for a trunk without a file: matrices and convolutions by their inputs, norms at 1."""
        return {name: _init(name, p) for name, p in self.named_parameters()}


def _init(name: str, p: Tensor) -> Init:
    last = name.rpartition(".")[2]
    if p.dim() < 2:
        return Init(1.0) if last in KEPT_AT_1 else Init()
    tables = ("embed", "token", "position")
    return Init(std=0.02 if any(word in name for word in tables) and p.dim() < 4 else p.shape[1:].numel() ** -0.5)


def trunks(module: nn.Module) -> list[Trunk]:
    """All trunks inside a module, the image tower's first."""
    return [part for part in module.modules() if isinstance(part, Trunk)]
