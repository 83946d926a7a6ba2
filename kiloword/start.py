"""Starting from another model: it brings its towers, and only the picture size may be another."""

from __future__ import annotations

from dataclasses import fields, replace

from kiloword import recipes
from kiloword.checkpoint import read_model_file
from kiloword.recipes import Recipe


def defaults(method: str, init: str, size: str | None = None, data: tuple[str, ...] = ("scenes",)) -> Recipe:
    """The recipe of a run that starts from the model folder `init`: its towers, at its own picture size.

    Optimizer and batch are those of `size`; None: of the size whose image tower is most like the model's.
    Raises: ValueError for an unknown size, or when `init` is no model folder.
    """
    model, known = read_model_file(init).model, recipes.sizes()

    def unlike(name: str) -> tuple[int, int]:
        image = known[name].image
        return abs(image.width - model.image.width), abs(image.patch - model.image.patch)

    return replace(recipes.default(method, size or min(known, key=unlike), data), model=model, init=init)


def check(recipe: Recipe) -> None:
    """Raises: ValueError naming what a recipe asks of the towers that the model it starts from has otherwise."""
    if recipe.init is None:
        return
    model = read_model_file(recipe.init).model
    other = []
    for part in fields(model):
        mine, theirs = getattr(recipe.model, part.name), getattr(model, part.name)
        for f in fields(theirs):
            a, b = getattr(mine, f.name), getattr(theirs, f.name)
            if a != b and (part.name, f.name) != ("image", "size"):
                other.append(f"--model.{part.name}.{f.name.replace('_', '-')} is {a}, but {b} in {recipe.init}")
    if other:
        raise ValueError(f"{'; '.join(other[:3])}. Of a model to start from, only the picture size may change.")
