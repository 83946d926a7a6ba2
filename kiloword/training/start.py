"""Starting from another model: it brings its towers; image size and context may be others, tokens may come and go."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kiloword.checkpoint.model_folder import check_weights, load_weights, read_model_file, read_tensors
from kiloword.checkpoint.trust import Trust, method_of
from kiloword.config import recipes
from kiloword.config.recipes import ModelConfig, Recipe
from kiloword.methods.defaults import default_recipe

if TYPE_CHECKING:
    from kiloword.data.text.tokenizer import Tokenizer
    from kiloword.model.model import Model

FREE = (("image", "size"), ("text", "context"))  # what of the towers may be another
MANY = 8  # tensors of one module, which a message then counts instead of naming each


def defaults(method: str, init: str, size: str | None = None, data: tuple[str, ...] = ("scenes",)) -> Recipe:
    """The recipe of a run that starts from the model folder `init`: its towers, at its own image size.

    Optimizer and batch are those of `size`; None: of the size whose image tower is most like the model's.
    Raises: ValueError for an unknown size, or when `init` is no model folder.
    """
    model, known = read_model_file(init).model, recipes.sizes()

    def unlike(name: str) -> tuple[int, int]:
        image = known[name].image
        return abs(image.width - model.image.width), abs(image.patch - model.image.patch)

    return replace(default_recipe(method, size or min(known, key=unlike), data), model=model, init=init)


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
            if a != b and (part.name, f.name) not in FREE:
                other.append(f"--model.{part.name}.{f.name.replace('_', '-')} is {a}, but {b} in {recipe.init}")
    if other:
        raise ValueError(
            f"{'; '.join(other[:3])}. Of a model to start from, only the image size and the context may change."
        )


def settle(recipe: Recipe, tokenizer: Tokenizer, trust_code: bool = False) -> Recipe:
    """The recipe with the towers of the model it starts from, at its own image size and context.

    Tokens that the method adds get room in the vocabulary. A causal text tower stays causal unless the settings of the
    method say otherwise: weights that never saw later words are lost on a bidirectional one.

    Args: trust_code: the model's own module may be imported though the recipe's method is another one.
    """
    from kiloword.methods.registry import preset

    assert recipe.init is not None
    file, settings = read_model_file(recipe.init), recipe.settings
    trust = Trust(named=recipe.method, trust_code=trust_code)
    if _shape(recipe.init, trust).text.causal and _may_choose(recipe) and settings.get("bidirectional") is None:
        settings = {**settings, "bidirectional": False}
    image = replace(file.model.image, size=recipe.model.image.size)
    text = replace(file.model.text, context=recipe.model.text.context, special=tokenizer.roles.ids())
    model = replace(file.model, image=image, text=text)
    if preset(recipe.method, settings).shape(model).text.extra_tokens:
        model = replace(model, text=replace(text, vocab=max(text.vocab, tokenizer.vocab)))
    return replace(recipe, model=model, settings=settings)


def _may_choose(recipe: Recipe) -> bool:
    """Whether the method has a setting for what its text tower sees."""
    from kiloword.methods.registry import find

    kind = find(recipe.method)[1]
    return kind is not None and any(f.name == "bidirectional" for f in fields(kind))


def _shape(folder: str, trust: Trust) -> ModelConfig:
    """The towers of a model folder as its method shaped them; the file says what they were before."""
    file = read_model_file(folder)
    method = method_of(file, folder, trust)
    check_weights(folder, file, method)
    return method.shape(file.model)


def load(model: Model, recipe: Recipe, trust_code: bool = False) -> str:
    """Fill a fresh model with the weights of the folder that the recipe starts from.

    What the method adds stays fresh, but for tokens (see `_add_tokens`); what it lacks is left over; the class token
    comes and goes with its position.

    Args: trust_code: as of `settle`.
    Returns: a sentence that names all of this. Raises: ValueError when tensors of one name have other shapes.
    """
    assert recipe.init is not None
    brought = _read(recipe.init, model, Trust(named=recipe.method, trust_code=trust_code))
    weights, own = brought.weights, model.state_dict()
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
    sizes = f" ({', '.join(brought.sizes)})" if brought.sizes else ""
    said = [
        f"started from {recipe.init}{sizes}: {len(known.keys() - brought.made)} tensors loaded",
        f"new: {_summary(new, known)}",
        f"left over: {_summary(left, known)}",
        *brought.tokens,
    ]
    return "; ".join(said) + "."


def _summary(names: Iterable[str], known: Iterable[str]) -> str:
    """Names of tensors in a line. A module of more than MANY of them is named instead where none of it is known."""
    shared = {prefix for name in known for prefix in _prefixes(name)}
    modules: dict[str, list[str]] = {}
    for name in names:
        module = next((prefix for prefix in _prefixes(name) if prefix not in shared), name)
        modules.setdefault(module, []).append(name)
    parts = ([f"{module} ({len(own)} tensors)"] if len(own) > MANY else own for module, own in modules.items())
    return ", ".join(chain.from_iterable(parts)) or "none"


def _prefixes(name: str) -> Iterator[str]:
    """ "more.fuser.norm.weight" -> "more.fuser", "more.fuser.norm", "more.fuser.norm.weight"."""
    return islice(accumulate(name.split("."), "{}.{}".format), 1, None)


@dataclass
class _Brought:
    """Weights of a folder as a model wants them, and words about what was done to them."""

    weights: dict[str, Tensor]
    sizes: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    made: set[str] = field(default_factory=set)  # weights that the folder does not have


def _read(folder: str, model: Model, trust: Trust) -> _Brought:
    """Weights of a folder with positions and tokens as `model` has them."""
    old, new = _shape(folder, trust), model.config
    brought = _Brought(read_tensors(Path(folder) / "model.safetensors"))
    if not same_scale(folder, model, brought.weights, trust):
        brought.weights = {k: v for k, v in brought.weights.items() if k not in ("head.log_scale", "head.bias")}
    _add_tokens(brought, old, new)  # the class token's position is still there
    _resize(brought, old, new)
    name, weights = "image_tower.positions", brought.weights
    if old.image.class_token and not new.image.class_token:
        weights[name] = weights[name][1:]
    if new.image.class_token and not old.image.class_token:
        weights[name] = torch.cat([model.state_dict()[name][:1], weights[name]])
    if old.text.causal:
        brought.tokens.append(f"the text tower {'stays' if new.text.causal else 'was'} causal")
    elif new.text.causal:
        brought.tokens.append("the text tower was bidirectional, and is causal")
    return brought


def same_scale(folder: str, model: Model, weights: Container[str], trust: Trust) -> bool:
    """Whether the model's scale means what the folder's does: not of distances, nor beside a bias that is not there."""
    file = read_model_file(folder)
    method = method_of(file, folder, trust)
    same = method.head(method.shape(file.model)).distance == model.head.distance
    return same and (model.head.bias is None or "head.bias" in weights)


def _resize(brought: _Brought, old: ModelConfig, new: ModelConfig) -> None:
    """Positions for another image size and another context."""
    from kiloword.model.model import resize, resize_text

    if old.image.size != new.image.size:
        brought.sizes.append(f"images of {new.image.size} pixels instead of {old.image.size}")
        _, brought.weights = resize(old, brought.weights, new.image.size)
    if old.text.context != new.text.context:
        brought.sizes.append(f"texts of {new.text.context} tokens instead of {old.text.context}")
        _, brought.weights = resize_text(old, brought.weights, new.text.context)


def _add_tokens(brought: _Brought, old: ModelConfig, new: ModelConfig) -> None:
    """Tokens that are new to the towers start as those whose place they take, so that scores hardly change.

    [UNC] and [CLS] of texts start as the pads they replace where those are seen: then a text's features stay the same
    (but for texts that need the two places). Else as the end token; a causal tower's end token has not seen [UNC], and
    its features stay the same too. An image's [UNC] starts as the class token with its position, or the first mixture
    token: after softmax, a token twice is nearly a token once. Tokens without a row get the mean of all rows.
    """
    weights, special, name = brought.weights, new.text.special, "text_tower.tokens"
    more = new.text.vocab - len(weights[name])
    table = torch.cat([weights[name], weights[name].mean(0).expand(max(more, 0), -1)])
    added = [token for token in new.text.extra_tokens if token not in old.text.extra_tokens]
    like = "pad" if old.text.pad_to_context else "end"
    for token in added:
        table[special[token]] = table[special[like]]
    weights[name] = table
    if more > 0:
        brought.tokens.append(f"{name} has {more} rows more")
    if added:
        brought.tokens.append(f"tokens of texts that start as {like}: {', '.join(added)}")
    unc, tokens = "image_tower.uncertainty_token", "image_tower.extra_tokens"
    if not new.image.uncertainty_token or unc in weights:
        return
    if old.image.class_token:
        weights[unc] = weights["image_tower.class_token"] + weights["image_tower.positions"][0]
        brought.tokens.append(f"{unc} starts as the class token")
        brought.made.add(unc)
    elif tokens in weights:
        weights[unc] = weights[tokens][0].clone()
        brought.tokens.append(f"{unc} starts as the first of {tokens}")
        brought.made.add(unc)


def _unlike(mine: Tensor, theirs: Tensor | None) -> bool:
    return theirs is not None and mine.shape != theirs.shape
