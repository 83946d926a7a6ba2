"""Every patch and every word is a vector; a pair is scored by their maxima (arXiv:2111.07783, arXiv:2004.12832)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import BaseSettings, setting
from kiloword.distributed.device import device_type
from kiloword.methods.maxsim import scores
from kiloword.methods.maxsim.scores import Sides
from kiloword.model.attention import Packing
from kiloword.model.heads import unit
from kiloword.model.image import extra
from kiloword.model.pooling import at_least_float
from kiloword.types import Features, Texts


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


class MaxSim(nn.Module):
    """Unit vectors of patches and words, which one linear layer for each tower makes; the score is that of `scores`.

    Class tokens, registers and other extra tokens are not compared. "vec" is the mean of an image's patches or a text's
    words, normalised: for shortlists, and with gradient only for a second loss (`TokenSettings.whole`).
    Attributes: attends_to_patches: what the maps of `explain` are.
    """

    attends_to_patches = "The share of a text's words that are most like each patch."

    def __init__(self, config: ModelConfig, settings: MaxSimSettings) -> None:
        super().__init__()
        self.settings, self.extra, self.text_extra = settings, extra(config.image), len(config.text.extra_tokens)
        self.words = min(settings.words, config.text.context)
        self.sides = Sides(0.5, 0.5) if settings.sides == "both" else Sides(1.0, 0.0)
        self.image_projection = nn.Linear(config.image.width, config.head.dim, bias=False)
        self.text_projection = nn.Linear(config.text.width, config.head.dim, bias=False)

    def image(self, tokens: Tensor) -> Features:
        """[I, E + P, W] to "vec" [I, D] and "patches" [I, P, D]."""
        patches = unit(self.image_projection(tokens[:, self.extra :]))
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
        return self.side(images, texts, self.sides)

    def side(self, images: Features, texts: Features, sides: Sides) -> Tensor:
        """[i, t] with other weights of both sides."""
        return scores.similarity(*_floats(images, texts), sides)

    def score_pairs(self, images: Features, texts: Features) -> Tensor:
        """Scores [n] of image n with text n."""
        return scores.of_pairs(*_floats(images, texts), self.sides)

    def block(self, images: Features, texts: Features) -> tuple[int, int]:
        """Rows and columns of one block: what is saved for its gradient is bounded."""
        patches, words = images["patches"], texts["words"]
        return scores.block(patches.shape[1], words.shape[1], device_type(patches.device))

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None) -> Features:
        """A class is one text of all words of its prompts, in which every prompt has its weight.

        The words' side is then the mean over prompts of their scores; a patch takes its maximum over all words.
        """
        weight = texts["vec"].new_ones(len(group)) if weights is None else weights.to(texts["vec"])
        weight = weight / weight.new_zeros(n).index_add(0, group, weight)[group]
        there = texts["share"] > 0
        of, order = group[:, None].expand_as(there)[there].sort(stable=True)
        counts = torch.bincount(of, minlength=n)
        place = torch.arange(len(of), device=of.device) - (counts.cumsum(0) - counts)[of]
        shape = (n, int(counts.max()))
        words = texts["words"].new_zeros(*shape, texts["words"].shape[2])
        words[of, place] = texts["words"][there][order]
        share = texts["share"].new_zeros(shape)
        share[of, place] = (texts["share"] * weight[:, None])[there][order]
        vec = texts["vec"] * weight[:, None]
        return {"vec": unit(vec.new_zeros(n, vec.shape[1]).index_add(0, group, vec)), "words": words, "share": share}

    def explain(self, images: Features, texts: Features) -> Tensor:
        """How much of each text's words takes its maximum at each patch: [i, t, 1, P], sums to 1. For few pairs."""
        patches, words, share = _floats(images, texts)
        best = torch.einsum("ipd,twd->itpw", patches, words).argmax(2)  # [i, t, W]
        part = (share / share.sum(1, keepdim=True)).expand_as(best)
        return part.new_zeros(*best.shape[:2], patches.shape[1]).scatter_add(2, best, part)[:, :, None]

    def project_image_tokens(self, tokens: Tensor) -> Tensor:
        """[..., W] -> [..., D]."""
        out: Tensor = self.image_projection(tokens)
        return out

    def project_text_tokens(self, tokens: Tensor) -> Tensor:
        """[..., W] -> [..., D]."""
        out: Tensor = self.text_projection(tokens)
        return out


class OneSide(nn.Module):
    """The words' or the patches' side of the score of a `MaxSim`."""

    def __init__(self, both: MaxSim, sides: Sides) -> None:
        super().__init__()
        self.both, self.sides, self.block = both, sides, both.block

    def score(self, images: Features, texts: Features) -> Tensor:
        """[i, t]."""
        return self.both.side(images, texts, self.sides)


def _floats(images: Features, texts: Features) -> tuple[Tensor, Tensor, Tensor]:
    return at_least_float(images["patches"]), at_least_float(texts["words"]), at_least_float(texts["share"])
