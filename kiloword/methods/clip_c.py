"""CLIP-C: CLIP trained in part on examples that are composed of two. Source: arXiv:2407.01408."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kiloword.config.recipes import only
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
from kiloword.methods.method import Method, Piece
from kiloword.types import View


@dataclass(frozen=True, kw_only=True)
class Settings(ComposeSettings, clip.Settings):
    """The settings of CLIP and of `compose`."""


def preset(settings: Settings) -> Method:
    base = clip.preset(only(settings, clip.Settings))
    method = _viewed(Compose)(base, only(settings, ComposeSettings))
    return replace(
        method,
        name="clip-c",
        source="arXiv:2407.01408",
        summary="CLIP, some examples composed of two halves",
    )


def _viewed(view: Callable[[Any], View]) -> Callable[[Method, Any], Method]:
    def apply(method: Method, settings: Any) -> Method:
        if method.views:
            names = ", ".join(type(v).__name__.lower() for v in method.views)
            raise ValueError(f"{method.name} has the transforms {names} already: choose one way of mixing examples.")
        return replace(method, views=(view(settings),))

    return apply


def _piece(summary: str, settings: type, view: Callable[[Any], View]) -> Piece:
    return Piece(slot="views", summary=summary, settings=settings, apply=_viewed(view))


PIECES = {
    "compose": _piece("halves of two images, both captions", ComposeSettings, Compose),
    "mixup": _piece("two images blended, both captions", MixupSettings, Mixup),
    "cutmix": _piece("a crop of one image on another, both captions", CutmixSettings, Cutmix),
    "stylistic": _piece("two crops of one image, its caption twice", StylisticSettings, Stylistic),
}
