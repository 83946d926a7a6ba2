"""The verb plan: reads its flags, plans, prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kiloword.cli.words import asked, values_of
from kiloword.config import recipes
from kiloword.methods.defaults import default_recipe
from kiloword.planning.request import Plan, card, check

if TYPE_CHECKING:
    from kiloword.planning.advice import Planner


def main(argv: Sequence[str]) -> None:
    """Estimate memory, time and traffic of a run: kiloword plan METHOD --size L --gpus N --batch B --samples S."""
    planner = planner_of(argv)
    from kiloword.planning.tables import show

    show(planner)


def planner_of(argv: Sequence[str]) -> Planner:
    """What is asked on the command line. Raises: ValueError for what cannot be planned."""
    words = asked(argv, "plan siglip --samples 1e9")
    plan, settings = words.read(_plan(words.flags))
    check(plan)
    from kiloword.methods.registry import preset
    from kiloword.planning.advice import Planner

    own = {} if settings is None else asdict(settings)
    return Planner(plan, preset(words.method, own), card(plan.gpu, plan.flops, plan.memory, plan.bandwidth))


def _plan(flags: Sequence[str]) -> Plan:
    """The defaults that the size implies: its towers and optimizer."""
    size, known = (values_of(flags, "--size") or (Plan().size,))[0], recipes.sizes()
    if size not in known:
        raise ValueError(f"unknown size {size!r}: expected one of {', '.join(known)}.")
    return Plan(size=size, model=known[size], optim=default_recipe("", size).optim)
