"""An arm of a sweep: a run of `train` with its words, and later its figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from kiloword.config.options import RunOptions
from kiloword.config.settings import BaseSettings, leaves, setting
from kiloword.methods.command import values_of

EARLY = {"patience", "keep-best", "eval-every", "eval-epochs"}  # they decide when a run stops early
# Flags in which calls of a sweep may differ: they change no result.
FREE = {"--seed", "--out", *(f"--{leaf.flag}" for leaf in leaves(RunOptions()) if leaf.flag not in EARLY)}
Arm = dict[str, Any]
"""An arm as sweep.json holds it: name (of its folder), values (setting -> value), seed, command (words of `train`) and
eval; once it has run metrics or error."""


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
    out: Path = setting(tyro.MISSING, "folder of the arms, sweep.json and sweep.html")
    dry_run: bool = setting(False, "list the arms and their commands, and stop")


def flag_of(name: str, value: str) -> list[str]:
    """The arguments of `train` that set a value: a switch has a flag with "no-" in place of false."""
    path, dot, last = name.rpartition(".")
    if value.lower() in ("true", "false"):
        return [f"--{path}{dot}{'' if value.lower() == 'true' else 'no-'}{last}"]
    return [f"--{name}", value]


def shared(arm: Arm) -> dict[str, tuple[str, ...]]:
    """What decides the result of an arm, and is the same in all arms of its sweep: flag -> values."""
    words = arm["command"]
    flags = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    flags -= {flag_of(*one)[0] for one in arm["values"].items()} | FREE
    return {"METHOD": tuple(words[:1])} | {flag: values_of(words, flag) for flag in sorted(flags)}
