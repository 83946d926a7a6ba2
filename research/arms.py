"""Arms of an experiment: recipes that differ in one thing, trained and evaluated over seeds by a script that resumes.

Every arm and seed is a process of its own. The same command resumes a killed script: finished rows of
OUT/results.jsonl are skipped, unfinished runs are resumed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import arg

from kiloword.addresses import address_of, is_url, public, scrubbed
from kiloword.config.recipes import Recipe
from kiloword.errors import sentence_of
from kiloword.terminal import say, warn

if TYPE_CHECKING:
    from kiloword.api import Matcher
    from kiloword.types import Source
    from research.evidence import Rule, Runs


TUNING = 100  # the seed that chooses learning rates


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One recipe of an experiment; seed and length come from its options."""

    name: str
    recipe: Recipe
    judge: Callable[[Matcher], dict[str, Any]]  # numbers, and outcomes of images [N] (`research.evidence`)
    source: Callable[[Recipe], Source] | None = None  # training data that no SRC string names
    rate: float = 1.0  # times the recipe's learning rates: the best of a grid by runs of seed TUNING
    seed: int | None = None  # the only one that it runs, but for TUNING; default: all of the options


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every experiment."""

    out: Path = tyro.MISSING  # folder of the runs and of results.jsonl
    seeds: tuple[int, ...] = (0, 1, 2)
    arms: tuple[str, ...] = ()  # names; default: all
    jobs: int = 1  # runs at a time, each with one thread
    steps: int | None = None  # length, instead of the experiment's
    batch: int | None = None  # batch size, instead of the experiment's
    rate: float | None = None  # times the learning rates of every arm, in place of the arms' own factors
    size: str = "tiny"  # size of the towers (`kiloword sizes` lists them)
    device: str = "cpu"
    workers: int = 0  # loader processes per run
    table: bool = False  # print the table of finished runs, and run nothing
    check: bool = False  # repeat the first steps of finished runs: are rows of older commits still valid?
    only: Annotated[str, arg(help="ARM:SEED in this very process, or 'first'")] = ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Arms, and how their results are printed."""

    module: str  # `python -m MODULE` runs it
    title: str
    arms: Callable[[Any], Sequence[Arm]]  # of its options
    columns: Mapping[str, str]  # of the table: heading -> metric
    options: type[Options] = Options
    first: Callable[[Any], None] | None = None  # makes what arms need, such as a teacher
    claims: Sequence[Rule] = ()  # decided below the table
    notes: Callable[[Any], Sequence[str]] | None = None  # lines below the table
    summary: Callable[[Runs], Sequence[str]] | None = None  # lines below the table, of finished runs alone

    def chosen(self, options: Options) -> list[Arm]:
        """The arms of `--arms`, with the options' length. Raises: ValueError for an unknown name."""
        known = {arm.name: arm for arm in self.arms(options)}
        unknown = [name for name in options.arms if name not in known]
        if unknown:
            raise ValueError(f"{self.module} has no arm {unknown[0]!r}: expected {', '.join(known)}.")
        return [with_options(known[name], options) for name in options.arms or known]


def with_options(arm: Arm, options: Options) -> Arm:
    """The arm with the length, batch and learning rate of the options, if set."""
    changes = {name: value for name in ("steps", "batch") if (value := getattr(options, name)) is not None}
    rate, optim = arm.rate if options.rate is None else options.rate, arm.recipe.optim
    optim = replace(optim, lr=rate * optim.lr, muon_lr=rate * optim.muon_lr)
    return replace(arm, recipe=replace(arm.recipe, optim=optim, **changes), rate=rate)


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


@contextmanager
def in_one_message(name: str) -> Iterator[None]:
    """Inside, an error that a user can mend is one message of the program of that name and exit code 2."""
    try:
        yield
    except Exception as error:
        message = sentence_of(error)
        if message is None:
            raise
        warn(f"{name}: {scrubbed(message)}")
        raise SystemExit(2) from None


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> None:
    """Entry point of an experiment's module. User errors are one message and exit code 2, an interruption is 130."""
    from research import arms_queue, arms_run
    from research.arms_table import table

    name = f"python -m {experiment.module}"
    try:
        with in_one_message(name):
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
    except KeyboardInterrupt:
        warn(f"{name}: interrupted; the same command goes on from here")
        raise SystemExit(130) from None
