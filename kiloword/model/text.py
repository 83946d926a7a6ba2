"""The text tower: a transformer over packed captions, without padding."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import TextConfig
from kiloword.distributed.device import device_type
from kiloword.model.attention import HALF, KeyValueCache, Packing
from kiloword.model.blocks import Init, Tower
from kiloword.model.pooling import place_from_end
from kiloword.model.trunks.padded import text_trunk
from kiloword.types import Texts

LEARNED = ("mask", "pad", "cls", "unc")  # tokens that a tower on a trunk learns: hidden words, and extra tokens
ROWS = 256  # number of packed rows is a multiple of this where kernels are compiled per shape


def _compiles_per_shape(device: torch.device, dtype: torch.dtype) -> bool:
    """Half precision on CPU: every new number of rows compiles and caches kernels, about 20 MB for three layers."""
    if device_type(device) != "cpu":
        return False
    return dtype in HALF or (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") in HALF)


def is_special(ids: Tensor, config: TextConfig) -> Tensor:
    """Whether each token id is special: bool, the shape of ids. A loop, as `isin` would copy a list to the device."""
    special = torch.zeros_like(ids, dtype=torch.bool)
    for token in config.special.values():
        special |= ids == token
    return special


def prefixes(texts: Texts, cut: int) -> tuple[Tensor, Texts]:
    """Texts without their last `cut` tokens: the positions [S'] of the remaining tokens, and the shortened texts."""
    tokens = len(texts.ids) - cut * len(texts)
    place, before = texts.spans(texts.starts[:-1], texts.starts.diff() - cut, tokens)
    return place, replace(before, longest=max(texts.longest - cut, 0))


class TextTower(Tower):
    """Transformer: packed texts to tokens.

    With a trunk, words are the trunk's tokens through a linear layer, and `tokens` are the learned vectors of LEARNED.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        special = config.class_place == "last" or not config.class_sees_itself or not config.norm_words
        if special and "cls" not in config.extra_tokens:
            raise ValueError(
                "class_place last, class_sees_itself False and norm_words False need a class token: add cls to "
                "extra_tokens"
            )
        self.trunk = text_trunk(config) if config.trunk.name else None
        self.stem = nn.Linear(config.trunk.width, config.width) if config.trunk.name else None
        rows = config.vocab if self.trunk is None else len(LEARNED)
        self.tokens = nn.Parameter(torch.empty(rows, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        beside = config.uncertainty_blocks if "unc" in config.extra_tokens else 0
        self.add_blocks(config, beside, bool(config.extra_tokens))

    def forward(self, texts: Texts) -> Tensor:
        """Encode packed texts, or their trunk's tokens where they have them.

        Returns: [S, W], normed (only class tokens if `norm_words` is False).
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
        x, beside = self.through_blocks(self.embed(texts, packing), packing, self.config.causal)
        out: Tensor = self.norm(x)[: len(texts.ids)]
        if not self.config.norm_words:
            out = torch.where(self._classes(texts)[:, None], out, x[: len(out)].to(out.dtype))
        if beside is None:
            return out
        # the second path's class tokens, or without any its end tokens, are the outputs of "unc"; not normed
        tokens = beside.index_select(0, texts.starts[1:] - place_from_end(self.config, "cls"))
        return out.index_copy(0, texts.starts[1:] - place_from_end(self.config, "unc"), tokens.to(out.dtype))

    def packing(self, texts: Texts) -> Packing:
        """Packing of texts for this tower and its decoders."""
        return Packing.of(texts, ROWS if _compiles_per_shape(texts.ids.device, self.tokens.dtype) else 1)

    def embed(self, texts: Texts, packing: Packing) -> Tensor:
        """Input of the first block: [S + tail, W]."""
        place = packing.place
        if self.config.class_place == "last":
            place = place.masked_fill(self._classes(texts), self.config.context - 1)
        words = F.embedding(texts.ids, self.tokens) if self.stem is None else self._above_trunk(texts, packing)
        x = words + F.embedding(place, self.positions)
        return F.pad(x, (0, 0, 0, packing.tail)) if packing.tail else x

    def with_tokens(self, texts: Texts) -> Texts:
        """Texts with the tokens of the trunk, rows of extra tokens zero; unchanged without a trunk, or with tokens."""
        if self.trunk is None or texts.tokens is not None:
            return texts
        place, words = prefixes(texts, len(self.config.extra_tokens))
        of_words = self.trunk(words, self.packing(words))[: len(place)]
        tokens = of_words.new_zeros(len(texts.ids), of_words.shape[1]).index_copy(0, place, of_words)
        return replace(texts, tokens=tokens)

    def _above_trunk(self, texts: Texts, packing: Packing) -> Tensor:
        """[S, W]: the trunk's tokens through the stem, and learned vectors for hidden words and extra tokens."""
        assert self.stem is not None
        tokens, extra = self.with_tokens(texts).tokens, self.config.extra_tokens
        assert tokens is not None
        if tokens.shape[1] != self.config.trunk.width:
            raise ValueError(
                f"texts have tokens of width {tokens.shape[1]}, but the tower expects those of its trunk: "
                f"{self.config.trunk.width}"
            )
        row = torch.where(texts.ids == self.config.special["mask"], LEARNED.index("mask"), -1)
        from_end = texts.starts[1:][packing.text] - torch.arange(len(row), device=row.device)
        for name in extra:
            row = torch.where(from_end == place_from_end(self.config, name), LEARNED.index(name), row)
        x = self.stem(tokens.to(self.stem.weight.dtype))
        learned = F.embedding(row.clamp(min=0), self.tokens)
        return torch.where(row[:, None] < 0, x, learned.to(x.dtype))

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
