"""The text tower as one that sees images too: after each of its blocks, one that looks at the image."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from kiloword.config.recipes import TextConfig
from kiloword.model.blocks import CrossBlock
from kiloword.model.text import TextTower
from kiloword.types import Texts


class Fuser(nn.Module):
    """Cross-attention blocks, one for each block of a text tower, that make of questions and images one sequence.

    Args: memory: width of an image's tokens; out: width of the decoder's memory; causal: whether a word sees only
    those before it, as the tower was trained. Source: arXiv:2401.02137, section 4.2.
    """

    def __init__(self, config: TextConfig, memory: int, out: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        dims = (config.width, config.heads, config.mlp, config.activation, config.norm_eps, 2 * config.depth)
        self.blocks = nn.ModuleList(CrossBlock(*dims, memory=memory) for _ in range(config.depth))
        self.bridge = None if config.width == out else nn.Linear(config.width, out)

    def forward(self, tower: TextTower, texts: Texts, memory: Tensor) -> Tensor:
        """Packed questions -> packed [S + tail, W'], of which the first S are the questions' tokens.

        Args: tower: whose blocks these follow; memory [T, M, W], row n of the image that question n is about.
        """
        packing = tower.packing(texts)
        x = tower.embed(texts, packing)
        for own, block in zip(tower.blocks, self.blocks, strict=True):
            cross = cast(CrossBlock, block)
            x = cross(own(x, packing, self.causal), cross.keys(memory), packing)
        x = tower.norm(x) if tower.config.norm_words else x
        out: Tensor = x if self.bridge is None else self.bridge(x)
        return out
