"""Looking inside: where on an image a text looks, and how it mixes the image's tokens (arXiv:2405.00740).

Nothing here runs while a model trains: the towers' fused attention keeps no probabilities, so they are computed again
from the queries and keys of their blocks, which hooks catch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from kiloword.methods.llip.pooling import OneVector
from kiloword.model.blocks import SelfAttention
from kiloword.model.heads import Single
from kiloword.model.image import ImageTower, extra
from kiloword.model.pooling import at_least_float
from kiloword.types import Features

if TYPE_CHECKING:
    from kiloword.model.model import Model

Maps = Literal["last", "rollout"]
"""How a token's map is read off the image tower: its attention in the last block, or rolled out over all blocks."""


@dataclass(frozen=True)
class Explanation:
    """What I images and T texts look like from inside; `grid` rows x columns of patches make P.

    `maps` are where on the image each text looks. With mixing weights: the tokens' maps, mixed by the weights of
    the text (mean over heads); they sum to 1. Models with one vector an image have no weights; their maps are the
    attention of what pools (class token, attention pooling: sum 1, the same for every text) or, exactly, what each
    patch adds to the cosine (mean and maximum: their sum is the cosine, a patch may speak against a text).
    """

    scores: Tensor  # [I, T]
    maps: Tensor  # [I, T, P]
    grid: tuple[int, int]
    about: str  # a sentence: what `maps` are
    weights: Tensor | None = None  # [I, T, M, N] mixing weights, each row of N sums to 1
    tokens: Tensor | None = None  # [I, N, P] where each token looks, sums to 1

    @property
    def shares(self) -> Tensor | None:
        """The mixing weights of tokens, mean over heads: [I, T, N]."""
        return None if self.weights is None else self.weights.mean(2)

    @property
    def entropy(self) -> Tensor | None:
        """Of the mixing weights, over its greatest value ln N, mean over heads: [I, T], 0 one token, 1 all alike."""
        if self.weights is None:
            return None
        most = math.log(max(self.weights.shape[-1], 2))  # of one token it is 0
        summed: Tensor = torch.special.entr(self.weights).sum(-1)
        return summed.mean(-1) / most


def explain(model: Model, pixels: Tensor, texts: Features, maps: Maps = "last") -> Explanation:
    """Look inside for every pair of images and texts.

    Args: pixels uint8 [I, 3, H, W]; texts the features of T texts.
    """
    with attentions(model.image_tower, last_only=maps == "last") as seen:
        tokens, images = model.encode_image(pixels)
    whole = seen[0] if maps == "last" else rollout(seen)  # [I, E + P, E + P]
    scores = model.score(images, texts)
    side = model.config.image.size // model.config.image.patch
    pooling = model.head.pooling
    if isinstance(pooling, Single):
        found, about = single_maps(pooling, tokens, texts, whole, extra(model.config.image))
        return Explanation(scores, found, (side, side), about)
    weights = at_least_float(model.head.explain(images, texts))
    looks = token_maps(whole, extra(model.config.image), weights.shape[-1])
    mixed = torch.einsum("itn,inp->itp", weights.mean(2), looks)
    about = "Where the mixture tokens look, mixed by the text's weights."
    return Explanation(scores, mixed, (side, side), about, weights, looks)


def together(parts: Sequence[Explanation]) -> Explanation:
    """Explanations of several images, one after the other."""

    def join(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    joined = {name: join(name) for name in ("scores", "maps", "weights", "tokens")}
    return Explanation(**joined, grid=parts[0].grid, about=parts[0].about)


@contextmanager
def attentions(tower: ImageTower, last_only: bool) -> Iterator[list[Tensor]]:
    """While the tower runs, collect the attention of its blocks, mean over heads: [I, E + P, E + P] each."""
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, SelfAttention)
        seen.append(at_least_float(probabilities(module, inputs[0]).mean(1)))

    every = [block.get_submodule("attention") for block in tower.blocks]
    handles = [attention.register_forward_pre_hook(look) for attention in (every[-1:] if last_only else every)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def probabilities(attention: SelfAttention, x: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) of what a block's attention is given [I, L, W]: [I, H, L, L]."""
    q, k, _ = attention.qkv(x).unflatten(-1, (3, attention.heads, -1)).unbind(-3)
    logits: Tensor = torch.einsum("iqhd,ikhd->ihqk", at_least_float(q), at_least_float(k)) * q.shape[-1] ** -0.5
    return logits.softmax(-1)


def rollout(seen: list[Tensor]) -> Tensor:
    """Attention over all blocks, half of each stream being the residual (arXiv:2005.00928): [I, L, L], rows sum to 1.

    Args: seen: each block's [I, L, L], the first block first.
    """
    path = torch.eye(seen[0].shape[-1], dtype=seen[0].dtype, device=seen[0].device)
    for block in seen:
        path = (block @ path + path) / 2
    return path


def token_maps(whole: Tensor, e: int, n: int) -> Tensor:
    """Where each of n tokens looks: [I, n, P], sums to 1.

    Args: whole: attention of all tokens [I, E + P, E + P], the patches last; e: E. Tokens that are no
    patches look by their attention to the patches; patches stand for themselves.
    """
    p = whole.shape[-1] - e
    own_tokens = n if n <= e else n - p  # an uncertainty token is never mixed
    assert 0 < own_tokens <= e, f"{n} tokens are mixed, but the tower has {e} extra ones and {p} patches"
    looks = whole[:, :own_tokens, e:]
    looks = looks / looks.sum(-1, keepdim=True)
    if n <= e:
        return looks
    own = torch.eye(p, dtype=looks.dtype, device=looks.device)
    return torch.cat([looks, own.expand(len(looks), p, p)], 1)


def single_maps(pooling: Single, tokens: Tensor, texts: Features, whole: Tensor, e: int) -> tuple[Tensor, str]:
    """Maps [I, T, P] of a model with one vector an image, and what they are."""
    pool, t = pooling.image_pool, len(texts["vec"])
    patches = tokens[:, e:]
    if isinstance(pooling, OneVector):
        looks = token_maps(whole, e, pooling.read).mean(1, keepdim=True)
        return looks.expand(-1, t, -1), "Where the tokens look that are read, the same for every text."
    if type(pooling).image is not Single.image or pool.kind == "attentional":
        return occlusion(pooling, tokens, texts, whole, e)
    if pool.kind == "cls":
        return token_maps(whole, e, 1).expand(-1, t, -1), "Where the class token looks, the same for every text."
    if pool.map is not None:
        looks = pool.map.look(patches)[:, None]
        return looks.expand(-1, t, -1), "Where attention pooling looks, the same for every text."
    return contributions(pooling, patches, texts), "What each patch adds to the score."


def occlusion(pooling: Single, tokens: Tensor, texts: Features, whole: Tensor, e: int) -> tuple[Tensor, str]:
    """Maps [I, T, P] of any pooling, and what they are: the fall of the score when a patch becomes the patches' mean.

    Of a pooling that reads no patch: where the tokens look that it reads.
    """
    name = "attentional pooling" if type(pooling) is Single else words_of_name(type(pooling).__name__)
    score, mean = pooling.score(pooling.image(tokens), texts), tokens[:, e:].mean(1)
    falls = []
    for n in range(tokens.shape[1]):
        changed = tokens.clone()
        changed[:, n] = mean
        falls.append(score - pooling.score(pooling.image(changed), texts))
    fall = torch.stack(falls, -1)  # [I, T, E + P]
    read = fall.abs().amax((0, 1)) > 0
    if bool(read[e:].any()) or not bool(read.any()):
        return fall[..., e:], f"How much the score falls without each patch, by {name}."
    looks = token_maps(whole, e, e)[:, read[:e]].mean(1, keepdim=True)
    return looks.expand(-1, fall.shape[1], -1), f"Where the tokens look that {name} reads, the same for every text."


def words_of_name(name: str) -> str:
    """The words of a class's name: TwiceNormed is "twice normed"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def contributions(pooling: Single, patches: Tensor, texts: Features) -> Tensor:
    """What each patch adds to the cosine: [I, T, P], whose sum over P is the cosine; exact for mean and maximum.

    The pooled vector is a sum over patches: of all of them alike, or of each number from the patch that has it
    largest. Projection and scaling are linear in it.
    """
    patches, vec = at_least_float(patches), at_least_float(texts["vec"])
    if pooling.image_pool.kind == "mean":
        parts = patches / patches.shape[1]
    else:
        won = torch.zeros_like(patches).scatter(1, patches.argmax(1, keepdim=True), 1.0)
        parts = patches * won
    weight = None if pooling.image_projection is None else at_least_float(pooling.image_projection.weight)  # [D, W]
    whole = parts.sum(1) if weight is None else parts.sum(1) @ weight.T  # [I, D]
    directions = vec if weight is None else vec @ weight  # [T, W]
    added = torch.einsum("ipw,tw->itp", parts, directions)
    length: Tensor = whole.norm(dim=-1)
    return added / length[:, None, None]
