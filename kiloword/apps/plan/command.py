"""The verbs plan and bench. No torch at import, so that help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from kiloword.apps.plan.options import Plan, check
from kiloword.config.execution import Device
from kiloword.config.papers import fill
from kiloword.config.settings import check as check_settings
from kiloword.config.settings import setting
from kiloword.methods.command import MethodWords, method_words
from kiloword.methods.defaults import default_recipe
from kiloword.methods.recipes import towers_flag

if TYPE_CHECKING:
    from kiloword.apps.plan.planner import Planner


def read(argv: Sequence[str]) -> Planned:
    """Read the words of a command line. Raises: ValueError for a run that cannot be planned."""
    words = method_words(argv, "plan siglip --samples 1e9")
    plan, settings = words.read(_defaults(words))
    check(plan)
    return Planned(plan, words.method, asdict(settings))


@dataclass(frozen=True)
class Planned:
    """The words of a command line, read."""

    plan: Plan
    method: str
    settings: dict[str, Any]

    def planner(self) -> Planner:
        """A learner without content, to ask further."""
        from kiloword.apps.plan.planner import Planner
        from kiloword.methods.registry import preset

        return Planner(self.plan, preset(self.method, self.settings))

    def run(self) -> None:
        """Print the plan. Raises: ValueError when nothing fits the card."""
        from kiloword.apps.plan.planner import show

        show(self.planner())


def _defaults(words: MethodWords) -> Plan:
    """The defaults that the size implies, its towers and optimizer, or those of --recipe or --config."""
    named, towers = words.recipe, [words.first(flag, "") for flag in ("--image-tower", "--text-tower")]
    size = words.first("--size")
    usual = "top" if any(towers) else Plan().size
    recipe = default_recipe("", size or (named.value("size", usual) if named else usual))
    plan, changed = Plan(size=recipe.size), dict[str, Any]()
    if named is not None:
        recipe = fill(replace(recipe, batch=plan.batch), named, towers=not towers_flag(named, size, None))
        facts, length = {name: fact.value for name, fact in named.facts.items()}, named.length()
        images = length["epochs"] * facts.get("images", 0) if "epochs" in length else length.get("samples", 0)
        changed = {name: facts[name] for name in ("gpus", "gpu", "captions") if name in facts}
        changed |= {} if recipe.precision == "auto" else {"precision": recipe.precision}
        changed |= {"batch": recipe.batch, "samples": float(images or length.get("steps", 0) * recipe.batch)}
    elif any(towers):
        from kiloword.training.start import with_towers

        recipe = with_towers(recipe, *towers)
    return replace(plan, model=recipe.model, optim=recipe.optim, **changed)


@dataclass(frozen=True, kw_only=True)
class Bench(Device):
    """Measure this machine: matrix products, a training step, and the batch that its memory holds.

    Examples:
      kiloword bench siglip --size b32
    """

    method: Positional[str] = "siglip"  # the method whose step is measured, with fresh weights, on noise
    size: str = "tiny"  # size of the towers
    batch: int = setting(32, "number of images in a step", 1)
    json: Path | None = None  # write the figures to this file

    def run(self) -> None:
        """Measure and print. Raises: ValueError for an unknown method, size or device."""
        from kiloword.apps.plan.measured import bench

        check_settings(self)
        bench(self)
