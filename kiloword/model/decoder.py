"""Decoders with cross-attention: text from images, images from text.

Each layer is a self-attention block and a cross-attention block, each with its own MLP, as in CoCa. Source:
arXiv:2401.02137, section 3.1; open_clip's CoCa.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ImageConfig, ModelConfig, TextConfig
from kiloword.model.attention import KeyValueCache, Packing
from kiloword.model.blocks import Block, CrossBlock, Init, Keys, as_bool, take
from kiloword.model.image import extra, grid
from kiloword.types import Texts


class Layer(nn.Module):
    """A self-attention block and, if there is a memory, a cross-attention block."""

    def __init__(self, config: TextConfig | ImageConfig, depth: int, memory: int | None) -> None:
        super().__init__()
        blocks = depth if memory is None else 2 * depth  # number of residual blocks
        self.own = Block(config, blocks)
        self.cross = None if memory is None else CrossBlock(config, blocks, memory)

    def forward(
        self,
        x: Tensor,
        keys: Keys | None,
        packing: Packing | None = None,
        packing_k: Packing | None = None,
        causal: bool = False,
        cache: KeyValueCache | None = None,
        packing_q: Packing | None = None,
        only: Tensor | None = None,
    ) -> Tensor:
        """Args: packing_q: packing of x by rows of the memory, if several texts share a row; only: see `Block`."""
        x = self.own(x, packing, causal, cache, only)
        if self.cross is None:
            return x
        assert keys is not None
        out: Tensor = self.cross(x, keys, packing_q or packing, packing_k)
        return out

    def keys(self, memory: Tensor | None) -> Keys | None:
        """Keys and values of the cross-attention block."""
        return None if self.cross is None or memory is None else self.cross.keys(memory)


def predicted(config: TextConfig) -> int:
    """Number of ids that can be predicted: all but trailing special ids of the vocabulary, which never occur next."""
    silent = {i for name, i in config.special.items() if name != "end"}
    return max(set(range(config.vocab)) - silent) + 1


class TextDecoder(nn.Module):
    """From outputs of the text tower and a memory to logits of the next word. Has the width of the text tower.

    V' of the vocabulary's V ids can be predicted (`predicted`).

    Args: depth: number of layers; memory: width of the memory; tied: share the output weight with the text tower's
    token embedding, divided by sqrt(W), so that logits start small whatever its scale.
    """

    def __init__(self, config: TextConfig, depth: int, memory: int, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, depth, memory) for _ in range(depth))
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.words = predicted(config)
        self.output = None if tied else nn.Parameter(torch.empty(self.words, config.width))

    def forward(
        self,
        x: Tensor,
        memory: list[Keys],
        packing: Packing,
        packing_k: Packing | None = None,
        packing_q: Packing | None = None,
    ) -> Tensor:
        """Packed [S, W] -> [S, W], normed; logits are its products with `table`.

        Args: x [S, W] or [S + tail, W]; memory: result of `remember`, row n for text n; packing_k: of a packed memory;
        packing_q: packing of x by rows of the memory, if several texts share a row.
        """
        for layer, keys in zip(self.layers, memory, strict=True):
            x = layer(x, keys, packing, packing_k, causal=True, packing_q=packing_q)
        out: Tensor = self.norm(x)
        return out

    def remember(self, memory: Tensor) -> list[Keys]:
        """Keys and values of a memory for each layer: dense [N, M, W'] or packed [S, W']."""
        return [layer.keys(memory) for layer in self.layers]  # type: ignore[operator]

    def step(
        self, x: Tensor, memory: list[Keys], caches: list[KeyValueCache], packing_k: Packing | None = None
    ) -> Tensor:
        """Decode the newest tokens of N texts [N, n, W], which are appended to `caches` -> [N, n, W], normed.

        Args: memory: result of `remember`; if it has fewer rows than N, consecutive texts (beams) share a row.
        """
        for layer, keys, cache in zip(self.layers, memory, caches, strict=True):
            x = layer(x, keys, packing_k=packing_k, causal=True, cache=cache)
        out: Tensor = self.norm(x)
        return out

    def table(self, tokens: Tensor) -> Tensor:
        """Output weight [V', W]: logits are x @ table.T; tokens [V, W]: the text tower's embedding."""
        return tokens[: self.words] * tokens.shape[1] ** -0.5 if self.output is None else self.output

    def initial(self) -> dict[str, Init]:
        return {} if self.output is None else {"output": Init(std=self.output.shape[1] ** -0.5)}


class ImageDecoder(nn.Module):
    """From outputs of the image tower for a masked image, and text tokens, to what is masked: pixels, or tokens of a
    trunk. Has the image tower's width.

    Args: depth: number of layers; guided: whether to attend to text; dropped: masked patches were dropped in the tower;
    a mask token replaces them here; out: number of values of a patch, 0: its pixels.
    """

    def __init__(
        self, config: ModelConfig, depth: int, guided: bool = True, dropped: bool = False, out: int = 0
    ) -> None:
        super().__init__()
        image = config.image
        memory = config.text.width if guided else None
        self.before = extra(image)
        self.layers = nn.ModuleList(Layer(image, depth, memory) for _ in range(depth))
        self.norm = nn.LayerNorm(image.width, image.norm_eps)
        self.pixels = nn.Linear(image.width, out or 3 * image.patch**2)
        places = grid(image) ** 2
        self.mask_token = nn.Parameter(torch.empty(image.width)) if dropped else None
        self.positions = nn.Parameter(torch.empty(places, image.width)) if dropped else None
        self.std = image.init_std or image.width**-0.5

    def forward(
        self, tokens: Tensor, masked: Tensor, text_tokens: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Values of the masked patches: [N, m, out]; pixels in the order of `image.unfold`.

        Args: tokens [N, E + P, W], or [N, E + P - m, W] if masked patches were dropped; masked [N, m] int64, their
        indices, ascending; text_tokens packed [S, W'], text n for image n.
        """
        x = tokens if self.mask_token is None else self._whole(tokens, masked)
        for n, layer in enumerate(self.layers, 1):
            only = masked + self.before if n == len(self.layers) else None
            x = layer(x, layer.keys(text_tokens), packing_k=packing, only=only)  # type: ignore[operator]
        out: Tensor = self.pixels(self.norm(x))
        return out

    def _whole(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """[N, E + P - m, W] -> [N, E + P, W]: insert mask tokens for dropped patches, add positions to all."""
        assert self.mask_token is not None
        assert self.positions is not None
        seen = ~as_bool(masked, len(self.positions))
        rank = (seen.cumsum(1) - 1).clamp(min=0)  # index among the visible patches
        filled = take(tokens[:, self.before :], rank)
        x = torch.where(seen[..., None], filled, self.mask_token.to(tokens.dtype)) + self.positions.to(tokens.dtype)
        return torch.cat([tokens[:, : self.before], x], 1)

    def initial(self) -> dict[str, Init]:
        names = ("mask_token", "positions")
        return {name: Init(std=self.std) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class DecoderMemory:
    """Memory of a text decoder for B images (or questions about them): keys and values of each layer."""

    keys: list[Keys]  # each [B, M, H, d], or packed [S, H, d]
    texts: Texts | None = None  # B texts whose tokens they belong to, if packed

    def __len__(self) -> int:
        return len(self.keys[0][0]) if self.texts is None else len(self.texts)

    def take(self, which: Tensor) -> DecoderMemory:
        """Select rows by index [b] int64, in that order, with repeats."""
        place, texts = which, self.texts
        if texts is not None:
            lengths = texts.starts.diff()[which]
            place, texts = texts.spans(texts.starts[:-1][which], lengths, int(lengths.sum()))
        return DecoderMemory([(k[place], v[place]) for k, v in self.keys], texts)

    def packing(self) -> Packing | None:
        """Packing of the memory, if packed."""
        return None if self.texts is None else Packing.of(self.texts)
