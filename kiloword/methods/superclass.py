"""The tokens of captions as the classes of images. Source: SuperClass, arXiv:2411.03313."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kiloword.config.recipes import ModelConfig
from kiloword.config.settings import BaseSettings, setting
from kiloword.distributed.collectives import sum_over_ranks
from kiloword.methods.method import Component, Method, Part, Term
from kiloword.model.attention import Packing
from kiloword.model.decoder import predicted
from kiloword.model.model import Model
from kiloword.model.pooling import at_least_float
from kiloword.model.text import is_special
from kiloword.types import Batch, Encoded, Texts


@dataclass(frozen=True, kw_only=True)
class ClassSettings(BaseSettings):
    """How much the classification weighs, and its tokens."""

    weight: float = setting(1.0, "weight of the classification of images by the tokens of their captions", 0)
    tokens: Literal["idf", "equal"] = setting("idf", "weights of tokens: rare ones more, or all alike")


def superclass(method: Method, settings: ClassSettings) -> Method:
    """Add the classification; its texts pass no tower. Raises: ValueError for a method whose texts are answers."""
    if "questions" in method.needs:
        raise ValueError(
            f"superclass predicts tokens of captions, but texts of {method.name} are answers to questions."
        )
    return method.plus(terms={"superclass": (settings.weight, Part(ClassTerm, settings))})


class ClassTerm(Term):
    """Softmax cross-entropy of an image's classes with the tokens of each of its captions; the mean over captions.

    Frequencies are those of all captions before this step, sums of integers over ranks.
    """

    seen: Tensor  # [V + 1] int64: captions with each token, and all captions
    seen_now: Tensor  # those of the step

    def __init__(self, config: ModelConfig, settings: ClassSettings) -> None:
        super().__init__()
        self.text, self.settings = config.text, settings
        classes = predicted(config.text)
        self.norm = nn.LayerNorm(config.image.width, config.image.norm_eps)
        self.classes = nn.Linear(config.image.width, classes)
        self.register_buffer("seen", torch.zeros(classes + 1, dtype=torch.int64))
        self.register_buffer("seen_now", torch.zeros_like(self.seen), persistent=False)

    def count(self, batch: Batch) -> int:
        """The number of captions."""
        return len(batch.texts)

    def forward(self, model: Model, batch: Batch, encoded: Encoded) -> Tensor:
        """The sum over captions."""
        logits = self.classes(self.norm(model.head.pooling.pooled(encoded.image_tokens)))
        token, text, counts = self.distinct(batch.texts)
        if torch.is_grad_enabled():
            self.seen_now.index_add_(0, token, counts.long())
            self.seen_now[-1] += len(batch.texts)
        with torch.autocast(logits.device.type, enabled=False):
            logits = at_least_float(logits)
            weights = counts * self.weights(logits.dtype)[token]
            sums = weights.new_zeros(len(batch.texts)).index_add(0, text, weights)
            target, image = weights / sums.clamp_min(1e-12)[text], batch.image_of_text[text]  # [S]; none: zeros
            return (target * (logits.logsumexp(1)[image] - logits[image, token])).sum()

    @torch.no_grad()
    def after_step(self, model: Model, step: int, done: float) -> None:
        """Add the captions of the step, of all ranks, to those that were counted."""
        self.seen += sum_over_ranks(self.seen_now)
        self.seen_now.zero_()

    def weights(self, dtype: torch.dtype) -> Tensor:
        """The weight of every class [V]: log((captions + 1) / (captions with it + 1)), 1 before the first step."""
        captions = self.seen[-1]
        idf = ((captions + 1).to(dtype) / (self.seen[:-1] + 1)).log()
        return torch.where((captions > 0) & (self.settings.tokens == "idf"), idf, 1.0)

    def distinct(self, texts: Texts) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ordered by text [S], the text of each, and whether to count it: the first of a word in its text."""
        text = Packing.of(texts).text
        size = self.text.vocab
        ordered = (text * size + texts.ids).sort().values
        first = F.pad(ordered[1:] != ordered[:-1], (1, 0), value=True)
        ids = ordered % size
        counts = first & ~is_special(ids, self.text)
        return ids.clamp(max=len(self.seen) - 2), ordered // size, counts


COMPONENTS = {
    "superclass": Component("terms", "tokens of captions are the classes of images", ClassSettings, superclass)
}
