"""Models compared on scenes: the trained model, colour histograms, and chance. All embed images and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from kiloword.api import Matcher
from kiloword.data.reading import eval_batches
from kiloword.data.scenes.source import ScenesSource
from kiloword.data.sources.open import open_source
from kiloword.evaluation.baseline import BaselineSample, bags, histogram, ridge, words
from kiloword.types import Features


@dataclass(frozen=True)
class Scenes:
    """A set of scenes, drawn."""

    source: ScenesSource
    pixels: Tensor  # uint8 [N, 3, H, W]
    captions: list[str]  # [N], the first of each scene

    @cached_property
    def colours(self) -> Tensor:
        """Histograms [N, BINS^3]."""
        return histogram(self.pixels)


def draw_all(src: str, size: int) -> Scenes:
    """Draw every image that `src` (scenes:...) names, `size` pixels a side."""
    source = open_source(src, size)
    assert isinstance(source, ScenesSource)
    parts = list(eval_batches(source, size))
    return Scenes(source, torch.cat([p.images for p in parts]), [own[0] for p in parts for own in p.captions])


class Contestant(Protocol):
    """Embeds both sides, and scores every image against every text; higher is a better match."""

    def images(self, pixels: Tensor) -> Features: ...
    def texts(self, captions: Sequence[str]) -> Features: ...
    def score(self, images: Features, texts: Features) -> Tensor: ...


class TrainedModel:
    """A trained model."""

    def __init__(self, matcher: Matcher) -> None:
        self.images = matcher.encode_image
        self.texts = matcher.encode_text
        self.score = matcher.score


class Chance:
    """The same score for every pair: metrics then are what luck gives."""

    def images(self, pixels: Tensor) -> Features:
        return {"vec": torch.zeros(len(pixels), 1)}

    def texts(self, captions: Sequence[str]) -> Features:
        return {"vec": torch.zeros(len(captions), 1)}

    def score(self, images: Features, texts: Features) -> Tensor:
        return images["vec"] @ texts["vec"].T


class Colours:
    """`evaluation.baseline.retrieve` in two halves: learned once, used on several sets."""

    def __init__(self, seen: BaselineSample) -> None:
        pairs = [(caption, i) for i, own in enumerate(seen.captions) for caption in own]
        self.vocabulary = sorted({word for caption, _ in pairs for word in words(caption)})
        self.mean = seen.colours.mean(0)
        targets = (seen.colours - self.mean)[[i for _, i in pairs]]
        self.weights = ridge(bags((c for c, _ in pairs), self.vocabulary), targets)  # [V + 1, BINS^3]

    def images(self, pixels: Tensor) -> Features:
        return {"vec": normalize(histogram(pixels) - self.mean, dim=1)}

    def texts(self, captions: Sequence[str]) -> Features:
        return {"vec": normalize(bags(captions, self.vocabulary) @ self.weights, dim=1)}

    def score(self, images: Features, texts: Features) -> Tensor:
        return images["vec"] @ texts["vec"].T


def colour_classes(known: Tensor, labels: Tensor, asked: Tensor, classes: int) -> Tensor:
    """Scores [N, C] of images for classes, by least squares from histograms, as `evaluation.baseline.classify`.

    Args: histograms known [M, BINS^3] with labels [M] to learn from; asked [N, BINS^3] to score.
    """
    return _constant(asked) @ ridge(_constant(known), one_hot(labels, classes).double())


def _constant(colours: Tensor) -> Tensor:
    return torch.cat([colours, torch.ones(len(colours), 1, dtype=colours.dtype)], 1)
