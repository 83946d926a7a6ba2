"""Start from another model (`--init`): take its towers, resize positions, add and remove tokens."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kiloword.config import recipes
from kiloword.config.recipes import ModelConfig, Recipe
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.interop import text_towers
from kiloword.interop.towers import LITES, parse, with_image_tower
from kiloword.interop.towers import load as load_weights_of
from kiloword.methods.defaults import default_recipe, tuned
from kiloword.methods.registry import find, preset
from kiloword.model.heads import Head
from kiloword.model.model import Model, resize, resize_text
from kiloword.model.trunks.library import resized_trunk
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.model_folder import WEIGHTS, check_weights, load_weights, read_model_file
from kiloword.models.tensors import open_tensors
from kiloword.models.trust import Trust, method_of
from kiloword.training import tuning

FREE = (("image", "size"), ("text", "context"))  # settings of the towers that may differ
MANY = 8  # tensors of a module; a message counts more than these instead of naming each


def defaults(
    method: str, init: str, size: str | None = None, data: tuple[str, ...] = ("scenes",), tune: bool = True
) -> Recipe:
    """The recipe of a run that starts from the model folder `init`: its towers and its image size.

    Optimizer and batch are those of `size`; with None, of the size whose image tower is most similar.

    Args: tune: with the rates and augmentation of `methods.defaults.tuned`, unless the method has a tower (a decoder)
    that the model lacks, which is trained from scratch as are all with False.
    Raises: ValueError for an unknown size, or when `init` is not a model folder.
    """
    model, named = read_model_file(init).model, recipes.sizes()

    def unlike(name: str) -> tuple[int, int]:
        image = named[name].image
        return abs(image.width - model.image.width), abs(image.patch - model.image.patch)

    recipe = default_recipe(method, size or min(named, key=unlike), data)
    tune = tune and not _lacking(method, init)
    return replace(tuned(recipe) if tune else recipe, model=model, init=init)


def _lacking(method: str, init: str) -> set[str]:
    """The method's own towers, such as decoders, that a model folder lacks."""
    needed = set(preset(method).towers)
    names = (name.split(".") for name in (open_tensors(Path(init) / WEIGHTS) if needed else ()))
    return needed - {parts[1] for parts in names if parts[0] == "more"}


def with_towers(recipe: Recipe, image_tower: str = "", text_tower: str = "", *, before: Recipe | None = None) -> Recipe:
    """The recipe with towers of other libraries: their size, preprocessing and the config of their trunks.

    Args: image_tower, text_tower: as for `--image-tower` and `--text-tower`; "": its own; before: of the run that is
    resumed, from which a tower comes whose folder is no longer there.
    Raises: ValueError for a tower that does not exist or whose library is missing.
    """
    if not (image_tower or text_tower):
        return recipe
    if recipe.init is not None:
        raise ValueError(f"--image-tower and --text-tower exclude --init: {recipe.init} has its own towers.")
    model = recipe.model
    if image_tower and before and before.image_tower == image_tower and _gone(image_tower):
        image = replace(model.image, **_same(before.model.image, "trunk", "size", "patch"))
        head = replace(model.head, image_pool=before.model.head.image_pool)
        model = replace(model, image=image, preprocess=before.model.preprocess, head=head)
    elif image_tower:
        model = with_image_tower(model, image_tower)
    if text_tower and before and before.text_tower == text_tower and _gone(text_tower):
        text = replace(model.text, **_same(before.model.text, "trunk", "context", "causal", "pad_to_context"))
        model = replace(model, text=text)
    elif text_tower:
        model = text_towers.with_text_tower(model, text_tower)
        added = len(preset(recipe.method, recipe.settings).shape(model).text.extra_tokens)  # beside the tower's tokens
        model = replace(model, text=replace(model.text, context=model.text.context + added))
    return replace(recipe, model=model, image_tower=image_tower, text_tower=text_tower)


def _gone(tower: str) -> bool:
    """Whether a tower is a folder that is no longer there."""
    kind, _, folder = tower.partition(":")
    return kind in text_towers.KINDS and bool(folder) and not (Path(folder).expanduser() / "config.json").is_file()


def _same(config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def fitted(recipe: Recipe) -> Recipe:
    """The recipe with the trunk of its image tower for the image size that it has now."""
    if not recipe.image_tower:
        return recipe
    image = recipe.model.image
    image = replace(image, trunk=resized_trunk(image.trunk, image.size))
    return replace(recipe, model=replace(recipe.model, image=image))


def load_towers(model: Model, recipe: Recipe) -> str:
    """Fill the trunks of a model with the weights of their files. Returns: a message, "" without towers of others.

    Raises: ValueError for missing or other weights, and for a trunk with random weights that is never trained.
    """
    messages = []
    if recipe.image_tower:
        _check_random(recipe)
        trunk = model.image_tower.trunk
        assert isinstance(trunk, Trunk)
        messages.append(load_weights_of(trunk, recipe.image_tower, "image tower"))
    if recipe.text_tower:
        assert model.text_tower.trunk is not None
        messages.append(text_towers.load(model.text_tower.trunk, recipe.text_tower))
    return " ".join(messages)


def _check_random(recipe: Recipe) -> None:
    named = parse(recipe.image_tower)
    stays = {"image", "image:trunk"} & set(tuning.frozen(recipe)) and not recipe.unfreeze
    if named.file is None and named.name not in LITES and stays:
        raise ValueError(
            f"--image-tower {recipe.image_tower} names no file of weights, and a frozen trunk would keep its random "
            f"ones: give {recipe.image_tower}:FILE, or train the trunk from scratch (--freeze none)."
        )


def check(recipe: Recipe) -> None:
    """Raises: ValueError naming settings of the towers that differ from the model that the recipe starts from."""
    for kind, tower in (("image", recipe.model.image), ("text", recipe.model.text)):
        if getattr(recipe, f"{kind}_tower") and not tower.trunk.name:
            raise ValueError(f"{kind}_tower names a tower of another library, but the model has none: use with_towers.")
    if recipe.init is None:
        return
    model = read_model_file(recipe.init).model
    other = []
    for part in fields(model):
        mine, theirs = getattr(recipe.model, part.name), getattr(model, part.name)
        if not is_dataclass(theirs):
            continue
        for f in fields(theirs):
            a, b = getattr(mine, f.name), getattr(theirs, f.name)
            if a != b and (part.name, f.name) not in FREE:
                other.append(f"--model.{part.name}.{f.name.replace('_', '-')} is {a}, but {b} in {recipe.init}")
    if recipe.model.init_std != model.init_std:
        raise ValueError(f"--model.init-std has no effect with --init: the weights come from {recipe.init}. Omit it.")
    if other:
        raise ValueError(f"{'; '.join(other[:3])}. With --init only the image size and the context may change.")


def settle(recipe: Recipe, tokenizer: Tokenizer, trust_code: bool = False) -> Recipe:
    """The recipe with the towers of the model it starts from, at the recipe's image size and context.

    The vocabulary grows by the tokens that the method adds. A causal text tower stays causal unless the method's
    settings override it: a bidirectional tower would waste weights that never attended to later words.

    Args: trust_code: allow importing the model's own module even if the recipe has another method.
    """
    assert recipe.init is not None
    file, settings, kind = read_model_file(recipe.init), recipe.settings, find(recipe.method)[1]
    may_choose = kind is not None and any(f.name == "bidirectional" for f in fields(kind))
    causal = _shape(recipe.init, Trust(named=recipe.method, trust_code=trust_code)).text.causal
    if causal and may_choose and settings.get("bidirectional") is None:
        settings = {**settings, "bidirectional": False}
    size = recipe.model.image.size
    same = size == file.model.image.size
    trunk = file.model.image.trunk if same else resized_trunk(file.model.image.trunk, size)
    image = replace(file.model.image, size=size, trunk=trunk)
    text = replace(file.model.text, context=recipe.model.text.context, special=tokenizer.roles.ids())
    model = replace(file.model, image=image, text=text)
    if preset(recipe.method, settings).shape(model).text.extra_tokens:
        model = replace(model, text=replace(text, vocab=max(text.vocab, tokenizer.vocab)))
    return replace(recipe, model=model, settings=settings)


def _shape(folder: str, trust: Trust) -> ModelConfig:
    """The model config of a folder as its method shapes it; the file holds the config before that."""
    file = read_model_file(folder)
    method = method_of(file, folder, trust)
    check_weights(folder, file, method, open_tensors(Path(folder) / WEIGHTS))
    return method.shape(file.model)


def load(model: Model, recipe: Recipe, trust_code: bool = False) -> str:
    """Fill a fresh model with the weights of the folder that the recipe starts from.

    Tensors that the method adds keep their initial values, except for tokens (see `_add_tokens`); tensors that it lacks
    are not used; the class token is added or removed together with its position.

    Args: trust_code: as in `settle`.
    Returns: a message that names all of these. Raises: ValueError when shapes of tensors differ.
    """
    assert recipe.init is not None
    brought = _read(recipe.init, model, Trust(named=recipe.method, trust_code=trust_code))
    weights, current = brought.weights, model.state_dict()
    other = [
        f"{k} is {list(v.shape)} here, {list(weights[k].shape)} there"
        for k, v in current.items()
        if k in weights and v.shape != weights[k].shape
    ]
    if other:
        what = f"do not fit its config, or not the settings of {recipe.method}"
        raise ValueError(f"weights in {recipe.init} {what}: {'; '.join(other[:3])}.")
    loaded = {k: v for k, v in weights.items() if k in current}
    new, unused = [k for k in current if k not in loaded], sorted(k for k in weights if k not in current)
    load_weights(model, {**{k: current[k] for k in new}, **loaded}, recipe.init)
    sizes = f" ({', '.join(brought.sizes)})" if brought.sizes else ""
    notes = [
        f"started from {recipe.init}{sizes}: {len(loaded.keys() - brought.made)} tensors loaded",
        f"new: {_summary(new, loaded)}",
        f"left over: {_summary(unused, loaded)}",
        *brought.tokens,
    ]
    return "; ".join(notes) + "."


def _summary(names: Iterable[str], known: Iterable[str]) -> str:
    """Names of tensors in one line; a module that is not in `known` and has more than MANY tensors is one entry."""
    shared = {prefix for name in known for prefix in _prefixes(name)}
    modules: dict[str, list[str]] = {}
    for name in names:
        module = next((prefix for prefix in _prefixes(name) if prefix not in shared), name)
        modules.setdefault(module, []).append(name)
    parts = (
        [f"{module} ({len(members)} tensors)"] if len(members) > MANY else members
        for module, members in modules.items()
    )
    return ", ".join(chain.from_iterable(parts)) or "none"


def _prefixes(name: str) -> Iterator[str]:
    """ "more.fuser.norm.weight" -> "more.fuser", "more.fuser.norm", "more.fuser.norm.weight"."""
    return islice(accumulate(name.split("."), "{}.{}".format), 1, None)


@dataclass
class _Brought:
    """Weights of a folder adapted to a model, and messages about the changes."""

    weights: dict[str, Tensor]
    sizes: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    made: set[str] = field(default_factory=set)  # weights that the folder does not have


def _read(folder: str, model: Model, trust: Trust) -> _Brought:
    """Weights of a folder, adapted to the positions and tokens of `model`."""
    old, new = _shape(folder, trust), model.config
    brought = _Brought(open_tensors(Path(folder) / WEIGHTS))
    if not same_scale(folder, model.head, brought.weights, trust):
        brought.weights = {k: v for k, v in brought.weights.items() if k not in ("head.log_scale", "head.bias")}
    for name, limit in model.state_dict().items():
        if name.endswith("log_limit") and name in brought.weights:
            brought.weights[name] = limit  # the limit is this run's setting; a larger scale raises it
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


def same_scale(folder: str, head: Head, weights: Container[str], trust: Trust) -> bool:
    """Whether the scale of the folder applies: both use distances or neither does, and a needed bias is present."""
    file = read_model_file(folder)
    method = method_of(file, folder, trust)
    same = method.head(method.shape(file.model)).distance == head.distance
    return same and (head.bias is None or "head.bias" in weights)


def _resize(brought: _Brought, old: ModelConfig, new: ModelConfig) -> None:
    """Resize the positions to another image size and another context."""
    if old.image.size != new.image.size:
        brought.sizes.append(f"images of {new.image.size} pixels instead of {old.image.size}")
        _, brought.weights = resize(old, brought.weights, new.image.size)
    if old.text.context != new.text.context:
        brought.sizes.append(f"texts of {new.text.context} tokens instead of {old.text.context}")
        _, brought.weights = resize_text(old, brought.weights, new.text.context)


def _add_tokens(brought: _Brought, old: ModelConfig, new: ModelConfig) -> None:
    """Initialize new tokens as the tokens whose place they take, so that scores hardly change.

    [UNC] and [CLS] of texts start as the pads they replace where pads are attended to: then the features of a text stay
    the same (except for texts that fill those places). Else they start as the end token; in a causal tower the end
    token does not attend to [UNC], so features stay the same too. The [UNC] of an image starts as the class token plus
    its position, or as the first mixture token: softmax attention hardly changes when a token is duplicated. Tokens
    without a row in the embedding get the mean of all rows.
    """
    weights, special, name = brought.weights, new.text.special, "text_tower.tokens"
    if new.text.trunk.name:  # its learned vectors are the same for all methods
        _add_image_token(brought, old, new)
        return
    missing_rows = new.text.vocab - len(weights[name])
    table = torch.cat([weights[name], weights[name].mean(0).expand(max(missing_rows, 0), -1)])
    added = [token for token in new.text.extra_tokens if token not in old.text.extra_tokens]
    like = "pad" if old.text.pad_to_context else "end"
    for token in added:
        table[special[token]] = table[special[like]]
    weights[name] = table
    if missing_rows > 0:
        brought.tokens.append(f"{name} has {missing_rows} rows more")
    if added:
        brought.tokens.append(f"tokens of texts that start as {like}: {', '.join(added)}")
    _add_image_token(brought, old, new)


def _add_image_token(brought: _Brought, old: ModelConfig, new: ModelConfig) -> None:
    weights, unc, tokens = brought.weights, "image_tower.uncertainty_token", "image_tower.extra_tokens"
    if not new.image.uncertainty_token or new.image.uncertainty_blocks or unc in weights:
        return
    if old.image.class_token:
        weights[unc] = weights["image_tower.class_token"] + weights["image_tower.positions"][0]
        brought.tokens.append(f"{unc} starts as the class token")
        brought.made.add(unc)
    elif tokens in weights:
        weights[unc] = weights[tokens][0].clone()
        brought.tokens.append(f"{unc} starts as the first of {tokens}")
        brought.made.add(unc)
