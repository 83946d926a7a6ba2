"""The verb plan: reads its flags, plans, prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kiloword.cli.words import method_command, values_of
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
    """The planner of a command line. Raises: ValueError for a run that cannot be planned."""
    command = method_command(argv, "plan siglip --samples 1e9")
    plan, settings = command.read(_plan(command.flags))
    check(plan)
    from kiloword.methods.registry import preset
    from kiloword.planning.advice import Planner

    values = {} if settings is None else asdict(settings)
    return Planner(plan, preset(command.method, values), card(plan.gpu, plan.flops, plan.memory, plan.bandwidth))


def _plan(flags: Sequence[str]) -> Plan:
    """The defaults that the size implies: its towers and optimizer."""
    size, named = (values_of(flags, "--size") or (Plan().size,))[0], recipes.sizes()
    if size not in named:
        raise ValueError(f"unknown size {size!r}: expected one of {', '.join(named)}.")
    return Plan(size=size, model=named[size], optim=default_recipe("", size).optim)
