"""What a run starts from: another model (`--init`) and its towers, with positions resized and tokens added or removed.

And what is said before its first step: settings without effect are refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kiloword.config import recipes
from kiloword.config.options import missing
from kiloword.config.recipes import ModelConfig, ModelFile, Recipe
from kiloword.config.settings import differing, leaves, parse, unread
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.interop import text_towers, towers as of_others
from kiloword.interop.towers import LITES, with_image_tower
from kiloword.methods.defaults import default_recipe, tuned
from kiloword.methods.method import Method
from kiloword.methods.registry import find, preset
from kiloword.model.heads import Scale
from kiloword.model.model import Model, resize, resize_text
from kiloword.model.trunks.library import resized_trunk
from kiloword.model.trunks.trunk import Trunk
from kiloword.models.model_folder import WEIGHTS, check_weights, load_weights, read_model_file
from kiloword.models.tensors import open_tensors
from kiloword.models.trust import Trust, method_of
from kiloword.training import tuning
from kiloword.training.optimizer import schedule, warmup_steps

FREE = ("image.size", "text.context")  # settings of the model that may differ
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
    model, named, own = read_model_file(init).model, recipes.sizes(), preset(method).decoders.keys()

    def unlike(name: str) -> tuple[int, int]:
        image = named[name].image
        return abs(image.width - model.image.width), abs(image.patch - model.image.patch)

    recipe = default_recipe(method, size or min(named, key=unlike), data)
    if tune and (not own or own <= {name.split(".")[1] for name in open_tensors(Path(init) / WEIGHTS)}):
        recipe = tuned(recipe)
    return replace(recipe, model=model, init=init)


def with_towers(recipe: Recipe, image_tower: str = "", text_tower: str = "") -> Recipe:
    """The recipe with towers of other libraries: their size, preprocessing and the config of their trunks.

    Args: image_tower, text_tower: as for `--image-tower` and `--text-tower`; "": its own.
    Raises: ValueError for a tower that does not exist or whose library is missing.
    """
    if not (image_tower or text_tower):
        return recipe
    if recipe.init is not None:
        raise ValueError(f"--image-tower and --text-tower exclude --init: {recipe.init} has its own towers.")
    model = recipe.model
    if image_tower:
        model = with_image_tower(model, image_tower)
    if text_tower:
        model = text_towers.with_text_tower(model, text_tower)
        added = len(preset(recipe.method, recipe.settings).shape(model).text.extra_tokens)  # beside the tower's tokens
        model = replace(model, text=replace(model.text, context=model.text.context + added))
    return replace(recipe, model=model, image_tower=image_tower, text_tower=text_tower)


def fitted(recipe: Recipe) -> Recipe:
    """The recipe with the trunk of its image tower for the image size that it has now."""
    image = recipe.model.image
    if recipe.image_tower:
        image = replace(image, trunk=resized_trunk(image.trunk, image.size))
    return replace(recipe, model=replace(recipe.model, image=image))


def load_towers(model: Model, recipe: Recipe) -> str:
    """Fill the trunks of a model with the weights of their files. Returns: a message, "" without towers of others.

    Raises: ValueError for missing or other weights, and for a trunk with random weights that is never trained.
    """
    messages = []
    if recipe.image_tower:
        named, trunk = of_others.parse(recipe.image_tower), model.image_tower.trunk
        stays = {"image", "image:trunk"} & set(tuning.frozen(recipe)) and not recipe.unfreeze
        if named.file is None and named.name not in LITES and stays:
            raise ValueError(
                f"--image-tower {recipe.image_tower} names no file of weights, and a frozen trunk would keep its "
                f"random ones: give {recipe.image_tower}:FILE, or train the trunk from scratch (--freeze none)."
            )
        assert isinstance(trunk, Trunk)
        messages.append(of_others.load(trunk, recipe.image_tower, "image tower"))
    if recipe.text_tower:
        assert model.text_tower.trunk is not None
        messages.append(text_towers.load(model.text_tower.trunk, recipe.text_tower))
    return " ".join(messages)


def check(recipe: Recipe) -> None:
    """Raises: ValueError naming settings of the model that differ from the one that the recipe starts from."""
    if recipe.init is None:
        return
    theirs = asdict(read_model_file(recipe.init).model)
    other = [
        f"--model.{name.replace('_', '-')} is {a}, but {b} in {recipe.init}"
        for name, (a, b) in differing(asdict(recipe.model), theirs).items()
        if name not in FREE
    ]
    if other:
        raise ValueError(f"{'; '.join(other[:3])}. With --init only the image size and the context may change.")


def check_effects(recipe: Recipe, usual: Recipe, trust_code: bool) -> None:
    """Refuse settings that the user set and that have no effect, as their declarations say (`settings.about`).

    Args: usual: the recipe with all defaults for the same size, data and `init`; trust_code: as in `RunOptions`.
    Raises: ValueError naming them.
    """
    idle = [*unread(recipe, usual, missing=missing(recipe)), *_replaced(recipe, usual.model)]
    kind: Any = find(recipe.method)[1]
    settings, default = parse(recipe.settings, kind), parse(usual.settings, kind)
    idle += [*unread(settings, default, "--settings."), *_loaded(recipe, settings, default, trust_code)]
    if idle:
        raise ValueError(f"{'; '.join(idle[:3])}. Omit settings without effect.")


def _replaced(recipe: Recipe, usual: ModelConfig) -> Iterator[str]:
    """Settings of the model that the method replaces by its own, or does not read."""
    method = preset(recipe.method, recipe.settings)
    for path, (value, other) in differing(asdict(recipe.model), asdict(usual)).items():
        part, _, name = path.rpartition(".")
        with suppress(ValueError):  # the model without it is invalid
            if part in ("image", "text", "head"):
                without = replace(recipe.model, **{part: replace(getattr(recipe.model, part), **{name: other})})
                idle = part == "head" and name in method.pooling.kind.unread
                if idle or method.shape(recipe.model) == method.shape(without):
                    flag = f"--model.{path.replace('_', '-')}"
                    yield f"{flag} is {value}, but {recipe.method} builds the same model with {other}"


def _loaded(recipe: Recipe, settings: Any, usual: Any, trust_code: bool) -> Iterator[str]:
    """Settings for initial values of weights that come from `init`."""
    changed = differing(asdict(settings), asdict(usual))
    starts = {leaf.path: leaf.field.metadata.get("initial") for leaf in leaves(settings) if leaf.path in changed}
    if recipe.init is None or not any(starts.values()):
        return
    weights, (_, before) = set(open_tensors(Path(recipe.init) / WEIGHTS)), folder_of(recipe, trust_code)
    if not same_scale(before.scale, preset(recipe.method, recipe.settings).scale, weights):
        weights -= {"head.log_scale", "head.bias"}
    for path, name in starts.items():
        if name in weights:
            yield f"--settings.{path.replace('_', '-')} is {changed[path][0]}, but {name} comes from {recipe.init}"


def notes(recipe: Recipe) -> Iterator[str]:
    """Notes for the user before a run starts, one message each."""
    steps, optim, image = recipe.steps, recipe.optim, recipe.model.image
    if steps < (warmup := warmup_steps(steps, optim)):
        highest = optim.lr * schedule(steps - 1, steps, optim)
        yield (
            f"the warm-up takes {warmup:g} steps and the run has {steps}: the learning rate reaches {highest:.2g} "
            f"instead of {optim.lr:g}. Set a share of the run, such as --optim.warmup 0.05, or fewer warm-up steps."
        )
    if not image.trunk.name and (rest := image.size % image.patch):
        yield f"the last {rest} of {image.size} rows and columns of pixels fill no patch and are not used."
    yield from filter(None, (note(recipe) for note in preset(recipe.method, recipe.settings).notes))


def settle(recipe: Recipe, tokenizer: Tokenizer, trust_code: bool = False) -> Recipe:
    """The recipe with the towers of the model it starts from, at the recipe's image size and context.

    The vocabulary grows by the tokens that the method adds. A causal text tower stays causal unless the method's
    settings override it: a bidirectional tower would waste weights that never attended to later words.

    Args: trust_code: allow importing the model's own module even if the recipe has another method.
    """
    file, method = folder_of(recipe, trust_code)
    settings, kind, size = recipe.settings, find(recipe.method)[1], recipe.model.image.size
    may_choose = any(f.name == "bidirectional" for f in fields(kind))
    if may_choose and settings.get("bidirectional") is None and method.shape(file.model).text.causal:
        settings = {**settings, "bidirectional": False}
    image = file.model.image
    if size != image.size:
        image = replace(image, size=size, trunk=resized_trunk(image.trunk, size))
    text = replace(file.model.text, context=recipe.model.text.context, special=tokenizer.roles.ids())
    model = replace(file.model, image=image, text=text)
    if preset(recipe.method, settings).shape(model).text.extra_tokens:
        model = replace(model, text=replace(text, vocab=max(text.vocab, tokenizer.vocab)))
    return replace(recipe, model=model, settings=settings)


def folder_of(recipe: Recipe, trust_code: bool) -> tuple[ModelFile, Method]:
    """The file and the method of the folder that a recipe starts from, whose weights fit them."""
    assert recipe.init is not None
    file = read_model_file(recipe.init)
    method = method_of(file, recipe.init, Trust(named=recipe.method, trust_code=trust_code))
    check_weights(recipe.init, file, method, open_tensors(Path(recipe.init) / WEIGHTS))
    return file, method


def load(model: Model, recipe: Recipe, trust_code: bool = False) -> str:
    """Fill a fresh model with the weights of the folder that the recipe starts from.

    Tensors that the method adds keep their initial values, except for tokens (see `_add_tokens`); tensors that it lacks
    are not used; the class token is added or removed together with its position.

    Args: trust_code: as in `settle`.
    Returns: a message that names all of these. Raises: ValueError when shapes of tensors differ.
    """
    assert recipe.init is not None
    file, method = folder_of(recipe, trust_code)
    old, new, current = method.shape(file.model), model.config, model.state_dict()
    weights, place = dict(open_tensors(Path(recipe.init) / WEIGHTS)), "image_tower.positions"
    if not same_scale(method.scale, model.head.scale, weights):
        weights = {k: v for k, v in weights.items() if k not in ("head.log_scale", "head.bias")}
    # the limit is this run's setting; a larger scale raises it
    weights |= {k: v for k, v in current.items() if k in weights and k.endswith("log_limit")}
    count, sizes = len(weights.keys() & current.keys()), list[str]()
    notes = _add_tokens(weights, old, new)  # the class token's position is still there
    if old.image.size != new.image.size:
        sizes.append(f"images of {new.image.size} pixels instead of {old.image.size}")
        _, weights = resize(old, weights, new.image.size)
    if old.text.context != new.text.context:
        sizes.append(f"texts of {new.text.context} tokens instead of {old.text.context}")
        _, weights = resize_text(old, weights, new.text.context)
    if old.image.class_token and not new.image.class_token:
        weights[place] = weights[place][1:]
    if new.image.class_token and not old.image.class_token:
        weights[place] = torch.cat([current[place][:1], weights[place]])
    if old.text.causal:
        notes.append(f"the text tower {'stays' if new.text.causal else 'was'} causal")
    elif new.text.causal:
        notes.append("the text tower was bidirectional, and is causal")
    fit = current | {k: v for k, v in weights.items() if k in current}
    load_weights(model, fit, recipe.init, f"its config and the settings of {recipe.method}")
    of_sizes = f" ({', '.join(sizes)})" if sizes else ""
    new_names, left = (
        _summary(k for k in x if k not in y) for x, y in ((current, weights), (sorted(weights), current))
    )
    told = f"started from {recipe.init}{of_sizes}: {count} tensors loaded; new: {new_names}; left over: {left}"
    return "; ".join([told, *notes]) + "."


def began(recipe: Recipe) -> str:
    """The weights that a run starts from, by the end of their path, and how it changes them; for the card."""
    told = []
    if recipe.init is not None:
        told.append(f"from {'/'.join(Path(recipe.init).parts[-2:])}: {read_model_file(recipe.init).data}")
    if recipe.lora.rank:
        told.append(f"LoRA of rank {recipe.lora.rank}")
    if recipe.freeze not in ((), ("none",)):
        told.append(f"frozen {' '.join(recipe.freeze)}")
    return f" ({'; '.join(told)})" if told else ""


def _summary(names: Iterable[str]) -> str:
    """Names of tensors in one line; a module with more than MANY tensors is one entry."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(".".join(name.split(".")[:2]), []).append(name)
    parts = (", ".join(x) if len(x) <= MANY else f"{module} ({len(x)} tensors)" for module, x in modules.items())
    return ", ".join(parts) or "none"


def same_scale(old: Scale, new: Scale, weights: Container[str]) -> bool:
    """Whether the scale of weights applies to another: both use distances or neither, and a needed bias is there."""
    return old.distance == new.distance and (new.bias is None or "head.bias" in weights)


def _add_tokens(weights: dict[str, Tensor], old: ModelConfig, new: ModelConfig) -> list[str]:
    """Initialize new tokens as the tokens whose place they take, so that scores hardly change.

    [UNC] and [CLS] of texts start as the pads they replace where pads are attended to: then the features of a text stay
    the same (except for texts that fill those places). Else they start as the end token; in a causal tower the end
    token does not attend to [UNC], so features stay the same too. The [UNC] of an image starts as the class token plus
    its position, or as the first mixture token: softmax attention hardly changes when a token is duplicated. Tokens
    without a row in the embedding get the mean of all rows.

    Returns: messages.
    """
    notes, special, name = list[str](), new.text.special, "text_tower.tokens"
    if not new.text.trunk.name:  # whose learned vectors are the same for all methods
        missing_rows = max(new.text.vocab - len(weights[name]), 0)
        table = torch.cat([weights[name], weights[name].mean(0).expand(missing_rows, -1)])
        added = [token for token in new.text.extra_tokens if token not in old.text.extra_tokens]
        like = "pad" if old.text.pad_to_context else "end"
        for token in added:
            table[special[token]] = table[special[like]]
        weights[name] = table
        if missing_rows:
            notes.append(f"{name} has {missing_rows} rows more")
        if added:
            notes.append(f"tokens of texts that start as {like}: {', '.join(added)}")
    unc, tokens = "image_tower.uncertainty_token", "image_tower.extra_tokens"
    if not new.image.uncertainty_token or new.image.uncertainty_blocks or unc in weights:
        return notes
    if old.image.class_token:
        weights[unc] = weights["image_tower.class_token"] + weights["image_tower.positions"][0]
        notes.append(f"{unc} starts as the class token")
    elif tokens in weights:
        weights[unc] = weights[tokens][0].clone()
        notes.append(f"{unc} starts as the first of {tokens}")
    return notes
