"""The text tower: a transformer over packed captions, no padding anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.recipes import TextConfig
from kiloword.towers.attention import Packing
from kiloword.towers.blocks import Block, Init
from kiloword.types import Texts


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
        packing = Packing.of(texts)
        x = F.embedding(texts.ids, self.tokens) + F.embedding(packing.place, self.positions)
        for block in self.blocks:
            x = block(x, packing, self.config.causal)
        out: Tensor = self.norm(x)
        return out

    def initial(self) -> dict[str, Init]:
        std = self.config.init_std
        return {"tokens": Init(std=std or 0.02), "positions": Init(std=std or 0.01)}
