"""Methods and components as users write them, in a module of their own: right ones, and ones that go wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from kiloword.config.settings import BaseSettings, setting
from kiloword.losses.pairs import sigmoid_loss
from kiloword.methods.method import Component, Contrast, Method, Part, Term, annotated
from kiloword.methods.registry import preset as built_in
from kiloword.model.heads import Head, Pooling, Scale
from kiloword.types import Input, Pairs


class Texts(Contrast):
    """Captions against captions of the same image."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head = Head(Pooling(), scale=Scale(5.0, -1.0))

    def features(self, model: Any, batch: Any, encoded: Any) -> Any:
        return {"vec": encoded.texts["vec"]}, {"vec": encoded.texts["vec"]}

    def loss(self, pairs: Any) -> Any:
        return sigmoid_loss(pairs, annotated)


class Norms(Term):
    """A term without a meaning."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def count(self, batch: Any) -> Any:
        return batch.position.new_full((), len(batch))

    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return encoded.images["vec"].sum()


class Three(Texts):
    def features(self, model: Any, batch: Any, encoded: Any) -> Any:
        return {"vec": encoded.texts["vec"][:3]}, {"vec": encoded.texts["vec"]}


class Summed(Texts):
    def loss(self, pairs: Any) -> Any:
        return sigmoid_loss(pairs, annotated).sum


class Reading(Texts):
    def loss(self, pairs: Any) -> Any:
        pairs.column("image_features.teacher")


class Slow(Texts):
    def lr_factors(self) -> dict[str, float]:
        return {"head.bias": 0.1}


class Rows(Norms):
    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return encoded.images["vec"].sum(1)


class Masked(Norms):
    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return model.image_tokens(batch.images, masked=torch.ones(len(batch), 4, dtype=torch.bool)).sum()


class Raw(Norms):
    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return model.image_tower(batch.images).sum()


class Normalised(Norms):
    def forward(self, model: Any, batch: Any, encoded: Any) -> Any:
        return model.normalise(batch.images).sum()


class NoModule:
    def count(self, batch: Any) -> Any:
        return None


def with_loss(slot: str, make: Any, weight: Any = 1.0, name: str = "texts") -> Method:
    """SigLIP with one further loss. Args: slot: "contrasts" or "terms"."""
    changed: dict[str, Any] = {slot: {name: (weight, Part(make))}}
    return replace(built_in("siglip"), **changed)


def plain() -> Method:
    return with_loss("contrasts", Texts)


def by_chance() -> Method:
    """Inputs by global randomness."""

    def halves(example: Any, fetch: Any, draw: Any) -> list[str]:
        return random.sample(example.captions[0].split(), 2)

    return replace(built_in("siglip"), inputs={"halves": Input(halves)})


@dataclass(frozen=True, kw_only=True)
class Settings(BaseSettings):
    weight: float = setting(1.0, "weight of the contrast", 0)


def apply(method: Method, settings: Settings) -> Method:
    return method.plus(contrasts={"texts": (settings.weight, Part(Texts))})


texts = Component("contrasts", "texts of an image are alike", Settings, apply)


def bare(settings):  # type: ignore[no-untyped-def]
    """A preset whose settings have no class."""
    return plain()


def of_pairs(pairs: Pairs) -> Method:
    return plain()


def undefined(settings: Nowhere) -> Method:  # type: ignore[name-defined]  # noqa: F821
    return plain()


def number() -> int:
    return 3
