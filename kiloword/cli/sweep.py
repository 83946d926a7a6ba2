"""The verb sweep: `train` with settings varied. No torch at import: help is instant."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from kiloword.apps.sweep.arms import Arm, arms, varied
from kiloword.config.settings import BaseSettings, check, setting
from kiloword.methods.command import MethodWords, method_words, values_of
from kiloword.methods.defaults import default_recipe
from kiloword.terminal import say, warn
from kiloword.training import command as train

if TYPE_CHECKING:
    from kiloword.apps.sweep.run import Results

OWN = ("--vary", "--seeds", "--eval", "--metric", "--out", "--dry-run")  # the other flags are those of train


@dataclass(frozen=True, kw_only=True)
class SweepOptions(BaseSettings):
    """Train once for every combination of values and every seed, then print a table: mean and standard deviation.

    All other flags are those of `kiloword train` (kiloword train METHOD --help). The same command again resumes.

    Examples:
      kiloword sweep llip --vary settings.k=1,16,32,64 --seeds 3 --data scenes --eval retrieval=scenes:test --out runs/k
      kiloword sweep clip-c --vary settings.rho=0.15,0.3 optim.lr=5e-4,1e-3 --data photos/train --out runs/rho
    """

    vary: tuple[str, ...] = setting((), "SETTING=VALUE,VALUE,...; several settings: every combination of their values")
    seeds: int = setting(1, "number of seeds, counted from --seed", 1, 1000)
    eval: tuple[str, ...] = setting((), "data sets to evaluate each model on: SRC or TASK=SRC, as --val of train")
    metric: tuple[str, ...] = setting((), "metrics to print and plot; default: the main ones")
    out: Path = setting(tyro.MISSING, "folder of the arms, sweep.json, sweep.csv and sweep.html")
    dry_run: bool = setting(False, "list the arms and their commands, and stop")


def main(argv: Sequence[str]) -> None:
    """Train over varied settings and seeds: kiloword sweep METHOD --vary SETTING=VALUES --data SRC --out DIR."""
    flags, words = split(argv)
    options = tyro.cli(SweepOptions, args=flags, prog="kiloword sweep METHOD")
    check(options)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("sweep runs in one process: start each arm with torchrun, as sweep --dry-run lists them.")
    command, every = _arms(options, words)
    try:
        train.read(every[0].words)  # one message in place of one an arm, before anything is written
    except ValueError as error:
        if not options.dry_run:
            raise
        warn(f"here the arms would be refused: {error}")  # such as for features that are not on this machine
    if options.dry_run:
        say(f"{len(every)} arms:", *(f"{arm.name}: {shlex.join(['kiloword', 'train', *arm.words])}" for arm in every))
        return
    _run(options, command, every)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The sweep's own arguments, with all values of a flag behind its first occurrence, and those of `train`."""
    of_sweep: dict[str, list[str]] = {}
    words: list[str] = []
    target = words
    for word in argv:
        flag, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            of_sweep.setdefault("--help", [])
        elif word.startswith("--"):
            flag = flag.replace("_", "-")
            target = of_sweep.setdefault(flag, []) if flag in OWN else words
            target += ([value] if equals else []) if flag in OWN else [word]
        else:
            target.append(word)
    return [word for flag, values in of_sweep.items() for word in (flag, *values)], words


def _arms(options: SweepOptions, words: Sequence[str]) -> tuple[MethodWords, list[Arm]]:
    """The command that all arms share, and the arms."""
    command = method_words(words, "sweep llip --vary settings.k=1,16 --out runs/k")
    if not options.vary:
        raise ValueError(
            "sweep needs a setting to vary: --vary SETTING=VALUE,VALUE, such as --vary settings.k=1,16,32."
        )
    run: Any = train.Train(recipe=default_recipe("", "tiny"), out=options.out)
    settings = command.settings()
    seed = (values_of(words, "--seed") or ("0",))[0]
    if not seed.isascii() or not seed.isdecimal():
        raise ValueError(f"--seed is {seed!r}: expected a whole number.")
    seeds = range(int(seed), int(seed) + options.seeds)
    return command, arms(varied(options.vary, run, settings), seeds, words, options.out)


def _run(options: SweepOptions, command: MethodWords, every: Sequence[Arm]) -> None:
    """Run the arms, and write the results. Raises: SystemExit(1) when arms failed."""
    from kiloword.apps.sweep import summary
    from kiloword.apps.sweep.run import Results, evaluated, run_all
    from kiloword.distributed.device import choose
    from kiloword.methods.registry import preset
    from kiloword.training.validation.sets import open_sets

    flags = command.flags
    sets = open_sets(options.eval, "questions" in preset(command.method).needs, None, "--eval")
    device = choose((values_of(flags, "--device") or ("auto",))[0])
    trust: dict[str, Any] = {"trust_code": "--trust-code" in flags}
    if ":" in command.method:
        trust = {"method": command.method}
    results = Results(options.out, every, options.eval)
    results.read()
    data = _training_data(flags) if any(one.task == "vqa" for one in sets) else None
    try:
        run_all(
            results,
            train.main,
            lambda folder: evaluated(folder, sets, data, device, **trust),
            lambda: summary.check_metrics(summary.rows(results), options.metric),
        )
    finally:
        _write(options, results)
    if results.errors:
        raise SystemExit(1)


def _training_data(flags: Sequence[str]) -> Any:
    from kiloword.config.recipes import DataConfig
    from kiloword.data.open import open_data

    return open_data(DataConfig(sources=values_of(flags, "--data") or ("scenes",)))


def _write(options: SweepOptions, results: Results) -> None:
    """Write what there is of table, CSV and page, and print the table."""
    from kiloword.apps.sweep import summary
    from kiloword.files import write_atomic, write_json
    from kiloword.report import write

    table = summary.rows(results)
    if not table and not results.errors:
        return
    metrics = summary.chosen(table, options.metric)
    write_json(options.out / "sweep.json", results.plain() | {"table": summary.as_plain(table)})
    write_atomic(options.out / "sweep.csv", summary.as_csv(table))
    write(options.out / "sweep.html", summary.page(results, metrics))
    say(*(summary.lines(table, metrics) if table else ()), f"page: {options.out / 'sweep.html'}")
    if results.errors:
        say(f"{len(results.errors)} of {len(results.arms)} arms failed: {', '.join(results.errors)}")
