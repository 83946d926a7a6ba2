"""Results of `kiloword quickstart`, the content of `results.json`. Metric names are those of `kiloword eval`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kiloword.config.settings import BaseSettings

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class SampleSizes(BaseSettings):
    """How many images each figure is taken from."""

    retrieval: int = 500
    classes: int = 1000  # of a class task
    hard: int = 496  # groups of eight
    baseline: int = 2000  # training images that the colour histograms learn from

    @property
    def images(self) -> int:
        """Held-out images in all: retrieval, one object, several objects, hard groups."""
        return self.retrieval + 2 * self.classes + self.hard


@dataclass(frozen=True, kw_only=True)
class Facts(BaseSettings):
    """What was trained."""

    method: str
    size: str
    data: tuple[str, ...]
    seed: int
    steps: int
    batch: int
    images: int  # seen in training, repeats counted
    parameters: int
    training_s: float
    judging_s: float


@dataclass(frozen=True, kw_only=True)
class Compared(BaseSettings):
    """One measurement of three contestants."""

    model: Metrics
    colours: Metrics  # histograms of colours and least squares; supervised
    chance: Metrics  # a constant score


@dataclass(frozen=True, kw_only=True)
class TaskFigures(BaseSettings):
    """Zero-shot classification."""

    classnames: tuple[str, ...]
    compared: Compared
    confusion: tuple[tuple[int, ...], ...]  # [true class, the model's best class], counts


@dataclass(frozen=True, kw_only=True)
class Misses(BaseSettings):
    """Captions that are false of the first image, and what that image shares with the right one."""

    captions: int
    missed: int
    same: Metrics  # attribute -> share of the misses in which both images have the same
    anywhere: Metrics  # attribute -> the same for any two of the images


@dataclass(frozen=True, kw_only=True)
class Hit(BaseSettings):
    """An image found for a query."""

    row: int
    score: float
    match: bool


@dataclass(frozen=True, kw_only=True)
class QueryHits(BaseSettings):
    """A query and its best images."""

    level: int
    text: str
    matches: int  # images that it is true of
    hits: tuple[Hit, ...]


@dataclass(frozen=True, kw_only=True)
class Figures(BaseSettings):
    """All figures."""

    retrieval: Compared  # full descriptions
    general: dict[Literal["1", "2"], Compared]  # captions of level 1 and 2; every image that they are true of counts
    hard: Compared  # recall@1 among the eight images, or captions, of one group
    tasks: dict[str, TaskFigures]
    misses: Misses
    gallery: tuple[QueryHits, ...]
    image_size: int  # pixels a side


@dataclass(frozen=True, kw_only=True)
class QuickstartResults(BaseSettings):
    """`results.json`."""

    version: str  # of kiloword and of the weights: results of others are not reused
    sizes: SampleSizes
    facts: Facts
    judged: Figures
    format: Literal["kiloword-quickstart-1"] = "kiloword-quickstart-1"
