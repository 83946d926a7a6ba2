"""Starting from another model: it brings its towers, and only the picture size may be another."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword import recipes
from kiloword.checkpoint import load_weights, read_model_file, read_tensors
from kiloword.recipes import Recipe

if TYPE_CHECKING:
    from kiloword.model import Model


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


def load(model: Model, recipe: Recipe) -> str:
    """Fill a fresh model with the weights of the folder that the recipe starts from.

    What the method adds stays fresh, what it lacks is left over; the class token comes and goes with its position.
    Returns: a sentence that names all of this. Raises: ValueError when tensors of one name have other shapes.
    """
    assert recipe.init is not None
    weights, size = _read(recipe.init, model)
    own = model.state_dict()
    other = [
        f"{k} is {list(v.shape)} here, {list(weights[k].shape)} there"
        for k, v in own.items()
        if _unlike(v, weights.get(k))
    ]
    if other:
        what = f"do not fit its config, or not the settings of {recipe.method}"
        raise ValueError(f"weights in {recipe.init} {what}: {'; '.join(other[:3])}.")
    known = {k: v for k, v in weights.items() if k in own}
    new, left = [k for k in own if k not in known], sorted(k for k in weights if k not in own)
    load_weights(model, {**{k: own[k] for k in new}, **known}, recipe.init)
    return (
        f"started from {recipe.init}{size}: {len(known)} tensors loaded; new: {', '.join(new) or 'none'}; "
        f"left over: {', '.join(left) or 'none'}."
    )


def _read(folder: str, model: Model) -> tuple[dict[str, Tensor], str]:
    """Weights of a folder with positions as `model` has them, and words about another picture size."""
    from kiloword.methods import preset
    from kiloword.model import resize

    file, weights = read_model_file(folder), read_tensors(Path(folder) / "model.safetensors")
    method = preset(file.method, file.settings)
    config = method.shape(file.model)  # the file says what it was before the method
    if method.head(config).distance != model.head.distance:  # a scale of scores is none of distances
        weights = {k: v for k, v in weights.items() if k not in ("head.log_scale", "head.bias")}
    new, said = model.config.image, ""
    if config.image.size != new.size:
        said = f" (pictures of {new.size} pixels instead of {config.image.size})"
        _, weights = resize(config, weights, new.size)
    name = "image_tower.positions"
    if config.image.class_token and not new.class_token:
        weights[name] = weights[name][1:]
    if new.class_token and not config.image.class_token:
        weights[name] = torch.cat([model.state_dict()[name][:1], weights[name]])
    return weights, said


def _unlike(mine: Tensor, theirs: Tensor | None) -> bool:
    return theirs is not None and mine.shape != theirs.shape
