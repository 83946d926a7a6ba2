"""The verbs plan and bench. No torch at import, so that help is instant."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from tyro.conf import Positional

from kiloword.apps.plan.options import Plan
from kiloword.config.execution import Device
from kiloword.config.recipes import Recipe
from kiloword.config.settings import check, setting
from kiloword.methods.command import method_words
from kiloword.training import command as train

if TYPE_CHECKING:
    from kiloword.apps.plan.planner import Planner

NOT_COUNTED = (
    "freeze",
    "unfreeze",
    "init",
    "lora.rank",
    "lora.targets",
    "augment.drop-patches",
    "image-features",
    "text-features",
)


def read(argv: Sequence[str]) -> Planned:
    """Read the words of a command line; `train` reads the flags that plan does not declare.

    Raises: ValueError for a run that cannot be planned.
    """
    words = method_words(argv, "plan siglip --samples 1e9")
    facts = {name: fact.value for name, fact in words.recipe.facts.items()} if words.recipe else {}
    default = Plan(**{name: facts[name] for name in ("gpus", "gpu", "captions") if name in facts})
    prog, about = "kiloword plan METHOD", inspect.cleandoc(Plan.__doc__ or "")
    plan, flags = tyro.cli(
        Plan, prog=prog, description=about, args=words.flags, default=default, return_unknown_args=True
    )
    check(plan)
    towers = any(words.first(flag) for flag in ("--image-tower", "--text-tower"))
    usual = [] if words.recipe else ["--batch", "1024", *([] if towers else ["--size", "b16"])]
    args = train.read([*argv[: len(argv) - len(words.flags)], *usual, *flags, "--dry-run"]).args
    for flag in (*NOT_COUNTED, *(("steps", "epochs") if plan.samples else ())):
        if words.first(f"--{flag}") is not None:
            raise ValueError(f"--{flag} is not counted by plan: omit it.")
    if args.recipe.precision == "fp64":
        raise ValueError("plan has no data sheet for fp64: expected --precision fp32 or bf16.")
    samples = plan.samples or args.samples or (args.steps or 0) * args.recipe.batch
    samples = samples or (args.epochs or 0) * facts.get("images", 0)
    if not samples:
        raise ValueError("plan needs the length of the run: give --samples, images seen in all, such as 1.28e9.")
    return Planned(replace(plan, samples=float(samples)), args.recipe)


@dataclass(frozen=True)
class Planned:
    """The words of a command line, read."""

    plan: Plan
    recipe: Recipe

    def planner(self) -> Planner:
        """A learner without content, to ask further. Raises: ValueError for a batch that cannot be split so."""
        from kiloword.apps.plan.planner import Planner
        from kiloword.training.start import fitted

        return Planner(self.plan, fitted(self.recipe))

    def run(self) -> None:
        """Print the plan. Raises: ValueError when nothing fits the card."""
        from kiloword.apps.plan.planner import show

        show(self.planner())


@dataclass(frozen=True, kw_only=True)
class Bench(Device):
    """Measure this machine: a matrix product, a training step, and the largest batch that fits into memory.

    Examples:
      kiloword bench siglip --size b32
    """

    method: Positional[str] = "siglip"  # method whose step is measured, with new weights and random images
    size: str = "tiny"  # size of the towers
    batch: int = setting(32, "number of images in a step", 1)
    json: Path | None = None  # write the figures to this file

    def run(self) -> None:
        """Measure and print. Raises: ValueError for an unknown method, size or device."""
        from kiloword.apps.plan.measured import bench

        check(self)
        bench(self)
