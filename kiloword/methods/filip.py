"""FILIP, and late interaction as the pooling of other methods: every patch and every word is a vector.

Source: FILIP (arXiv:2111.07783), ColBERT (arXiv:2004.12832), ColPali (arXiv:2407.01449).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from kiloword.config.recipes import HeadConfig, ModelConfig
from kiloword.config.settings import BaseSettings, setting
from kiloword.distributed.device import device_type
from kiloword.losses import maxsim as scores
from kiloword.losses.maxsim import Sides
from kiloword.losses.pairs import softmax_loss, weighted
from kiloword.methods import clip
from kiloword.methods.matryoshka import WHOLE, whole_head
from kiloword.methods.method import Component, Method, Part
from kiloword.model.attention import Packing
from kiloword.model.heads import Pooling, shares, unit
from kiloword.model.image import extra
from kiloword.model.pooling import at_least_float
from kiloword.types import Features, PairBlocks, Positives, Texts, Total


@dataclass(frozen=True, kw_only=True)
class TokenSettings(BaseSettings):
    """The vectors that are compared."""

    dim: int = setting(128, "size of the vectors of patches and words, and of the embedding, if that is larger", 1)
    words: int = setting(32, "tokens of a text that are compared, start and end included; those after are omitted", 1)
    whole: float = setting(
        0.0, "weight of a second pair loss, of the means of patches and words, which shortlists are ranked by", 0
    )


@dataclass(frozen=True, kw_only=True)
class MaxSimSettings(TokenSettings):
    """The score of a pair."""

    sides: Literal["both", "text"] = setting(
        "both", "mean of words' and patches' maxima (FILIP), or of words' alone (ColBERT, ColPali)"
    )
    reduce: Literal["mean", "sum"] = setting("mean", "of words' maxima; sum (ColBERT) needs sides text")

    def __post_init__(self) -> None:
        if self.reduce == "sum" and self.sides == "both":
            raise ValueError("reduce is sum, which grows with the words: expected sides text beside it, not both.")


@dataclass(frozen=True, kw_only=True)
class Settings(TokenSettings, clip.Settings):
    """The vectors that are compared, and the scale of their score."""

    sides: ClassVar[str] = "both"
    reduce: ClassVar[str] = "mean"


def preset(settings: Settings) -> Method:
    """FILIP: softmax of both sides of the score, each over what is compared with it."""
    plain = Method(
        name="filip",
        source="arXiv:2111.07783",
        summary="maxima of every patch over words and of every word over patches, softmax of each",
        pair_loss=softmax_loss,
        pooling=Part(BothSides, settings),
    )
    return with_whole(replace(clip.softmax(plain, settings), pair_loss=filip_loss), settings.whole)


def maxsim(method: Method, settings: MaxSimSettings) -> Method:
    """Compare all patches with all words in place of one vector each.

    Raises: ValueError for a method with an uncertainty, or without pair loss.
    """
    if method.uncertainty is not None or method.pair_weight == 0:
        raise ValueError(f"maxsim replaces a pair loss's score of one vector each, which {method.name} has not.")
    return with_whole(replace(method, pooling=Part(MaxSim, settings)), settings.whole)


def with_whole(method: Method, weight: float) -> Method:
    """Add the pair loss of the means of patches and words, if its weight is above 0.

    Raises: ValueError for a method that prepares one head before training.
    """
    if not weight:
        return method
    if method.prepare is not None:
        raise ValueError(f"{method.name} prepares one head before training: use --settings.maxsim.whole 0.")
    plain = softmax_loss if method.pair_loss is filip_loss else method.pair_loss

    def loss(pairs: PairBlocks, positives: Positives) -> Total:
        return weighted(positives, (1.0, pairs, method.pair_loss), (weight, pairs.beside(WHOLE), plain))

    return replace(method, further=(*method.further, whole_head), pair_loss=loss)


def filip_loss(pairs: PairBlocks, positives: Positives) -> Total:
    """Softmax of an image over texts by its patches' maxima, and of a text over images by its words' maxima.

    The mean of both, each a mean over images or texts. Source: arXiv:2111.07783, eq. 1 to 5; the published MindSpore
    code of its authors' company (mindformers).
    """
    of_images, of_texts = pairs.beside("by_patch"), pairs.beside("by_word")
    image, text = softmax_loss(of_images, positives, "images"), softmax_loss(of_texts, positives, "texts")
    return Total(image.sum + text.sum, image.count, of_images.rows + of_texts.rows)


class MaxSim(Pooling):
    """Unit vectors of patches and words, which one linear layer for each tower makes; the score is that of `scores`.

    Class tokens, registers and other extra tokens are not compared. "vec" is the mean of an image's patches or a text's
    words, normalised: for shortlists, and with gradient only for a second loss (`TokenSettings.whole`).
    """

    unread = tuple(name for name in HeadConfig.__dataclass_fields__ if name != "dim")
    attends_to_patches = "The share of a text's words that are most like each patch."

    @staticmethod
    def towers(config: ModelConfig, settings: MaxSimSettings) -> ModelConfig:
        """An embedding of at most `dim` numbers, as one is kept for every patch and word."""
        return replace(config, head=replace(config.head, dim=min(config.head.dim, settings.dim)))

    def __init__(self, config: ModelConfig, settings: MaxSimSettings) -> None:
        super().__init__()
        self.settings, self.extra, self.text_extra = settings, extra(config.image), len(config.text.extra_tokens)
        self.words = min(settings.words, config.text.context)
        self.weights = Sides(0.5, 0.5) if settings.sides == "both" else Sides(1.0, 0.0)
        self.image_projection = nn.Linear(config.image.width, config.head.dim, bias=False)
        self.text_projection = nn.Linear(config.text.width, config.head.dim, bias=False)

    def image(self, tokens: Tensor) -> Features:
        """[I, E + P, W] to "vec" [I, D] and "patches" [I, P, D]."""
        patches = unit(self.project_image_tokens(tokens[:, self.extra :]))
        return {"vec": self._whole(patches.mean(1)), "patches": patches}

    def text(self, tokens: Tensor, texts: Texts) -> Features:
        """[S, W] to "vec" [T, D], "words" [T, words, D], zeros after the last, and their weights "share" [T, words]."""
        padded = Packing.of(texts).pad(unit(self.text_projection(tokens)))[:, : self.words]
        lengths = (texts.starts.diff() - self.text_extra).clamp(max=self.words)
        there = torch.arange(self.words, device=tokens.device) < lengths[:, None]
        words = F.pad(padded, (0, 0, 0, self.words - padded.shape[1])) * there[..., None]
        count = lengths[:, None] if self.settings.reduce == "mean" else 1
        return {"vec": self._whole(words.sum(1)), "words": words, "share": there.to(words.dtype) / count}

    def _whole(self, vectors: Tensor) -> Tensor:
        """[n, D], normalised."""
        return unit(vectors) if self.settings.whole else unit(vectors).detach()

    def score(self, images: Features, texts: Features) -> Tensor:
        """[i, t], the mean of both sides, or the text's."""
        return scores.similarity(*_floats(images, texts), self.weights)

    def score_pairs(self, images: Features, texts: Features) -> Tensor:
        """Scores [n] of image n with text n."""
        patches, words, share = _floats(images, texts)
        products = patches @ words.mT  # [n, P, W]
        of_patches = products.masked_fill(share[:, None] == 0, -torch.inf).amax(2).mean(1)
        return self.weights.by_word * (share * products.amax(1)).sum(1) + self.weights.by_patch * of_patches

    def block(self, images: Features, texts: Features) -> tuple[int, int]:
        """Rows and columns of one block: what is saved for its gradient is bounded."""
        patches, words = images["patches"], texts["words"]
        return scores.block(patches.shape[1], words.shape[1], device_type(patches.device))

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features:
        """A class is one text of all words of its prompts, in which every prompt has its weight.

        The words' side is then the mean over prompts of their scores; a patch takes its maximum over all words.
        """
        weight = shares(texts["vec"], group, n, weights)
        there, order = texts["share"] > 0, group.argsort(stable=True)
        counts = there.sum(1).new_zeros(n).index_add(0, group, there.sum(1)).tolist()
        words, share = (
            pad_sequence(list(torch.split(values[order][there[order]], counts)), batch_first=True)
            for values in (texts["words"], texts["share"] * weight[:, None])
        )
        return {**super().ensemble(texts, group, n, weight), "words": words, "share": share}

    def explain(self, images: Features, texts: Features) -> Tensor:
        """How much of each text's words takes its maximum at each patch: [i, t, 1, P], sums to 1. For few pairs."""
        patches, words, share = _floats(images, texts)
        best = torch.einsum("ipd,twd->itpw", patches, words).argmax(2)  # [i, t, W]
        part = (share / share.sum(1, keepdim=True)).expand_as(best)
        return part.new_zeros(*best.shape[:2], patches.shape[1]).scatter_add(2, best, part)[:, :, None]


class BothSides(MaxSim):
    """FILIP's: a pair loss reads the words' and the patches' side apart."""

    several = True

    def sides(self) -> Mapping[str, Pooling]:
        """ "by_patch": mean over patches of the maximum over words; "by_word": mean over words, over patches."""
        sides = {"by_patch": copy(self), "by_word": copy(self)}  # of the same parameters
        sides["by_patch"].weights, sides["by_word"].weights = Sides(0.0, 1.0), Sides(1.0, 0.0)
        return sides


def _floats(images: Features, texts: Features) -> tuple[Tensor, Tensor, Tensor]:
    return at_least_float(images["patches"]), at_least_float(texts["words"]), at_least_float(texts["share"])


COMPONENTS = {"maxsim": Component("pooling", "patches and words compared one by one", MaxSimSettings, maxsim)}
