"""Recipes that experiments share: one in which every read-out trains, so that read-outs can be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kiloword import recipes
from kiloword.recipes import Recipe

ImagePool = Literal["cls", "mean", "max", "map"]


def tokens(method: str, size: str, data: tuple[str, ...], image_pool: ImagePool = "cls") -> Recipe:
    """A recipe under which token read-outs learn scenes within minutes at `tiny`; other sizes keep their own settings.

    Muon at 0.02, AdamW at 4e-3, positions and tokens at std 0.1, texts read at their end, patches of 16 (docs/log.md).
    Max pooling reads both sides by their maximum: the reference that token read-outs are held against.
    """
    base = recipes.default(method, size, data)
    head = replace(base.model.head, image_pool=image_pool, text_pool="max" if image_pool == "max" else "last")
    model = replace(base.model, head=head)
    if size not in ("debug", "tiny"):
        return replace(base, model=model)
    image = replace(model.image, patch=16, stem="linear", init_std=0.1)
    model = replace(model, image=image, text=replace(model.text, init_std=0.1))
    return replace(base, model=model, optim=replace(base.optim, muon_lr=0.02, lr=4e-3), batch=64)
