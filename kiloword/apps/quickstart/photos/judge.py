"""Evaluate models on the validation photos, from cached tokens: recalls, queries, where llip looks, what is certain."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from kiloword.api import Matcher, load
from kiloword.apps.quickstart.photos.page import SEEN
from kiloword.apps.quickstart.photos.results import Certainty, Looks, MethodFigures, PhotoFigures, PhotoHit, PhotoQuery
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.reading import read_image
from kiloword.data.source import keys as keys_of
from kiloword.data.stored import WithTokens
from kiloword.evaluation.features import CaptionedImages, captioned
from kiloword.evaluation.retrieval import retrieval
from kiloword.evaluation.task import Inputs
from kiloword.report.images import Pixels
from kiloword.stores.tokens import FoundImages, ImageTokens, TextTokens, TokenizerWithTokens
from kiloword.types import BadSample, Features, Source

CAPTIONS = 5  # of validation photos, as queries
FREE = (  # texts that nobody wrote about a photo
    "a dog that runs through water",
    "children who play",
    "somebody on a bicycle",
    "snow and mountains",
    "two people who talk to each other",
)
EXTREMES = 6  # captions of most and of least uncertainty
EXPLAINED, CAPTIONS_EXPLAINED = 2, 3  # photos, and captions of each


Text = tuple[str, str | None]
"""A query, and the key of the photo that it describes; None: it describes none."""


@dataclass(frozen=True)
class Validation:
    """Captioned photos with their frozen tokens."""

    source: Source
    images: Sequence[ImageTokens]
    texts: Sequence[TextTokens]


@dataclass(frozen=True, kw_only=True)
class EncodedPhotos(CaptionedImages):
    """I photos and their T captions, encoded by one model."""

    texts: Features  # [T, ...]

    def key_of(self, text: int) -> str:
        """The key of a caption's photo."""
        return self.keys[self.image_of_text[text]]


def encode(matcher: Matcher, val: Validation) -> EncodedPhotos:
    """Encode all captioned photos and their captions from their tokens. Raises: ValueError where none can be used."""
    photos = captioned(Inputs(matcher, WithTokens(val.source, FoundImages(val.images, val.source))))
    tokenizer = TokenizerWithTokens(matcher.tokenizer, val.texts)
    texts = Matcher(matcher.model, tokenizer).encode_text(photos.captions)
    return EncodedPhotos(**vars(photos), texts=texts)


@dataclass(frozen=True)
class Trained:
    """A method's model, and what its training took."""

    folder: Path
    steps: int
    batch: int
    seconds: float


def judge(models: Mapping[str, Trained], val: Validation) -> PhotoFigures:
    """Everything that the report shows of some methods' models, by name."""
    judged = {name: _judge(name, trained, val) for name, trained in models.items()}
    texts = next(iter(judged.values())).texts
    queries = [
        PhotoQuery(text=text, of_photo=key, best={name: one.best[n] for name, one in judged.items()})
        for n, (text, key) in enumerate(texts)
    ]
    certain, uncertain = next((one.extremes for one in judged.values() if one.extremes), ((), ()))
    return PhotoFigures(
        methods=tuple(one.figures for one in judged.values()),
        queries=tuple(queries),
        looks=tuple(looks for one in judged.values() for looks in one.looks),
        certain=certain,
        uncertain=uncertain,
    )


@dataclass(frozen=True)
class _Judged:
    """What is shown of one method."""

    figures: MethodFigures
    texts: list[Text]  # queries
    best: list[tuple[PhotoHit, ...]]  # of each query
    looks: tuple[Looks, ...]
    extremes: tuple[tuple[Certainty, ...], tuple[Certainty, ...]] | None  # None: no Gaussians


def _judge(name: str, trained: Trained, val: Validation) -> _Judged:
    start, matcher = time.perf_counter(), load(trained.folder)
    encoded = encode(matcher, val)
    metrics = dict(retrieval(matcher.score, encoded.images, encoded.texts, torch.tensor(encoded.image_of_text)))
    texts = _texts(encoded)
    figures = MethodFigures(
        name=name,
        steps=trained.steps,
        batch=trained.batch,
        trained=sum(p.numel() for key, p in matcher.model.named_parameters() if ".trunk." not in key),
        training_s=trained.seconds,
        judging_s=time.perf_counter() - start,
        retrieval=metrics,
    )
    looks = explained(matcher, encoded, val.source) if name == "llip" else ()
    extremes = certainty(matcher, encoded) if "log_var" in encoded.texts else None
    return _Judged(figures, texts, _best(matcher, encoded, [text for text, _ in texts]), looks, extremes)


def _texts(encoded: EncodedPhotos) -> list[Text]:
    """The queries: captions spread over the photos, and free texts."""
    places = [n * len(encoded.captions) // CAPTIONS for n in range(min(CAPTIONS, len(encoded.captions)))]
    return [*((encoded.captions[place], encoded.key_of(place)) for place in places), *((text, None) for text in FREE)]


def _best(matcher: Matcher, encoded: EncodedPhotos, texts: list[str]) -> list[tuple[PhotoHit, ...]]:
    """The best photos of each text."""
    scores = matcher.score(encoded.images, matcher.encode_text(texts)).T  # [texts, I]
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :SEEN]
    return [
        tuple(PhotoHit(key=encoded.keys[i], score=float(row[i])) for i in first.tolist())
        for row, first in zip(scores, order, strict=True)
    ]


def certainty(matcher: Matcher, encoded: EncodedPhotos) -> tuple[tuple[Certainty, ...], tuple[Certainty, ...]]:
    """The captions of least uncertainty, and of most, the extreme ones first; equal captions count once."""
    uncertainty = matcher.uncertainty(encoded.texts)
    place = {caption: n for n, caption in reversed(list(enumerate(encoded.captions)))}
    ordered = sorted(place.values(), key=lambda n: (float(uncertainty[n]), n))

    def several(places: Sequence[int]) -> tuple[Certainty, ...]:
        return tuple(
            Certainty(text=encoded.captions[n], key=encoded.key_of(n), uncertainty=float(uncertainty[n]))
            for n in places
        )

    return several(ordered[:EXTREMES]), several(ordered[: -EXTREMES - 1 : -1])


def explained(matcher: Matcher, encoded: EncodedPhotos, source: Source) -> tuple[Looks, ...]:
    """Where captions look on the first photos that have several, and can be read."""
    explanations: list[Looks] = []
    photos = thumbnails(source, encoded.keys[:64], matcher.model.config.image.size)
    for key, pixels in photos.items():
        index = encoded.keys.index(key)
        pairs = zip(encoded.captions, encoded.image_of_text, strict=True)
        captions = [caption for caption, image in pairs if image == index]
        if len(captions) >= CAPTIONS_EXPLAINED and len(explanations) < EXPLAINED:
            texts = captions[:CAPTIONS_EXPLAINED]
            seen_by = matcher.explain([pixels], texts)
            maps = tuple(tuple(map(float, one)) for one in seen_by.maps[0])
            explanations.append(Looks(key=key, method="llip", texts=tuple(texts), side=seen_by.grid[0], maps=maps))
    return tuple(explanations)


def thumbnails(source: Source, keys: Sequence[str], size: int) -> dict[str, Pixels]:
    """Photos by key, cut to a square of `size` pixels as in evaluation; without those that cannot be read."""
    transform, place = EvalTransform(size), {key: row for row, key in enumerate(keys_of(source))}
    photos = {}
    for key in keys:
        with suppress(BadSample):
            photos[key] = transform(read_image(source, place[key]).image).permute(1, 2, 0).numpy()
    return photos
