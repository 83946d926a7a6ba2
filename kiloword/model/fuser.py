"""Cross-attention from the text tower to images: a cross-attention block after each of its blocks."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from kiloword.config.recipes import TextConfig
from kiloword.model.blocks import CrossBlock
from kiloword.model.text import TextTower
from kiloword.types import Texts


class Fuser(nn.Module):
    """Cross-attention blocks, one per block of a text tower, through which questions attend to images.

    Args: memory: width of image tokens; out: width of the decoder's memory; causal: whether words attend only to
    preceding words, as in the tower's training. Source: arXiv:2401.02137, section 4.2.
    """

    def __init__(self, config: TextConfig, memory: int, out: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        dims = (config.width, config.heads, config.mlp, config.activation, config.norm_eps, 2 * config.depth)
        self.blocks = nn.ModuleList(CrossBlock(*dims, memory=memory) for _ in range(config.depth))
        self.bridge = None if config.width == out else nn.Linear(config.width, out)

    def forward(self, tower: TextTower, texts: Texts, memory: Tensor) -> Tensor:
        """Packed questions -> packed [S + tail, W'], of which the first S rows are the tokens of the questions.

        Args: tower: the text tower; memory [T, M, W]: row n is the image of question n.
        """
        packing = tower.packing(texts)
        x = tower.embed(texts, packing)
        for text_block, block in zip(tower.blocks, self.blocks, strict=True):
            cross = cast(CrossBlock, block)
            x = cross(text_block(x, packing, self.causal), cross.keys(memory), packing)
        x = tower.norm(x) if tower.config.norm_words else x
        out: Tensor = x if self.bridge is None else self.bridge(x)
        return out
