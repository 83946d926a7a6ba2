"""The text tower: a transformer over packed captions, no padding anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.recipes import TextConfig
from kiloword.towers.attention import Packing
from kiloword.towers.blocks import Block, Init
from kiloword.types import Texts

ROWS = 256  # packed rows are a multiple of this where every shape costs


def _compiles_per_shape(device: torch.device, dtype: torch.dtype) -> bool:
    """Half precision on CPU: each new number of rows compiles and keeps kernels, some 20 MB for three layers."""
    half = (torch.bfloat16, torch.float16)
    if device.type != "cpu":
        return False
    return dtype in half or (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in half)


class TextTower(nn.Module):
    """Texts -> tokens."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Parameter(torch.empty(config.vocab, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.mlp, config.activation, config.norm_eps, config.depth)
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.width, config.norm_eps)

    def forward(self, texts: Texts) -> Tensor:
        """Encode packed texts; returns [S, W], normed.

        Raises: ValueError when a text is longer than the context.
        """
        if texts.longest > self.config.context:
            raise ValueError(
                f"a text of {texts.longest} tokens given to a tower for {self.config.context}; truncate it first"
            )
        packing = Packing.of(texts, ROWS if _compiles_per_shape(texts.ids.device, self.tokens.dtype) else 1)
        x = F.embedding(texts.ids, self.tokens) + F.embedding(packing.place, self.positions)
        x = F.pad(x, (0, 0, 0, packing.tail)) if packing.tail else x
        for block in self.blocks:
            x = block(x, packing, self.config.causal)
        out: Tensor = self.norm(x)
        return out[: len(texts.ids)]

    def initial(self) -> dict[str, Init]:
        std = self.config.init_std
        return {"tokens": Init(std=std or 0.02), "positions": Init(std=std or 0.01)}
