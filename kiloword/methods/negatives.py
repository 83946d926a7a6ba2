"""Captions whose words are swapped, as further negatives of every image. Source: NegCLIP, arXiv:2210.01936."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from kiloword.config.settings import BaseSettings, setting
from kiloword.data.source import texts_of
from kiloword.losses.pairs import softmax_loss
from kiloword.methods.method import Component, Method, Part, ScaledContrast
from kiloword.model.model import Model
from kiloword.randomness import Draw
from kiloword.types import BadSample, Batch, Encoded, Example, Features, Fetch, Input, PairBlocks, Source, Total

SWAPPED = "swapped_captions"  # the input: texts
LOOKED = 1000  # rows whose captions are counted before the first step
WORD = re.compile(r"[^\W\d_]{3,}")
PLAIN = frozenset(
    WORD.findall(
        "the and with for from into onto over under near next are was were been being has have had its his her their "
        "our your this that these those there while who which what where when then than but not all some any very "
        "other another each off out down through across behind between around about above below beside along against "
        "they she him them"
    )
)


@dataclass(frozen=True, kw_only=True)
class NegativeSettings(BaseSettings):
    """How much the contrast with swapped captions weighs."""

    weight: float = setting(1.0, "weight of the contrast of images with captions and swapped captions", 0)


def content_words(caption: str) -> list[re.Match[str]]:
    """The words of three letters or more that are no article, pronoun, preposition or auxiliary."""
    return [m for m in WORD.finditer(caption) if m[0].lower() not in PLAIN]


def swapped(caption: str, rng: np.random.Generator) -> str | None:
    """The caption with two different `content_words` swapped; None where it has no two."""
    words = content_words(caption)
    names = [word[0].lower() for word in words]
    left = Counter(names)
    others = []  # of each place: how many later words differ; all pairs are alike likely, and none is listed
    for place, name in enumerate(names):
        left[name] -= 1
        others.append(len(names) - 1 - place - left[name])
    if not any(others):
        return None
    chosen, ends = int(rng.integers(sum(others))), np.cumsum(others)
    place = int(np.searchsorted(ends, chosen, side="right"))
    later = [n for n in range(place + 1, len(names)) if names[n] != names[place]]
    a, b = words[place], words[later[chosen - int(ends[place]) + others[place]]]
    return caption[: a.start()] + b[0] + caption[a.end() : b.start()] + a[0] + caption[b.end() :]


def negatives(method: Method, settings: NegativeSettings) -> Method:
    """Add the contrast."""

    def make(example: Example, fetch: Fetch, draw: Draw) -> list[str]:
        rng = draw.rng("swapped captions")
        return [text for caption in example.captions if (text := swapped(caption, rng)) is not None]

    contrast = settings.weight, Part(NegativesContrast)
    inputs = {SWAPPED: Input(make, note=partial(without, name="negatives", words=2))}
    return method.plus(contrasts={"negatives": contrast}, inputs=inputs)


def without(source: Source, name: str, words: int) -> str:
    """A note on captions of the first rows with fewer different words to swap than that; bad rows are omitted."""
    captions: list[str] = []
    for row in range(min(LOOKED, len(source))):
        with suppress(BadSample):
            captions += texts_of(source, row)
    lacking = sum(len({word[0].lower() for word in content_words(caption)}) < words for caption in captions)
    return f"{name}: {lacking} of the first {len(captions):,} captions lack words to swap, and have no negative"


class NegativesContrast(ScaledContrast):
    """Every image against the captions and the swapped captions of all images."""

    def features(self, model: Model, batch: Batch, encoded: Encoded) -> tuple[Features, Features]:
        """Images as rows; captions, then swapped captions as columns, "swapped" [C] bool."""
        group = batch.inputs.texts(SWAPPED)
        texts = torch.cat([encoded.texts["vec"], model.encode_text(group.texts)[1]["vec"]])
        of = torch.cat([batch.image_of_text, group.image_of_text])
        is_swapped = torch.arange(len(of), device=of.device) >= len(batch.texts)
        columns = {"vec": texts, "position": batch.position[of], "swapped": is_swapped}
        return {"vec": encoded.images["vec"] * model.head.log_scale.exp()}, columns

    def loss(self, pairs: PairBlocks) -> Total:
        return contrast(pairs)


def contrast(pairs: PairBlocks) -> Total:
    """Softmax over all columns, the mean over each image's own captions of -log p, the mean over images.

    The image-to-text half of arXiv:2210.01936, section 4; the pair loss of the method has both directions.
    """
    half = softmax_loss(pairs, lambda p: (p.annotated & ~p.texts["swapped"]).to(p.logits), "images")
    return replace(half, sum=2 * half.sum)


COMPONENTS = {
    "negatives": Component(
        "contrasts", "captions with swapped words are negatives", NegativeSettings, negatives, "text"
    )
}
