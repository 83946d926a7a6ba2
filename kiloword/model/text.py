"""The text tower: a transformer over packed captions, no padding anywhere."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import TextConfig
from kiloword.model.attention import KeyValueCache, Packing
from kiloword.model.blocks import Block, Init
from kiloword.types import Texts

ROWS = 256  # packed rows are a multiple of this where every shape costs


def _compiles_per_shape(device: torch.device, dtype: torch.dtype) -> bool:
    """Half precision on CPU: each new number of rows compiles and keeps kernels, some 20 MB for three layers."""
    half = (torch.bfloat16, torch.float16)
    if device.type != "cpu":
        return False
    return dtype in half or (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in half)


def is_special(ids: Tensor, config: TextConfig) -> Tensor:
    """Whether each token id is a special one: bool, the shape of ids. A list on the device would have to be copied."""
    found = torch.zeros_like(ids, dtype=torch.bool)
    for token in config.special.values():
        found |= ids == token
    return found


class TextTower(nn.Module):
    """Texts -> tokens."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        special = config.class_place == "last" or not config.class_sees_itself or not config.norm_words
        if special and "cls" not in config.extra_tokens:
            raise ValueError(
                "class_place last, class_sees_itself False and norm_words False speak of a class token, but there is "
                "none among extra_tokens: add cls, or leave them as they are"
            )
        self.tokens = nn.Parameter(torch.empty(config.vocab, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.mlp, config.activation, config.norm_eps, config.depth)
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.width, config.norm_eps)

    def forward(self, texts: Texts) -> Tensor:
        """Encode packed texts; returns [S, W], normed (but for words where `norm_words` is False).

        Raises: ValueError when a text is longer than the context.
        """
        if texts.longest > self.config.context:
            raise ValueError(
                f"a text of {texts.longest} tokens given to a tower for {self.config.context}; truncate it first"
            )
        packing = self.packing(texts)
        if not self.config.class_sees_itself:
            packing = replace(packing, unseen=self._classes(texts))
        x = self.embed(texts, packing)
        for block in self.blocks:
            x = block(x, packing, self.config.causal)
        out: Tensor = self.norm(x)[: len(texts.ids)]
        if self.config.norm_words:
            return out
        return torch.where(self._classes(texts)[:, None], out, x[: len(out)].to(out.dtype))

    def packing(self, texts: Texts) -> Packing:
        """Where the tokens of texts stand, in this tower and what works beside it."""
        return Packing.of(texts, ROWS if _compiles_per_shape(texts.ids.device, self.tokens.dtype) else 1)

    def embed(self, texts: Texts, packing: Packing) -> Tensor:
        """What the first block gets: [S + tail, W]."""
        place = packing.place
        if self.config.class_place == "last":
            place = place.masked_fill(self._classes(texts), self.config.context - 1)
        x = F.embedding(texts.ids, self.tokens) + F.embedding(place, self.positions)
        return F.pad(x, (0, 0, 0, packing.tail)) if packing.tail else x

    def step(self, ids: Tensor, caches: list[KeyValueCache]) -> Tensor:
        """The newest words of N texts of one length: ids [N, n] -> [N, n, W], as `forward` makes them.

        Args: caches: one a block, which hold the earlier tokens and take these. The tower must be causal.
        Raises: ValueError when a text becomes longer than the context.
        """
        assert self.config.causal, "earlier tokens would see the new ones"
        first = len(caches[0])
        if first + ids.shape[1] > self.config.context:
            raise ValueError(f"a text of {first + ids.shape[1]} tokens given to a tower for {self.config.context}")
        x = F.embedding(ids, self.tokens) + self.positions[first : first + ids.shape[1]]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, causal=True, cache=cache)
        out: Tensor = self.norm(x) if self.config.norm_words else x
        return out

    def _classes(self, texts: Texts) -> Tensor:
        """[S] bool: class tokens."""
        return texts.ids == self.config.special["cls"]

    def initial(self) -> dict[str, Init]:
        std = self.config.init_std
        return {"tokens": Init(std=std or 0.02), "positions": Init(std=std or 0.01)}
