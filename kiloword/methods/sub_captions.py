"""Texts sampled from the sentences of long captions, in place of the captions, for any method.

Sources: DreamLIP (arXiv:2403.17007), FLAIR (arXiv:2412.03561), DeBias-CLIP (arXiv:2602.22419).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kiloword.config.settings import BaseSettings, setting
from kiloword.methods.method import Component, Method
from kiloword.randomness import Draw
from kiloword.types import Example, Fetch

_END = re.compile(r"(?<=[.!?])\s+|\n")


@dataclass(frozen=True, kw_only=True)
class SubCaptionSettings(BaseSettings):
    """Texts sampled from long captions."""

    k: int = setting(8, "number of texts sampled from the sentences of an image's captions", 1)
    merge: int = setting(3, "largest number of sentences that are merged to a text", 1)
    drop_summary: float = setting(
        0.0, "probability that no text has the first sentence of a caption of several: it often sums up the rest", 0, 1
    )
    whole: bool = setting(False, "the whole captions beside the sampled texts")


def sentences_of(captions: Sequence[str]) -> list[str]:
    """The sentences of captions, in their order: they end with ".", "!" or "?" before white space, or with a line."""
    return [part.strip() for caption in captions for part in _END.split(caption) if part.strip()]


def merged(parts: Sequence[str], most: int, rng: np.random.Generator) -> str:
    """A text of one to `most` of the sentences: in half of all cases neighbours, in their order, in half any.

    As in the code of arXiv:2412.03561, whose neighbours never reach the last sentence, and which repeats sentences
    where there are too few.
    """
    count = min(int(rng.integers(1, most + 1)), len(parts))
    if rng.random() < 0.5:
        first = int(rng.integers(0, len(parts) - count + 1))
        return " ".join(parts[first : first + count])
    return " ".join(parts[n] for n in rng.choice(len(parts), count, replace=False).tolist())


@dataclass(frozen=True)
class SubCaptions:
    """K texts in place of an image's captions, or beside them."""

    settings: SubCaptionSettings

    def __call__(self, example: Example, fetch: Fetch, draw: Draw) -> Example:
        """Raises: ValueError for examples with precomputed features or the ground truth of whole captions."""
        if example.text_features:
            known = ", ".join(example.text_features)
            raise ValueError(f"sub-captions are no whole captions, whose {known} the data holds: omit one of both.")
        settings, parts = self.settings, list[str]()
        drop = settings.drop_summary and draw.rng("summary").random() < settings.drop_summary
        for caption in example.captions:
            sentences = sentences_of([caption])
            parts += sentences[1:] if drop and len(sentences) > 1 else sentences
        if not parts:
            return example
        rng = draw.rng("sub-captions")
        texts = [merged(parts, settings.merge, rng) for _ in range(settings.k)]
        return replace(example, captions=[*(example.captions if settings.whole else ()), *texts])


def sub_captions(method: Method, settings: SubCaptionSettings) -> Method:
    """Sample texts from the sentences of captions, after all other transforms."""
    return replace(method, captions="all", transforms=(*method.transforms, SubCaptions(settings)))


COMPONENTS = {
    "sub-captions": Component("captions", "texts of some sentences of long captions", SubCaptionSettings, sub_captions)
}
