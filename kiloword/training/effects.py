"""Checks before the first step: settings without effect, and settings that the run cannot reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from kiloword.config.options import RunOptions, missing
from kiloword.config.recipes import ModelConfig, Recipe
from kiloword.config.settings import differing, leaves, parse, unread
from kiloword.distributed import collectives
from kiloword.distributed.device import choose
from kiloword.methods.registry import find, preset
from kiloword.model.attention import HEAD, OLDEST, WIDEST_HEAD, bad_heads, old_card
from kiloword.models.model_folder import WEIGHTS
from kiloword.models.tensors import open_tensors
from kiloword.training import start
from kiloword.training.optimizer import schedule, warmup_steps


def notes(recipe: Recipe, options: RunOptions) -> Iterator[str]:
    """Notes for the user before a run starts, one message each. Call it inside the process group, if there is one."""
    steps, optim, image, text = recipe.steps, recipe.optim, recipe.model.image, recipe.model.text
    if steps < (warmup := warmup_steps(steps, optim)):
        highest = optim.lr * schedule(steps - 1, steps, optim)
        yield (
            f"the warm-up takes {warmup:g} steps and the run has {steps}: the learning rate reaches {highest:.2g} "
            f"instead of {optim.lr:g}. Set a share of the run, such as --optim.warmup 0.05, or fewer warm-up steps."
        )
    if options.parallel == "fsdp" and collectives.ranks() == 1:
        yield "--parallel fsdp shards nothing in one process: start several by torchrun."
    if not image.trunk.name and (rest := image.size % image.patch):
        yield f"the last {rest} of {image.size} rows and columns of pixels fill no patch and are not used."
    device, head = torch.device(choose(options.device)), text.width // text.heads
    if device.type == "cuda" and recipe.precision == "bf16" and (old_card(device.index) or bad_heads(head)):
        yield (
            "captions are padded to the longest of a batch, which costs time and memory: attention without pads needs "
            f"a compute capability of {'.'.join(map(str, OLDEST))}, and heads (--model.text.heads) of a multiple of "
            f"{HEAD} dimensions up to {WIDEST_HEAD}."
        )
    yield from filter(None, (note(recipe) for note in preset(recipe.method, recipe.settings).notes))


def check(recipe: Recipe, usual: Recipe, trust_code: bool = False) -> None:
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
    weights, (_, before) = set(open_tensors(Path(recipe.init) / WEIGHTS)), start.folder_of(recipe, trust_code)
    if not start.same_scale(before.scale, preset(recipe.method, recipe.settings).scale, weights):
        weights -= {"head.log_scale", "head.bias"}
    for path, name in starts.items():
        if name in weights:
            yield f"--settings.{path.replace('_', '-')} is {changed[path][0]}, but {name} comes from {recipe.init}"
