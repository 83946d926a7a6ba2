"""Arms of an experiment: recipes that differ in one thing, trained and judged over seeds by a script that resumes.

Every arm and seed is a process of its own. A killed script goes on by the same command: finished rows of
OUT/results.jsonl are skipped, unfinished runs are resumed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import arg

from kiloword.addresses import address_of, is_url, public, scrubbed
from kiloword.config.recipes import Recipe
from kiloword.terminal import say, warn

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.types import Source

MOST = 10  # arms an experiment: more than that nobody compares


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One recipe of an experiment; seed and length come from its options."""

    name: str
    recipe: Recipe
    judge: Callable[[Matcher], dict[str, float]]
    source: Callable[[Recipe], Source] | None = None  # training data that no SRC string names


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every experiment may be asked."""

    out: Path = tyro.MISSING  # folder of the runs and of results.jsonl
    seeds: tuple[int, ...] = (0, 1, 2)
    arms: tuple[str, ...] = ()  # names; all when none is given
    jobs: int = 1  # runs at a time, each with one thread
    steps: int | None = None  # another length than the experiment's own
    batch: int | None = None  # another batch than the experiment's own
    size: str = "tiny"  # of the towers (`kiloword sizes`)
    device: str = "cpu"
    workers: int = 0  # loader processes a run
    table: bool = False  # print the table of what is finished, run nothing
    check: bool = False  # repeat the first steps of finished runs: do rows of older commits still stand?
    only: Annotated[str, arg(help="ARM:SEED in this very process, or 'first'")] = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Arms and how they are told about."""

    module: str  # `python -m MODULE` runs it
    title: str
    arms: Callable[[Any], Sequence[Arm]]  # of its options
    columns: Mapping[str, str]  # of the table: heading -> metric
    options: type[Options] = Options
    first: Callable[[Any], None] | None = None  # what arms need before they start: a teacher
    notes: Callable[[Any], Sequence[str]] | None = None  # lines below the table

    def chosen(self, options: Options) -> list[Arm]:
        """The arms that were asked for, with the options' length. Raises: ValueError for an unknown name."""
        known = {arm.name: arm for arm in self.arms(options)}
        assert len(known) <= MOST, f"{len(known)} arms: at most {MOST} are readable"
        unknown = [name for name in options.arms if name not in known]
        if unknown:
            raise ValueError(f"{self.module} has no arm {unknown[0]!r}: expected {', '.join(known)}.")
        return [with_options(known[name], options) for name in options.arms or known]


def with_options(arm: Arm, options: Options) -> Arm:
    """An arm of another length or batch, where that was asked for."""
    given = {name: value for name in ("steps", "batch") if (value := getattr(options, name)) is not None}
    return replace(arm, recipe=replace(arm.recipe, **given))


def command(experiment: Experiment, options: Options) -> list[str]:
    """The command that runs an experiment with these options, credentials of URLs included."""
    words = [sys.executable, "-m", experiment.module]
    for f in dataclasses.fields(options):
        value, flag = getattr(options, f.name), "--" + f.name.replace("_", "-")
        if value is None or value is False or value == "":
            continue
        words += [flag] if value is True else [flag, *map(_word, value if isinstance(value, tuple) else [value])]
    return words


def _word(value: object) -> str:
    word = str(value)
    return address_of(word).full if is_url(word) else word


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> None:
    """Entry point of an experiment's module; errors a user can mend are one sentence and exit code 2."""
    from research import arms_queue, arms_run
    from research.arms_table import table

    name = f"python -m {experiment.module}"
    try:
        words = list(map(public, sys.argv[1:] if argv is None else argv))
        options = tyro.cli(experiment.options, prog=name, description=experiment.title, args=words)
        if options.only:
            arms_run.run_here(experiment, options)
        elif options.check:
            arms_queue.check_all(experiment, options)
        else:
            if not options.table:
                arms_queue.run_all(experiment, options)
            say(*table(experiment, options).splitlines())
    except ValueError as e:
        warn(f"{name}: {scrubbed(str(e))}")
        raise SystemExit(2) from None
