"""FLAIR: patches pooled separately for every text, and a second loss of whole images. Source: arXiv:2412.03561.

The score of a pair is the cosine of a text with the image's patches as that text attends to them. That is Llip's score
(`losses/pertext.py`) over patches and one token of zeros, to which a text attends that finds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import BaseSettings, setting
from kiloword.distributed.collectives import ranks, sum_over_ranks
from kiloword.losses.pairs import sigmoid_loss, weighted
from kiloword.losses.pertext import PerText, check_heads
from kiloword.methods import siglip
from kiloword.methods.matryoshka import WHOLE, whole_head
from kiloword.methods.method import Component, Method, Part
from kiloword.model.heads import unit
from kiloword.model.image import extra
from kiloword.model.pooling import ImagePool, TextPool
from kiloword.types import Features, PairBlocks, Pairs, Positives, Texts, Total


@dataclass(frozen=True, kw_only=True)
class FlairSettings(BaseSettings):
    """How texts attend to patches."""

    heads: int = setting(8, "heads of the attention from texts to patches; must divide the embedding size", 1)
    whole: float = setting(
        0.5, "share of the loss of whole images (MPS); the rest is that of attended patches (TCS)", 0, 1
    )
    other_texts: Literal["all", "one"] = setting(
        "one", "what the texts of another image count as for attended patches: together as one text, or each as one"
    )


@dataclass(frozen=True, kw_only=True)
class Settings(FlairSettings, siglip.Settings):
    """Attention to patches, and the logit before training."""


def preset(settings: Settings) -> Method:
    summary = "patches pooled for every text, and a loss of whole images"
    method = attended(siglip.preset(settings), settings)
    return replace(method, name="flair", source="arXiv:2412.03561", summary=summary)


def attended(method: Method, settings: FlairSettings) -> Method:
    """Pool patches for every text, and add the loss of whole images.

    Raises: ValueError for a method whose loss is no sigmoid, or that has an uncertainty.
    """
    if method.pair_loss is not sigmoid_loss:
        raise ValueError(f"{method.name} has no sigmoid loss, which flair has twice: add +sigmoid, or use siglip.")
    if method.uncertainty is not None:
        raise ValueError(f"attended replaces a pooling of one vector each, which {method.name} has not.")
    return replace(
        method,
        pooling=Part(Attended, settings),
        further=(*method.further, whole_head) if settings.whole else method.further,
        pair_loss=partial(flair_loss, share=settings.whole, other_texts=settings.other_texts),
        captions="all",
    )


def flair_loss(pairs: PairBlocks, positives: Positives, share: float, other_texts: Literal["all", "one"]) -> Total:
    """Sigmoid losses of attended patches and of whole images, the latter a mean over texts.

    For attended patches the authors' code compares an image with its own K texts and one text of every other image,
    drawn anew. "one" is the expectation of these draws; "all" compares with all texts, a mean over texts.
    Source: arXiv:2412.03561 (text-conditioned and multi-positive sigmoid loss).
    """
    of_texts = partial(sigmoid_loss, reduction="texts")
    attended = as_one_text if other_texts == "one" else of_texts
    if not share:
        return attended(pairs, positives)
    return weighted(positives, (1 - share, pairs, attended), (share, pairs.beside(WHOLE), of_texts))


def as_one_text(pairs: PairBlocks, positives: Positives) -> Total:
    """Sigmoid loss in which the texts of another image count together as one; the count is I + T / I - 1.

    Positives weigh T / I times as much against negatives as in the loss over all texts.
    """
    position = pairs.column("position").contiguous()
    ordered = position.sort().values
    captions = torch.searchsorted(ordered, position, right=True) - torch.searchsorted(ordered, position)  # [T]

    def loss(block: Pairs, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        y, z = positives(block), block.logits
        weight = torch.where(block.annotated, 1, captions[columns].to(z).reciprocal())
        return (weight * (F.softplus(z) - y * z)).sum(1), weight * (z.sigmoid() - y)

    total = pairs.total(loss)
    images = sum_over_ranks(total.new_full((), float(pairs.shape[0])))
    return Total(total, (images + pairs.shape[1] / images - 1) / ranks(), pairs.rows)


class Attended(PerText):
    """Text-conditioned attention pooling of arXiv:2412.03561, with heads of d = D / M dimensions.

    Tokens and texts share a space before the attention: projected to D, and normalised by a layer norm as queries, keys
    and values. Biases of queries, keys and values, which the authors' attention has, are those of the norms, multiplied
    by square matrices; the bias of their output is omitted.
    "vec" of an image is its pooled vector in the same projection: for the loss of whole images, and for shortlists.
    """

    unread = ("image_projection", "image_projection_bias", "text_projection_bias")
    attends_to_patches = "Where each text attends: the rest goes to no patch."
    form = "direct"

    def __init__(self, config: ModelConfig, settings: FlairSettings) -> None:
        super().__init__()
        dim, self.heads, self.extra = config.head.dim, settings.heads, extra(config.image)
        check_heads(self.heads, dim)
        self.image_pool = ImagePool(config.image, config.head)
        self.text_pool = TextPool(config.text, config.head.text_pool)
        self.image_projection = nn.Linear(config.image.width, dim, bias=False)
        self.text_projection = nn.Linear(config.text.width, dim, bias=False)
        self.norm_query, self.norm_key, self.norm_value = (nn.LayerNorm(dim) for _ in range(3))
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    @property
    def factor(self) -> float:
        return float((self.out.in_features // self.heads) ** -0.5)

    def output(self, texts: Features) -> Tensor:
        return self.out.weight

    def pooled(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.image_pool(tokens)
        return out

    def image(self, tokens: Tensor) -> Features:
        """[I, E + P, W] to "vec" [I, D], "keys" and "values" [I, P + 1, M, d]; the last token is of zeros."""
        patches = self.project_image_tokens(tokens[:, self.extra :])
        keys, values = self.key(self.norm_key(patches)), self.value(self.norm_value(patches))
        keys, values = (F.pad(x.unflatten(-1, (self.heads, -1)), (0, 0, 0, 0, 0, 1)) for x in (keys, values))
        return {"vec": unit(self.project_image_tokens(self.pooled(tokens))), "keys": keys, "values": values}

    def text(self, tokens: Tensor, texts: Texts) -> Features:
        """[S, W] to "vec" [T, D] and "query" [T, M, d]."""
        projected = self.text_projection(self.text_pool(tokens, texts))
        query = self.query(self.norm_query(projected)).unflatten(-1, (self.heads, -1))
        return {"vec": unit(projected), "query": query}

    def explain(self, images: Features, texts: Features) -> Tensor:
        """Attention of every text to the patches of every image, [i, t, M, P]: what goes to no patch is omitted."""
        return super().explain(images, texts)[..., :-1]


COMPONENTS = {
    "attended": Component(
        "pooling", "patches pooled for every text, and a loss of whole images", FlairSettings, attended
    ),
}
