"""The verb plan: reads its flags, plans, prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, field, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import arg

from kiloword import recipes
from kiloword.cli_train import mixed
from kiloword.planning.cards import card
from kiloword.planning.request import Plan, check

if TYPE_CHECKING:
    from kiloword.planning.advice import Planner


def main(argv: Sequence[str]) -> None:
    """`kiloword plan METHOD ...`. Raises: ValueError for what cannot be planned."""
    planner = planner_of(argv)
    from kiloword.planning.tables import show

    show(planner)


def planner_of(argv: Sequence[str]) -> Planner:
    """What is asked on the command line. Raises: ValueError for what cannot be planned."""
    method = argv[0] if argv and not argv[0].startswith("-") else ""
    if not method and not {"-h", "--help"} & set(argv):
        raise ValueError("plan needs a method first, e.g. kiloword plan siglip --samples 1e9 (`kiloword methods`).")
    rest = list(argv[1:] if method else argv)
    method = mixed(method, rest)
    both = tyro.cli(_type(method, rest), args=rest, prog="kiloword plan METHOD", description=Plan.__doc__)
    plan: Plan = both.run
    check(plan)
    from kiloword.methods import preset
    from kiloword.planning.advice import Planner

    own = {} if both.settings is None else asdict(both.settings)
    return Planner(plan, preset(method, own), card(plan.gpu, plan.flops, plan.memory, plan.bandwidth))


def _type(method: str, argv: Sequence[str]) -> Any:
    """`Plan` with the size's towers and optimizer, beside the method's own settings."""
    kind: Any = None
    if method:
        from kiloword.methods import find

        kind = find(method)[1]
    size = _size(argv)
    known = recipes.sizes()
    if size not in known:
        raise ValueError(f"unknown size {size!r}: expected one of {', '.join(known)}.")
    base = replace(Plan(), size=size, model=known[size], optim=recipes.default("", size).optim)
    settings = (kind, field(default_factory=kind)) if kind else (Annotated[None, tyro.conf.Suppress], None)
    return make_dataclass(
        "Both", [("run", Annotated[Plan, arg(name="")], field(default=base)), ("settings", *settings)]
    )


def _size(argv: Sequence[str]) -> str:
    """What follows the last --size, or comes with it behind "="."""
    found = Plan().size
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name == "--size":
            found = value if equals else after
    return found
