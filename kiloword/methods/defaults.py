"""Default recipes. No torch at import, so that help texts are instant."""

from __future__ import annotations

from dataclasses import replace

from kiloword.config.recipes import AugmentConfig, DataConfig, OptimConfig, Recipe, sizes

MUON = OptimConfig(name="muon", lr=1e-3, muon_lr=5e-3, scale_lr=3.0)  # 4 x this muon_lr learns faster, but not shapes
FIELD = OptimConfig(lr=5e-4, weight_decay=0.2, beta2=0.98, eps=1e-6, clip=1.0)  # as CLIP for its ViTs
PHOTOS = AugmentConfig(crop=0.5, flip=0.5)
FEW_PHOTOS = AugmentConfig(crop=0.4, flip=0.5, jitter=0.3, drop_words=0.1)  # thousands of photos, seen dozens of times


def default_recipe(method: str, size: str = "tiny", data: tuple[str, ...] = ("scenes",)) -> Recipe:
    """The recipe of a method, size and data, without any flags. Presets share it, so that comparisons are fair.

    Raises: ValueError for an unknown size or method.
    """
    named = sizes()
    if size not in named:
        raise ValueError(f"unknown size {size!r}: expected one of {', '.join(named)}.")
    method_slots = None
    if method:
        from kiloword.methods.registry import preset  # imports torch

        method_slots = preset(method)
    small = size in ("debug", "tiny")
    optim = MUON if small else FIELD
    drawn = all(d == "scenes" or d.startswith(("scenes:", "scenes?")) for d in data)
    writes = (
        method_slots is not None and "text_decoder" in method_slots.towers
    )  # learns to write captions: drops no word
    few_photos = replace(FEW_PHOTOS, drop_words=0.0) if writes else FEW_PHOTOS
    return Recipe(
        method=method,
        size=size,
        model=named[size],
        optim=optim if drawn or not small else replace(optim, weight_decay=0.3, ema=0.998),
        precision="auto",
        matmul="auto",
        data=DataConfig(
            sources=data,
            captions="one" if method_slots is None else method_slots.captions,
            augment=AugmentConfig() if drawn else few_photos if small else PHOTOS,
        ),
        steps=1000 if drawn else 2000,
        batch=(64 if drawn else 128) if small else 1024,
    )
