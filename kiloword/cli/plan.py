"""The verb plan: reads its flags, plans, prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kiloword.apps.plan.request import Plan, card, check
from kiloword.config.papers import NamedRecipe, fill
from kiloword.config.recipes import Recipe
from kiloword.methods.command import MethodWords, method_words
from kiloword.methods.defaults import default_recipe
from kiloword.methods.recipes import towers_flag

if TYPE_CHECKING:
    from kiloword.apps.plan.advice import Planner


def main(argv: Sequence[str]) -> None:
    """Estimate memory, time and traffic of a run: kiloword plan METHOD --size L --gpus N --batch B --samples S."""
    planner = planner_of(argv)
    from kiloword.apps.plan.tables import show

    show(planner)


def planner_of(argv: Sequence[str]) -> Planner:
    """The planner of a command line. Raises: ValueError for a run that cannot be planned."""
    command = method_words(argv, "plan siglip --samples 1e9")
    plan, settings = command.read(_plan(command))
    check(plan)
    from kiloword.apps.plan.advice import Planner
    from kiloword.methods.registry import preset

    chosen = card(plan.gpu, plan.flops, plan.memory, plan.bandwidth, plan.precision)
    return Planner(plan, preset(command.method, asdict(settings)), chosen)


def _plan(command: MethodWords) -> Plan:
    """The defaults that the size implies, its towers and optimizer, or those of --recipe or --config."""
    named_recipe = command.recipe
    size = command.first("--size")
    towers = tuple(command.first(flag, "") for flag in ("--image-tower", "--text-tower"))
    usual = "top" if any(towers) else Plan().size
    size = size or (named_recipe.value("size", usual) if named_recipe else usual)
    if named_recipe is None:
        recipe = _on_towers(default_recipe("", size), towers)
        return Plan(size=size, model=recipe.model, optim=recipe.optim)
    recipe = replace(default_recipe("", size), batch=Plan().batch)
    recipe = fill(recipe, named_recipe, towers=not towers_flag(named_recipe, command.first("--size"), None))
    facts = {name: value.value for name, value in named_recipe.facts.items() if name in ("gpus", "gpu", "captions")}
    precision = {} if recipe.precision == "auto" else {"precision": recipe.precision}
    whole = Plan(size=size, batch=recipe.batch, samples=_samples(named_recipe, recipe.batch), model=recipe.model)
    defaults: dict[str, Any] = {"optim": recipe.optim, **precision, **facts}
    return replace(whole, **defaults)


def _on_towers(recipe: Recipe, towers: Sequence[str]) -> Recipe:
    """The recipe with towers of other libraries. Raises: ValueError as `training.start.with_towers`."""
    if not any(towers):
        return recipe
    from kiloword.training.start import with_towers

    return with_towers(recipe, *towers)


def _samples(recipe: NamedRecipe, batch: int) -> float:
    """Images seen by a recipe; 0 where it says nothing of them. Args: batch: its images in a step."""
    length = recipe.length()
    if "epochs" in length:
        return float(length["epochs"] * (recipe.facts["images"].value if "images" in recipe.facts else 0))
    return float(length.get("samples", length.get("steps", 0) * batch))
