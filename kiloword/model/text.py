"""The text tower: a transformer over packed captions, without padding."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import TextConfig
from kiloword.distributed.device import device_type
from kiloword.model.attention import KeyValueCache, Packing
from kiloword.model.blocks import Block, Init
from kiloword.model.image import check_beside
from kiloword.model.pooling import place_from_end
from kiloword.types import Texts

ROWS = 256  # number of packed rows is a multiple of this where kernels are compiled per shape


def _compiles_per_shape(device: torch.device, dtype: torch.dtype) -> bool:
    """Half precision on CPU: every new number of rows compiles and caches kernels, about 20 MB for three layers."""
    half = (torch.bfloat16, torch.float16)
    if device_type(device) != "cpu":
        return False
    return dtype in half or (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in half)


def is_special(ids: Tensor, config: TextConfig) -> Tensor:
    """Whether each token id is special: bool, the shape of ids. A loop, as `isin` would copy a list to the device."""
    special = torch.zeros_like(ids, dtype=torch.bool)
    for token in config.special.values():
        special |= ids == token
    return special


class TextTower(nn.Module):
    """Transformer: packed texts to tokens."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        special = config.class_place == "last" or not config.class_sees_itself or not config.norm_words
        if special and "cls" not in config.extra_tokens:
            raise ValueError(
                "class_place last, class_sees_itself False and norm_words False need a class token, but extra_tokens "
                "has none: add cls, or use the defaults of these options"
            )
        self.tokens = nn.Parameter(torch.empty(config.vocab, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.blocks = nn.ModuleList(
            Block(config.width, config.heads, config.mlp, config.activation, config.norm_eps, config.depth)
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        beside = config.uncertainty_blocks if "unc" in config.extra_tokens else 0
        self.uncertainty_blocks = nn.ModuleList(
            Block(config.width, config.heads, config.mlp, config.activation, config.norm_eps, config.depth)
            for _ in range(check_beside(beside, config.depth))
        )

    def forward(self, texts: Texts) -> Tensor:
        """Encode packed texts; returns [S, W], normed (only class tokens if `norm_words` is False).

        Raises: ValueError when a text is longer than the context.
        """
        if texts.longest > self.config.context:
            raise ValueError(
                f"a text has {texts.longest} tokens, but the tower's context is {self.config.context}: truncate it"
            )
        packing = self.packing(texts)
        if not self.config.class_sees_itself:
            packing = replace(packing, unseen=self._classes(texts))
        if self.uncertainty_blocks:  # "unc" is a place of the output alone: nothing attends to it
            unseen = texts.ids == self.config.special["unc"]
            packing = replace(packing, unseen=unseen if packing.unseen is None else packing.unseen | unseen)
        x, beside = self.embed(texts, packing), None
        for n, block in enumerate(self.blocks):
            if self.uncertainty_blocks and n == self.config.depth - len(self.uncertainty_blocks):
                beside = self._beside(x, texts, packing)
            x = block(x, packing, self.config.causal)
        out: Tensor = self.norm(x)[: len(texts.ids)]
        if not self.config.norm_words:
            out = torch.where(self._classes(texts)[:, None], out, x[: len(out)].to(out.dtype))
        if beside is None:
            return out
        return out.index_copy(0, texts.starts[1:] - place_from_end(self.config, "unc"), beside.to(out.dtype))

    def _beside(self, x: Tensor, texts: Texts, packing: Packing) -> Tensor:
        """Outputs [T, W] of a second path, not normed: its class tokens, or without any its end tokens."""
        for block in self.uncertainty_blocks:
            x = block(x, packing, self.config.causal)
        has_class = "cls" in self.config.extra_tokens
        from_end = place_from_end(self.config, "cls") if has_class else len(self.config.extra_tokens) + 1
        return x.index_select(0, texts.starts[1:] - from_end)

    def packing(self, texts: Texts) -> Packing:
        """Packing of texts for this tower and its decoders."""
        return Packing.of(texts, ROWS if _compiles_per_shape(texts.ids.device, self.tokens.dtype) else 1)

    def embed(self, texts: Texts, packing: Packing) -> Tensor:
        """Input of the first block: [S + tail, W]."""
        place = packing.place
        if self.config.class_place == "last":
            place = place.masked_fill(self._classes(texts), self.config.context - 1)
        x = F.embedding(texts.ids, self.tokens) + F.embedding(place, self.positions)
        return F.pad(x, (0, 0, 0, packing.tail)) if packing.tail else x

    def step(self, ids: Tensor, caches: list[KeyValueCache]) -> Tensor:
        """Encode the newest words of N texts of equal length: ids [N, n] -> [N, n, W], as in `forward`.

        Args: caches: one per block, with the earlier tokens; these are appended. The tower must be causal.
        Raises: ValueError when a text becomes longer than the context.
        """
        assert self.config.causal, "earlier tokens would attend to new ones"
        first = len(caches[0])
        length = first + ids.shape[1]
        if length > self.config.context:
            raise ValueError(f"a text has {length} tokens, but the tower's context is {self.config.context}")
        x = F.embedding(ids, self.tokens) + self.positions[first:length]
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
