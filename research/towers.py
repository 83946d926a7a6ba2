"""Recipes that experiments share: one that trains every pooling, so that poolings can be compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kiloword.config.recipes import Recipe
from kiloword.methods.defaults import default_recipe

ImagePool = Literal["cls", "mean", "max", "map"]


def tokens(method: str, size: str, data: tuple[str, ...], image_pool: ImagePool = "cls") -> Recipe:
    """The defaults of a size, with the pooling of one token; at `tiny` patches of 16, so that a run takes minutes.

    Of the recipes tried, `tiny`'s own trains this pooling best (research/log.md). For reference, "max" pools both sides
    by their maximum.
    """
    base = default_recipe(method, size, data)
    head = replace(base.model.head, image_pool=image_pool, text_pool="max" if image_pool == "max" else "last")
    model = replace(base.model, head=head)
    if size == "tiny":
        model = replace(model, image=replace(model.image, patch=16))
    return replace(base, model=model)
