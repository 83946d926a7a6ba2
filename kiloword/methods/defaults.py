"""The recipe of a method for a user who sets nothing else. No torch at import, so that help texts are instant."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kiloword.config.recipes import AugmentConfig, DataConfig, OptimConfig, Recipe, sizes

if TYPE_CHECKING:
    from kiloword.methods.method import Method

MUON = OptimConfig(name="muon", lr=1e-3, muon_lr=5e-3, scale_lr=3.0)  # 4 x this muon_lr learns faster, but not shapes
FIELD = OptimConfig(lr=5e-4, weight_decay=0.2, beta2=0.98, eps=1e-6, clip=1.0)  # as CLIP for its ViTs
PHOTOS = AugmentConfig(crop=0.5, flip=0.5)
FEW_PHOTOS = AugmentConfig(crop=0.4, flip=0.5, jitter=0.3, drop_words=0.1)  # thousands of photos, seen dozens of times


def default_recipe(method: str, size: str = "tiny", data: tuple[str, ...] = ("scenes",)) -> Recipe:
    """The recipe that a user gets who says no more. Presets share it, so that comparisons are fair.

    Raises: ValueError for an unknown size or method.
    """
    known = sizes()
    if size not in known:
        raise ValueError(f"unknown size {size!r}: expected one of {', '.join(known)}.")
    small = size in ("debug", "tiny")
    optim = MUON if small else FIELD
    drawn = all(d == "scenes" or d.startswith(("scenes:", "scenes?")) for d in data)
    return Recipe(
        method=method,
        size=size,
        model=known[size],
        optim=optim if drawn or not small else replace(optim, weight_decay=0.3, ema=0.998),
        precision="auto",
        matmul="auto",
        data=DataConfig(
            sources=data,
            captions=_slots(method).captions if method else "one",
            augment=AugmentConfig() if drawn else _photos(method) if small else PHOTOS,
        ),
        steps=1000 if drawn else 2000,
        batch=(64 if drawn else 128) if small else 1024,
    )


def _photos(method: str) -> AugmentConfig:
    """Augmentation for small sets of photos; no dropped words for methods that learn to write captions."""
    writes = bool(method) and "text_decoder" in _slots(method).towers
    return replace(FEW_PHOTOS, drop_words=0.0) if writes else FEW_PHOTOS


def _slots(method: str) -> Method:
    from kiloword.methods.registry import preset  # imports torch: only where a method is named

    return preset(method)
