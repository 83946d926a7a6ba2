"""Results of `kiloword quickstart photos`, the content of `results.json`. Metric names are those of `kiloword eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kiloword.apps.quickstart.results import Metrics
from kiloword.config.settings import BaseSettings


@dataclass(frozen=True, kw_only=True)
class PhotoFacts(BaseSettings):
    """What was trained on what."""

    data: tuple[str, ...]
    val: tuple[str, ...]
    held_out: bool  # whether `val` is a part of the given data, which had no other
    photos: int
    captions: int
    val_photos: int
    val_captions: int
    image_tower: str  # as given to --image-tower
    text_tower: str
    views: int  # stored of each training photo; 1: not augmented
    stored_mb: float
    extraction_s: float  # of all frozen tokens
    seed: int


@dataclass(frozen=True, kw_only=True)
class MethodFigures(BaseSettings):
    """One method."""

    name: str
    steps: int
    batch: int
    trained: int  # parameters
    training_s: float
    judging_s: float
    retrieval: Metrics


@dataclass(frozen=True, kw_only=True)
class PhotoHit(BaseSettings):
    """A photo found for a text."""

    key: str
    score: float


@dataclass(frozen=True, kw_only=True)
class PhotoQuery(BaseSettings):
    """A text and its best photos by method, best first."""

    text: str
    of_photo: str | None  # key of the photo that it describes; None: a text that nobody wrote about one
    best: dict[str, tuple[PhotoHit, ...]]


@dataclass(frozen=True, kw_only=True)
class Looks(BaseSettings):
    """Where texts look on a photo."""

    key: str
    method: str
    texts: tuple[str, ...]
    side: int  # of the map
    maps: tuple[tuple[float, ...], ...]  # [texts, side * side]


@dataclass(frozen=True, kw_only=True)
class Certainty(BaseSettings):
    """A caption and its uncertainty, the sum of the variances of its Gaussian."""

    text: str
    key: str
    uncertainty: float


@dataclass(frozen=True, kw_only=True)
class PhotoFigures(BaseSettings):
    """What was found on the validation photos."""

    methods: tuple[MethodFigures, ...]
    queries: tuple[PhotoQuery, ...]
    looks: tuple[Looks, ...] = ()
    certain: tuple[Certainty, ...] = ()  # most certain first
    uncertain: tuple[Certainty, ...] = ()  # least certain first

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all photos that are shown."""
        shown = [hit.key for query in self.queries for hits in query.best.values() for hit in hits]
        shown += [looks.key for looks in self.looks]
        return tuple(dict.fromkeys([*shown, *(query.of_photo for query in self.queries if query.of_photo is not None)]))


@dataclass(frozen=True, kw_only=True)
class PhotoResults(BaseSettings):
    """`results.json`."""

    version: str  # of kiloword and of the weights: results of others are not reused
    facts: PhotoFacts
    figures: PhotoFigures
    commands: dict[str, str] = field(default_factory=dict)  # what was run -> the command that does the same
    format: Literal["kiloword-photos-1"] = "kiloword-photos-1"
