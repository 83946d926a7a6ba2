"""CLIP-C: CLIP trained in part on examples that are composed of two. Source: arXiv:2407.01408."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kiloword.config.settings import only
from kiloword.data.transforms import (
    Compose,
    ComposeSettings,
    Cutmix,
    CutmixSettings,
    Mixup,
    MixupSettings,
    Stylistic,
    StylisticSettings,
)
from kiloword.methods import clip
from kiloword.methods.method import Component, Method
from kiloword.types import Transform


@dataclass(frozen=True, kw_only=True)
class Settings(ComposeSettings, clip.Settings):
    """The settings of CLIP and of `compose`."""


def preset(settings: Settings) -> Method:
    base = clip.preset(only(settings, clip.Settings))
    method = _transformed(Compose)(base, only(settings, ComposeSettings))
    return replace(
        method,
        name="clip-c",
        source="arXiv:2407.01408",
        summary="CLIP, some examples composed of two halves",
    )


def _transformed(transform: Callable[[Any], Transform]) -> Callable[[Method, Any], Method]:
    def apply(method: Method, settings: Any) -> Method:
        if method.transforms:
            names = ", ".join(type(v).__name__.lower() for v in method.transforms)
            raise ValueError(f"{method.name} has the transforms {names} already: choose one way of mixing examples.")
        return replace(method, transforms=(transform(settings),))

    return apply


def _component(summary: str, settings: type, transform: Callable[[Any], Transform]) -> Component:
    return Component(slot="transforms", summary=summary, settings=settings, apply=_transformed(transform))


COMPONENTS = {
    "compose": _component("halves of two images, both captions", ComposeSettings, Compose),
    "mixup": _component("two images blended, both captions", MixupSettings, Mixup),
    "cutmix": _component("a crop of one image on another, both captions", CutmixSettings, Cutmix),
    "stylistic": _component("two crops of one image, its caption twice", StylisticSettings, Stylistic),
}
