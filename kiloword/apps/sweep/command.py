"""The verb sweep: arms, which are runs of `train`, one for each combination of values and each seed."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from kiloword.apps.sweep.arms import Arm, SweepOptions, flag_of
from kiloword.config.settings import check
from kiloword.files import Lock
from kiloword.methods.command import method_words, values_of
from kiloword.terminal import say, warn
from kiloword.training import command as train


def read(argv: Sequence[str]) -> Sweep:
    """Read the words of a command line: the flags that are not the sweep's own are those of `train`."""
    options, words = tyro.cli(SweepOptions, args=argv, prog="kiloword sweep METHOD", return_unknown_args=True)
    check(options)
    return Sweep(options, words)


@dataclass(frozen=True)
class Sweep:
    """The words of a command line, read."""

    options: SweepOptions
    words: Sequence[str]  # of `train`, which all arms share

    def run(self) -> None:
        """Run the arms that are not finished, and write the figures of all. Raises: ValueError as `results.run_all`."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("sweep runs in one process: start each arm with torchrun, as sweep --dry-run lists them.")
        method = method_words(self.words, "sweep llip --vary settings.k=1,16 --out runs/k").method
        arms, options = self.arms(), self.options
        try:
            for arm in arms[: len(arms) // options.seeds]:  # one message, before anything is written
                train.read(arm["command"])
        except ValueError as error:
            if not options.dry_run:
                raise
            warn(f"here the arms would be refused: {error}")  # such as for features that are not on this machine
        if options.dry_run:
            say(f"{len(arms)} arms:")
            say(*(f"{arm['name']}: {shlex.join(['kiloword', 'train', *arm['command']])}" for arm in arms))
            return
        from kiloword.apps.sweep.results import Results

        results = Results(options, method, self.words)  # opens the data of --eval before anything is written
        with Lock(options.out, "sweeping in"):
            results.run(arms)

    def arms(self) -> list[Arm]:
        """All arms, seed by seed, so that a sweep that is not finished has a whole table of fewer seeds.

        Raises: ValueError for settings that cannot be varied.
        """
        settings: dict[str, list[str]] = {}
        for word in self.options.vary:
            name, _, values = word.removeprefix("--").replace("_", "-").partition("=")
            if not values or "" in values.split(",") or name in {"seed", "out", "dry-run", *settings}:
                raise ValueError(f"--vary {word}: expected a setting of train with its values, as settings.k=1,16,32.")
            settings[name] = word.partition("=")[2].split(",")
            if len(set(settings[name])) < len(settings[name]):
                raise ValueError(f"--vary {word} names a value twice: give each value once.")
        if not settings:
            raise ValueError("sweep needs a setting to vary, such as --vary settings.k=1,16,32.")
        last = [name.rpartition(".")[2] for name in settings]
        short = [name if last.count(end) > 1 else end for name, end in zip(settings, last, strict=True)]
        first, arms = int((values_of(self.words, "--seed") or ("0",))[0]), list[Arm]()
        combinations = list(itertools.product(*settings.values()))
        for seed, chosen in itertools.product(range(first, first + self.options.seeds), combinations):
            parts = [*map("=".join, zip(short, chosen, strict=True)), f"seed={seed}"]
            name = re.sub(r"[^\w.=,+-]", "_", ",".join(parts))
            varied = dict(zip(settings, chosen, strict=True))
            words = [*self.words, *(word for one in varied.items() for word in flag_of(*one)), "--seed", str(seed)]
            arm = {"name": name, "command": [*words, "--out", str(self.options.out / name)]}
            arms.append(arm | {"eval": [*self.options.eval], "values": varied, "seed": seed})
        return arms
