"""Where on an image a text looks, and how it mixes the image's tokens (arXiv:2405.00740).

Attention probabilities are recomputed from the inputs of attention modules, as fused attention keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kiloword.model.attention import Packing
from kiloword.model.blocks import CrossAttention, Keys, SelfAttention
from kiloword.model.heads import Single
from kiloword.model.image import extra, grid
from kiloword.model.model import vit
from kiloword.model.pooling import at_least_float
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.model.model import Model


@dataclass(frozen=True)
class Explanation:
    """Where T texts look on I images, on a grid of P patches.

    With mixing weights, a map is the mean of the tokens' maps, weighted by the text (mean over heads). Without, it is
    the attention of what pools, the same for every text, or how much the score falls without each patch.
    """

    scores: Tensor  # [I, T]
    maps: Tensor  # [I, T, P]; attention sums to 1
    grid: tuple[int, int]  # rows x columns = P
    about: str  # what `maps` are, for the reader of a figure
    weights: Tensor | None = None  # [I, T, M, N] mixing weights, each row of N sums to 1
    tokens: Tensor | None = None  # [I, N, P] where each token looks, sums to 1

    @property
    def shares(self) -> Tensor | None:
        """The mixing weights of tokens, mean over heads: [I, T, N]."""
        return None if self.weights is None else self.weights.mean(2)

    @property
    def entropy(self) -> Tensor | None:
        """Of the mixing weights, mean over heads: [I, T], from 0 (one token) to 1 (all tokens alike)."""
        if self.weights is None:
            return None
        entropy: Tensor = torch.special.entr(self.weights).sum(-1).mean(-1)
        return entropy / math.log(max(self.weights.shape[-1], 2))


def explain(model: Model, pixels: Tensor, texts: Features) -> Explanation:
    """Explain every pair of I images and T texts.

    Args: pixels: uint8 [I, 3, H, W]; texts: features of the texts.
    """
    blocks = list(vit(model, "explain").blocks)
    with attentions(blocks[-1].get_submodule("attention") if blocks else None) as seen:
        tokens, images = model.encode_image(pixels)
    itself = torch.eye(tokens.shape[1]).to(tokens).expand(len(tokens), -1, -1)  # of a tower without blocks
    attention = seen[0] if seen else itself  # [I, E + P, E + P]
    scores, e = model.score(images, texts), extra(model.config.image)
    sides, pooling = (grid(model.config.image),) * 2, model.head.pooling
    if isinstance(pooling, Single):
        text_maps, about = single_maps(pooling, tokens, texts, attention, e)
        return Explanation(scores, text_maps, sides, about)
    weights = at_least_float(pooling.explain(images, texts))
    if of_patches := pooling.attends_to_patches:
        return Explanation(scores, weights.mean(2), sides, of_patches)
    looks = token_maps(attention, e, weights.shape[-1])
    mixed = torch.einsum("itn,inp->itp", weights.mean(2), looks)
    about = "Where the mixture tokens look, mixed by the text's weights."
    return Explanation(scores, mixed, sides, about, weights, looks)


def together(parts: Sequence[Explanation]) -> Explanation:
    """Explanations of several images, one after the other."""
    names = [name for name in ("scores", "maps", "weights", "tokens") if getattr(parts[0], name) is not None]
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **joined)


@contextmanager
def attentions(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """Inside, the attention probabilities of a module's runs are collected, mean over heads: [N, L, M] each."""
    seen: list[Tensor] = []

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        seen.append(at_least_float(probabilities(module, *inputs).mean(1)))

    with nullcontext() if module is None else module.register_forward_pre_hook(look):
        yield seen


def probabilities(
    attention: SelfAttention | CrossAttention,
    x: Tensor,
    keys: Keys | None = None,
    packing: Packing | None = None,
    packing_k: Packing | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) of an attention module: [N, H, L, M].

    Args: as of the module's `forward`: x dense [N, L, W], or packed [S, W] for cross-attention; dense keys.
    """
    if isinstance(attention, SelfAttention):
        q, k, _ = attention.qkv(x).unflatten(-1, (3, attention.heads, -1)).unbind(-3)
    else:
        assert keys is not None
        q, k = attention.q(x).unflatten(-1, (attention.heads, -1)), keys[0]
        q = q if packing is None else packing.pad(q)
    logits: Tensor = torch.einsum("nqhd,nmhd->nhqm", at_least_float(q), at_least_float(k)) * q.shape[-1] ** -0.5
    return logits.softmax(-1)


def token_maps(attention: Tensor, e: int, n: int) -> Tensor:
    """Maps of n tokens: [I, n, P], each sums to 1: the attention of a token to the patches; of a patch, itself.

    Args: attention: of all tokens [I, E + P, E + P], the patches last; e: E.
    """
    p = attention.shape[-1] - e
    extras = n if n <= e else n - p  # an uncertainty token is never mixed
    assert 0 < extras <= e, f"{n} tokens are mixed, but the tower has {e} extra ones and {p} patches"
    looks = attention[:, :extras, e:]
    looks = looks / looks.sum(-1, keepdim=True)
    if n <= e:
        return looks
    patches = torch.eye(p, dtype=looks.dtype, device=looks.device)
    return torch.cat([looks, patches.expand(len(looks), p, p)], 1)


def single_maps(pooling: Single, tokens: Tensor, texts: Features, attention: Tensor, e: int) -> tuple[Tensor, str]:
    """Maps [I, T, P] of a model with one vector per image, and what they are: of attention pooling; of others how much
    the score falls when the mean of the patches takes the place of one, and where no patch is read, where the tokens
    look that are."""
    pool, patches = pooling.image_pool, tokens[:, e:]
    if type(pooling).image is Single.image and pool.map is not None:
        probe = pool.map.probe.expand(len(patches), 1, -1)
        looks = probabilities(pool.map, probe, pool.map.keys(patches)).mean(1)[:, 0]
        return _same(looks, texts, "attention pooling looks")
    score, changed, falls = pooling.score(pooling.image(tokens), texts), tokens.clone(), []
    for n in range(tokens.shape[1]):
        changed[:, n] = patches.mean(1)
        falls.append(score - pooling.score(pooling.image(changed), texts))
        changed[:, n] = tokens[:, n]
    fall = torch.stack(falls, -1)  # [I, T, E + P]
    read = fall.abs().amax((0, 1)) > 0
    if bool(read[e:].any()) or not bool(read.any()):
        return fall[..., e:], "How much the score falls without each patch."
    return _same(token_maps(attention, e, e)[:, read[:e]].mean(1), texts, "the tokens look that are read")


def _same(looks: Tensor, texts: Features, who: str) -> tuple[Tensor, str]:
    """A map of each image [I, P] for every text."""
    return looks[:, None].expand(-1, len(texts["vec"]), -1), f"Where {who}, the same for every text."
