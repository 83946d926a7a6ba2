"""Checks before the first step: settings without effect, and settings that the run cannot reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kiloword.config.options import RunOptions, unread
from kiloword.config.recipes import ModelConfig, Recipe
from kiloword.distributed import collectives
from kiloword.distributed.device import choose
from kiloword.methods.registry import find, preset
from kiloword.model.attention import HEAD, OLDEST, WIDEST_HEAD, bad_heads, old_card
from kiloword.model.model import rules_of
from kiloword.models.tensors import open_tensors
from kiloword.models.trust import Trust
from kiloword.training import start
from kiloword.training.learner import Learner, learner_of
from kiloword.training.optimizer import schedule, warmup_steps


def notes(recipe: Recipe, options: RunOptions) -> list[str]:
    """Notes for the user before a run starts, one message each. Call it inside the process group, if there is one."""
    messages = [] if (warmup := _warmup(recipe)) is None else [warmup]
    if options.parallel == "fsdp" and collectives.ranks() == 1:
        messages.append("--parallel fsdp shards nothing in one process: start several by torchrun.")
    image = recipe.model.image
    if not image.trunk.name and (rest := image.size % image.patch):
        messages.append(f"the last {rest} of {image.size} rows and columns of pixels fill no patch and are not used.")
    padded = _padded(recipe, torch.device(choose(options.device)))
    of_methods = [note for of_method in preset(recipe.method, recipe.settings).notes if (note := of_method(recipe))]
    return [*messages, *([] if padded is None else [padded]), *of_methods]


def check(recipe: Recipe, usual: Recipe, trust_code: bool = False) -> None:
    """Refuse settings that the user set and that have no effect.

    Args: usual: the recipe with all defaults for the same size, data and `init`; trust_code: as in `RunOptions`.
    Raises: ValueError naming them.
    """
    idle = [*unread(recipe, usual), *_of_model(recipe, usual.model), *_of_method(recipe, trust_code)]
    if idle:
        raise ValueError(f"{'; '.join(idle[:3])}. Omit settings without effect.")


def _padded(recipe: Recipe, device: torch.device) -> str | None:
    """Why attention pads texts on a CUDA device despite half precision; None where it does not."""
    if device.type != "cuda" or recipe.precision != "bf16":
        return None
    head = recipe.model.text.width // recipe.model.text.heads
    if old_card(device.index):
        why = f"this GPU has a compute capability below {'.'.join(map(str, OLDEST))}"
    elif bad_heads(head):
        why = f"heads of {head} dimensions are no multiple of {HEAD} up to {WIDEST_HEAD} (--model.text.heads)"
    else:
        return None
    return f"captions are padded to the longest of a batch, which costs time and memory: {why}."


def _warmup(recipe: Recipe) -> str | None:
    """A note for a run that ends within its warm-up, and so never reaches its learning rate."""
    steps, optim = recipe.steps, recipe.optim
    warmup = warmup_steps(steps, optim)
    if steps >= warmup:
        return None
    highest = optim.lr * schedule(steps - 1, steps, optim)
    return (
        f"the warm-up takes {warmup:g} steps and the run has {steps}: the learning rate reaches {highest:.2g} instead "
        f"of {optim.lr:g}. Set a share of the run, such as --optim.warmup 0.05, or fewer warm-up steps."
    )


def _of_model(recipe: Recipe, usual: ModelConfig) -> Iterator[str]:
    """Settings of the model that do not change the model that is built."""
    method = preset(recipe.method, recipe.settings)
    for part in ("image", "text", "head"):
        mine, theirs = getattr(recipe.model, part), getattr(usual, part)
        for name in (f.name for f in fields(mine)):
            value, other = getattr(mine, name), getattr(theirs, name)
            if value == other:
                continue
            without = replace(recipe.model, **{part: replace(mine, **{name: other})})
            try:
                same = _built(learner_of(recipe.model, method)) == _built(learner_of(without, method))
            except ValueError:  # the model without it is invalid
                continue
            if same:
                flag = f"--model.{part}.{name.replace('_', '-')}"
                yield f"{flag} is {value}, but {recipe.method} builds the same model with {other}"


def _of_method(recipe: Recipe, trust_code: bool) -> Iterator[str]:
    """Settings of the method for initial values of weights that are loaded from `init` instead."""
    kind: Any = find(recipe.method)[1]
    if recipe.init is None or kind is None:
        return
    for path, value, settings in _without_one(recipe.settings, asdict(kind())):
        mine, other = (learner_of(recipe.model, preset(recipe.method, s)) for s in (recipe.settings, settings))
        if _built(mine) != _built(other):
            continue
        here, there = rules_of(mine.model), rules_of(other.model)
        changed = {name for name in here if here[name] != there[name]}
        loaded = set(open_tensors(Path(recipe.init) / "model.safetensors"))
        if not start.same_scale(recipe.init, mine.model, loaded, Trust(named=recipe.method, trust_code=trust_code)):
            loaded -= {"head.log_scale", "head.bias"}
        if changed and changed <= loaded:
            flag = f"--settings.{path.replace('_', '-')}"
            yield f"{flag} is {value}, but {', '.join(sorted(changed))} comes from {recipe.init}"


def _without_one(settings: Mapping[str, Any], usual: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every setting that is not the default: its dotted name, its value, and all settings with the default instead."""
    for name, value in settings.items():
        other = usual.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            for path, inner, rest in _without_one(value, other, f"{at}{name}."):
                yield path, inner, {**settings, name: rest}
        elif value != other:
            yield at + name, value, {**settings, name: other}


def _built(learner: Learner) -> Any:
    """Everything that determines what a learner computes, except the values of its weights."""
    method = learner.method
    slots = (method.pair_loss, method.pair_weight, method.positives, method.transforms, method.prepare)
    changes = (dict(method.inputs), method.encode, method.after_step)
    weights = [weight for weight, _ in (*method.terms.values(), *method.contrasts.values())]
    shapes = {name: (p.shape, p.requires_grad) for name, p in learner.named_parameters()}
    parts = {
        path: (type(part), {name: _plain(x) for name, x in vars(part).items() if not name.startswith("_")})
        for path, part in learner.named_modules()
        if part is not learner
    }
    parts["model"][1].pop("config")  # its parts hold the settings that they use
    return _plain(slots), _plain(changes), weights, shapes, parts


def _plain(value: Any) -> Any:
    """A value that is equal for objects that compute alike; unknown objects equal only themselves."""
    if isinstance(value, Tensor | nn.Module):
        return id(value)
    if isinstance(value, partial):
        return _plain(value.func), _plain(value.args), _plain(value.keywords)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value
