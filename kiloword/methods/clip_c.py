"""CLIP-C: CLIP trained in part on examples that are composed of two. Source: arXiv:2407.01408."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kiloword.data.transforms.mix import Compose, Cutmix, Mixup, Stylistic
from kiloword.data.transforms.settings import ComposeSettings, CutmixSettings, MixupSettings, StylisticSettings
from kiloword.methods import clip
from kiloword.methods.method import Component, Method
from kiloword.types import Transform


@dataclass(frozen=True, kw_only=True)
class Settings(ComposeSettings, clip.Settings):
    """The settings of CLIP and of `compose`."""


def preset(settings: Settings) -> Method:
    method = _transformed(Compose)(clip.preset(settings), settings)
    summary = "CLIP, some examples composed of two halves"
    return replace(method, name="clip-c", source="arXiv:2407.01408", summary=summary)


def _transformed(transform: Callable[[Any], Transform]) -> Callable[[Method, Any], Method]:
    def apply(method: Method, settings: Any) -> Method:
        if method.transforms:
            raise ValueError(f"{method.name} transforms examples already: choose one way of mixing them.")
        return replace(method, transforms=(transform(settings),))

    return apply


COMPONENTS = {
    name: Component("transforms", summary, settings, _transformed(transform))
    for name, summary, settings, transform in (
        ("compose", "halves of two images, both captions", ComposeSettings, Compose),
        ("mixup", "two images blended, both captions", MixupSettings, Mixup),
        ("cutmix", "a crop of one image on another, both captions", CutmixSettings, Cutmix),
        ("stylistic", "two crops of one image, its caption twice", StylisticSettings, Stylistic),
    )
}
