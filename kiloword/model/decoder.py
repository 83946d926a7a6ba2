"""Decoders: tokens of one kind that look at tokens of the other. Text from images, images from text.

Each layer is a self-attention block and a cross-attention block, each with its own MLP, as in CoCa. Source:
arXiv:2401.02137, section 3.1; open_clip's CoCa.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kiloword.config.recipes import ImageConfig, ModelConfig, TextConfig
from kiloword.model.attention import KeyValueCache, Packing
from kiloword.model.blocks import Block, CrossBlock, Init, Keys
from kiloword.model.image import extra


class Layer(nn.Module):
    """A self-attention block, then a block that looks at a memory; without a memory the first alone."""

    def __init__(self, config: TextConfig | ImageConfig, depth: int, memory: int | None) -> None:
        super().__init__()
        blocks = depth if memory is None else 2 * depth  # that add to the stream
        dims = (config.width, config.heads, config.mlp, config.activation, config.norm_eps, blocks)
        self.own = Block(*dims)
        self.cross = None if memory is None else CrossBlock(*dims, memory=memory)

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
        """Args: packing_q: x by rows of the memory, where it has fewer than texts; only: as of `Block`."""
        x = self.own(x, packing, causal, cache, only)
        if self.cross is None:
            return x
        assert keys is not None
        out: Tensor = self.cross(x, keys, packing_q or packing, packing_k)
        return out

    def keys(self, memory: Tensor | None) -> Keys | None:
        """What the cross-attention block looks at."""
        return None if self.cross is None or memory is None else self.cross.keys(memory)


def predicted(config: TextConfig) -> int:
    """How many ids can come next: all but the special ones behind the vocabulary's words, which texts do not say."""
    silent = {i for name, i in config.special.items() if name != "end"}
    words = config.vocab
    while words - 1 in silent:
        words -= 1
    return words


class TextDecoder(nn.Module):
    """What the text tower made of words, looking at a memory, to logits of the next word. As wide as the text tower.

    V' of the vocabulary's V ids can come next (`predicted`).

    Args: depth: layers; memory: width of what is looked at; tied: the output is the text tower's token table, over
    sqrt(W), so that logits start small whatever the table's scale.
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
        """Packed [S, W] -> [S, W], normed: what `table` turns into logits.

        Args: x [S, W] or [S + tail, W]; memory: as `remember` makes it, row n for text n; packing_k: of a memory that
        is packed itself; packing_q: of x with the texts that look at one row as one, where several do.
        """
        for layer, keys in zip(self.layers, memory, strict=True):
            x = layer(x, keys, packing, packing_k, causal=True, packing_q=packing_q)
        out: Tensor = self.norm(x)
        return out

    def remember(self, memory: Tensor) -> list[Keys]:
        """Keys and values, one a layer, of a memory: dense [N, M, W'] or packed [S, W']."""
        return [layer.keys(memory) for layer in self.layers]  # type: ignore[operator]

    def step(
        self, x: Tensor, memory: list[Keys], caches: list[KeyValueCache], packing_k: Packing | None = None
    ) -> Tensor:
        """The newest tokens of N texts [N, n, W], which take their place in `caches` -> [N, n, W], normed.

        Args: memory: as `remember` makes it; of fewer rows than N it belongs to as many neighbours each (beams).
        """
        for layer, keys, cache in zip(self.layers, memory, caches, strict=True):
            x = layer(x, keys, packing_k=packing_k, causal=True, cache=cache)
        out: Tensor = self.norm(x)
        return out

    def table(self, tokens: Tensor) -> Tensor:
        """[V', W], the output's weight: logits are x @ table.T; tokens [V, W]: the text tower's."""
        return tokens[: self.words] * tokens.shape[1] ** -0.5 if self.output is None else self.output

    def initial(self) -> dict[str, Init]:
        return {} if self.output is None else {"output": Init(std=self.output.shape[1] ** -0.5)}


class ImageDecoder(nn.Module):
    """What the image tower made of a masked image, looking at text tokens, to pixels. As wide as the image tower.

    Args: depth: layers; guided: whether it looks at text; dropped: masked patches did not pass the tower, and stand
    here as a token of their own.
    """

    def __init__(self, config: ModelConfig, depth: int, guided: bool = True, dropped: bool = False) -> None:
        super().__init__()
        image = config.image
        memory = config.text.width if guided else None
        self.before = extra(image)
        self.layers = nn.ModuleList(Layer(image, depth, memory) for _ in range(depth))
        self.norm = nn.LayerNorm(image.width, image.norm_eps)
        self.pixels = nn.Linear(image.width, 3 * image.patch**2)
        places = (image.size // image.patch) ** 2
        self.mask_token = nn.Parameter(torch.empty(image.width)) if dropped else None
        self.positions = nn.Parameter(torch.empty(places, image.width)) if dropped else None
        self.std = image.init_std or image.width**-0.5

    def forward(
        self, tokens: Tensor, masked: Tensor, text_tokens: Tensor | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Pixels of the masked patches: [N, m, 3 * patch^2], as `image.unfold` orders them.

        Args: tokens [N, E + P, W], or [N, E + P - m, W] where masked patches were dropped; masked [N, m] int64, their
        places, ascending; text_tokens packed [S, W'], text n for image n.
        """
        x = tokens if self.mask_token is None else self._whole(tokens, masked)
        for n, layer in enumerate(self.layers, 1):
            only = masked + self.before if n == len(self.layers) else None
            x = layer(x, layer.keys(text_tokens), packing_k=packing, only=only)  # type: ignore[operator]
        out: Tensor = self.pixels(self.norm(x))
        return out

    def _whole(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """[N, E + P - m, W] -> [N, E + P, W]: dropped patches come back as the mask token, and all get positions."""
        assert self.mask_token is not None
        assert self.positions is not None
        n, places = len(tokens), len(self.positions)
        seen = torch.ones(n, places, dtype=torch.bool, device=tokens.device).scatter(1, masked, False)
        rank = (seen.cumsum(1) - 1).clamp(min=0)  # of a seen patch among those
        patches = tokens[:, self.before :]
        filled = patches.gather(1, rank[..., None].expand(-1, -1, tokens.shape[-1]))
        x = torch.where(seen[..., None], filled, self.mask_token.to(tokens.dtype)) + self.positions.to(tokens.dtype)
        return torch.cat([tokens[:, : self.before], x], 1)

    def initial(self) -> dict[str, Init]:
        names = ("mask_token", "positions")
        given = {name: Init(std=self.std) for name in names if getattr(self, name) is not None}
        return {**given, "pixels.weight": Init(std=self.pixels.in_features**-0.5)}
