"""Settings that cannot do what they say, found before the first step."""

from __future__ import annotations

from kiloword.optim import schedule, warmup_steps
from kiloword.recipes import Recipe


def notes(recipe: Recipe) -> list[str]:
    """What a user should know of a recipe before it runs, one message each."""
    return [] if (warmup := _warmup(recipe)) is None else [warmup]


def _warmup(recipe: Recipe) -> str | None:
    """A run that ends within its warm-up never reaches its learning rate."""
    steps, optim = recipe.steps, recipe.optim
    warmup = warmup_steps(steps, optim)
    if steps >= warmup:
        return None
    highest = optim.lr * schedule(steps - 1, steps, optim)
    return (
        f"the warm-up takes {warmup:g} steps and the run has {steps}: the learning rate reaches {highest:.2g} instead "
        f"of {optim.lr:g}. Give a share of the run, such as --optim.warmup 0.05, or fewer steps of warm-up."
    )
