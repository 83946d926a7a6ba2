"""FILIP, and MaxSim as the pooling of other methods. Source: arXiv:2111.07783, arXiv:2004.12832, arXiv:2407.01449."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kiloword.config.recipes import ModelConfig, sizes
from kiloword.config.settings import only
from kiloword.losses.pairs import Blocks, softmax_loss
from kiloword.methods import clip
from kiloword.methods.matryoshka import nested
from kiloword.methods.maxsim.pooling import MaxSim, MaxSimSettings, OneSide, TokenSettings
from kiloword.methods.maxsim.scores import Sides
from kiloword.methods.method import Component, Method
from kiloword.model.heads import Cosine, Head, Single
from kiloword.types import PairBlocks, Positives, Total

WHOLE = "whole"  # the head of the second loss: the cosine of means of patches and words


@dataclass(frozen=True, kw_only=True)
class Settings(TokenSettings, clip.Settings):
    """The vectors that are compared, and the scale of their score."""


def preset(settings: Settings) -> Method:
    """FILIP: softmax of both sides of the score, each over what is compared with it."""
    tokens = {f.name: getattr(settings, f.name) for f in fields(TokenSettings)}
    compared = MaxSimSettings(**tokens)
    plain = Method(
        name="filip",
        source="arXiv:2111.07783",
        summary="maxima of every patch over words and of every word over patches, softmax of each",
        pair_loss=softmax_loss,
        head=lambda config: FilipHead(MaxSim(config, compared)),
        shape=lambda config: smaller(config, settings.dim),
    )
    return with_whole(replace(clip.softmax(plain, only(settings, clip.Settings)), pair_loss=filip_loss), settings.whole)


def maxsim(method: Method, settings: MaxSimSettings) -> Method:
    """Compare all patches with all words in place of one vector each.

    Raises: ValueError for a method that does not pool each image and each text into one vector, or without pair loss.
    """

    def before(config: ModelConfig) -> Head:  # what the replaced pooling needs, such as a class token, may be missing
        return method.head(replace(config, head=replace(config.head, image_pool="mean", image_projection=True)))

    plain = before(method.shape(sizes()["debug"]))
    if type(plain.pooling) is not Single or plain.uncertainty is not None or plain.inner():
        raise ValueError(
            f"{method.name} does not pool images and texts into one vector each: maxsim replaces such a pooling alone."
        )
    if method.pair_weight == 0:
        raise ValueError(f"{method.name} has no pair loss, whose score maxsim would change.")

    def head(config: ModelConfig) -> Head:
        made = before(config)
        made.pooling = MaxSim(config, settings)
        return made

    compared = replace(method, head=head, shape=lambda config: smaller(method.shape(config), settings.dim))
    return with_whole(compared, settings.whole)


def smaller(config: ModelConfig, dim: int) -> ModelConfig:
    """The configuration with an embedding of at most `dim` numbers, as one is kept for every patch and word."""
    return replace(config, head=replace(config.head, dim=min(config.head.dim, dim)))


def with_whole(method: Method, weight: float) -> Method:
    """Add the pair loss of the means of patches and words, if its weight is above 0.

    Raises: ValueError for a method that prepares one head before training.
    """
    if not weight:
        return method
    if method.prepare is not None:
        raise ValueError(
            f"{method.name} prepares one head before training, not that of --settings.maxsim.whole: use 0."
        )

    def head(config: ModelConfig) -> Head:
        made = method.head(config)
        made.whole = made.twin(Cosine())
        return made

    plain = softmax_loss if method.pair_loss is filip_loss else method.pair_loss
    return replace(method, head=head, pair_loss=nested(method.pair_loss, lambda _: [WHOLE], weight, plain))


class FilipHead(Head):
    """A head that scores pairs by both sides of a `MaxSim`, whose sides are two further heads of the same scale."""

    @property
    def by_patch(self) -> Head:
        """Mean over patches of the maximum over words."""
        return self._side(Sides(0.0, 1.0))

    @property
    def by_word(self) -> Head:
        """Mean over words of the maximum over patches."""
        return self._side(Sides(1.0, 0.0))

    def _side(self, sides: Sides) -> Head:
        both: Any = self.pooling
        side: Any = OneSide(both, sides)
        with torch.device("meta"):
            head = Head(side)
        head.log_scale = self.log_scale
        return head

    def inner(self) -> dict[str, Head]:
        """As of any head, and both sides."""
        return {**super().inner(), "by_patch": self.by_patch, "by_word": self.by_word}


def filip_loss(pairs: PairBlocks, positives: Positives) -> Total:
    """Softmax of an image over texts by its patches' maxima, and of a text over images by its words' maxima.

    The mean of both, each a mean over images or texts. Source: arXiv:2111.07783, eq. 1 to 5; the published MindSpore
    code of its authors' company (mindformers).
    """
    of_images, of_texts = pairs.beside("by_patch"), pairs.beside("by_word")
    image, text = softmax_loss(of_images, positives, "images"), softmax_loss(of_texts, positives, "texts")
    if isinstance(pairs, Blocks) and isinstance(of_images, Blocks) and isinstance(of_texts, Blocks):
        pairs.annotated_sum = (of_images.annotated_sum + of_texts.annotated_sum) / 2
        pairs.annotated_count = of_images.annotated_count
    return Total(image.sum + text.sum, image.count, of_images.rows + of_texts.rows)


COMPONENTS = {"maxsim": Component("pooling", "patches and words compared one by one", MaxSimSettings, maxsim)}
