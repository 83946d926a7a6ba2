"""Pool tower tokens to one vector per image or text, before projection."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from kiloword.config.recipes import HeadConfig, ImageConfig, TextConfig
from kiloword.model.attention import HALF, Packing, attention
from kiloword.model.blocks import CrossAttention, Init, Mlp
from kiloword.model.image import extra, grid
from kiloword.types import Texts


def at_least_float(x: Tensor) -> Tensor:
    """Convert half precision to single; single and double stay."""
    return x.float() if x.dtype in HALF else x


class ImagePool(nn.Module):
    """[I, E + P, W] -> [I, W]: class token, or mean, maximum or attention of the patches; `width`: of the output."""

    def __init__(self, config: ImageConfig, head: HeadConfig) -> None:
        super().__init__()
        kind = head.image_pool
        if kind == "cls" and not config.class_token:
            raise ValueError("image_pool cls needs a tower with class_token; choose mean, max or map without one")
        self.kind = kind
        self.extra = extra(config)
        self.map = MapPool(config) if kind == "map" else None
        self.attention = AttentionPool(config) if kind == "attention" else None
        self.attentional = AttentionalPool(config, head) if kind == "attentional" else None
        self.width = config.width if self.attentional is None else self.attentional.width

    def memory(self, tokens: Tensor) -> Tensor:
        """Input of a text decoder's cross-attention: all tokens, or the pooled caption queries [I, Q, W']."""
        return tokens if self.attentional is None else self.attentional(tokens, slice(1, None))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.kind == "cls":
            return tokens[:, 0]
        if self.attentional is not None:
            pooled: Tensor = self.attentional(tokens, slice(0, 1))
            return pooled[:, 0]
        patches = tokens[:, self.extra :]
        if (pool := self.map or self.attention) is not None:
            out: Tensor = pool(patches)
            return out
        return patches.mean(1) if self.kind == "mean" else patches.amax(1)


class MapPool(CrossAttention):
    """Multi-head attention pooling: a learned probe attends to the patches, then an MLP (arXiv:2303.15343)."""

    def __init__(self, config: ImageConfig) -> None:
        width = config.width
        super().__init__(width, config.heads, width)
        self.config = config
        self.probe = nn.Parameter(torch.empty(width))
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.mlp = Mlp(width, config.mlp, config.activation)

    def forward(self, patches: Tensor) -> Tensor:  # type: ignore[override]
        """[I, P, W] -> [I, W]."""
        q = self.q(self.probe).view(1, 1, self.heads, -1).expand(patches.shape[0], -1, -1, -1)
        x = self.out(attention(q, *self.keys(patches)).flatten(-2))[:, 0]
        out: Tensor = x + self.mlp(self.norm(x))
        return out

    def initial(self) -> dict[str, Init]:
        return {"probe": Init(std=self.config.init_std or self.config.width**-0.5)}


class AttentionPool(CrossAttention):
    """The mean of the patches attends to itself and to all of them (arXiv:2103.00020, section 2.4)."""

    def __init__(self, config: ImageConfig) -> None:
        width = config.width
        super().__init__(width, config.heads, width)
        del self.out  # the head's projection follows
        self.std = config.init_std or width**-0.5
        self.positions = nn.Parameter(torch.empty(1 + grid(config) ** 2, width))  # the mean's first

    def forward(self, patches: Tensor) -> Tensor:  # type: ignore[override]
        """[I, P, W] -> [I, W], the heads side by side."""
        x = torch.cat([patches.mean(1, keepdim=True), patches], 1) + self.positions
        q = self.q(x[:, :1]).unflatten(-1, (self.heads, -1))
        return attention(q, *self.keys(x)).flatten(-2)[:, 0]

    def initial(self) -> dict[str, Init]:
        return {"positions": Init(std=self.std)}


class AttentionalPool(nn.Module):
    """Learned queries attend to all tokens: one for the vector, the others for a text decoder (CoCa, open_clip)."""

    def __init__(self, config: ImageConfig, head: HeadConfig) -> None:
        super().__init__()
        if head.pool_queries < 1:
            raise ValueError(f"pool_queries is {head.pool_queries}: expected at least 1 for the text decoder")
        self.width = head.pool_width or config.width
        self.probes = nn.Parameter(torch.empty(1 + head.pool_queries, self.width))
        self.norm_query = nn.LayerNorm(self.width, config.norm_eps)
        self.attention = CrossAttention(self.width, head.pool_heads, config.width)
        self.norm = nn.LayerNorm(self.width, config.norm_eps)

    def forward(self, tokens: Tensor, which: slice) -> Tensor:
        """Tokens [I, E + P, W] -> outputs of the queries `which` [I, q, W']."""
        query = self.norm_query(self.probes[which]).expand(tokens.shape[0], -1, -1)
        keys = self.attention.keys(tokens)  # normed by the tower already
        out: Tensor = self.norm(self.attention(query, keys, None, None))
        return out

    def initial(self) -> dict[str, Init]:
        return {"probes": Init(std=self.width**-0.5)}


class TextPool(nn.Module):
    """Packed [S, W] -> [T, W]: end (or class) token, or mean or maximum of tokens."""

    def __init__(self, config: TextConfig, kind: Literal["last", "mean", "max"]) -> None:
        super().__init__()
        self.kind = kind
        self.extra = len(config.extra_tokens)
        self.from_end = place_from_end(config, "cls")

    def forward(self, tokens: Tensor, texts: Texts) -> Tensor:
        if self.kind == "last":
            return tokens.index_select(0, texts.starts[1:] - self.from_end)
        packing, every, mean = Packing.of(texts), texts.starts.diff(), self.kind == "mean"
        lengths = every - self.extra  # mean and maximum include words, start and end
        words = packing.place < lengths[packing.text]
        read = tokens * words[:, None] if mean else tokens.masked_fill(~words[:, None], -math.inf)
        out: Tensor = torch.segment_reduce(read, "sum" if mean else "max", lengths=every, axis=0, unsafe=True)
        return out / lengths[:, None] if mean else out


def place_from_end(config: TextConfig, name: str) -> int:
    """Position of an extra token, else of the end token, counted from the end of each text; 1: the last token."""
    return len(config.extra_tokens) - (config.extra_tokens.index(name) if name in config.extra_tokens else -1)
