"""The verb train. Its flags are the recipe's settings, whose defaults depend on method, size and data.

No torch at import, so that help is instant.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import tyro

from kiloword.cli.words import method_command, values_of
from kiloword.config.options import Mixing, RunOptions
from kiloword.config.recipes import Recipe
from kiloword.config.settings import BaseSettings, about, check, setting
from kiloword.methods.defaults import default_recipe
from kiloword.terminal import say


@dataclass(frozen=True, kw_only=True)
class Train(BaseSettings):
    """Train a model; run the same command again to resume.

    Examples:
      kiloword train siglip --data scenes --out runs/first
      kiloword train clip --data photos/train --val photos/dev --out runs/photos --epochs 30
      kiloword train siglip --data table.csv --out runs/table --size s16 --optim.lr 1e-3 --workers 8
      kiloword train llip --transforms compose --positives mined --features features --data photos/train --out runs/mix
    """

    common: ClassVar[dict[str, str]] = {
        "data": "data val features captions",
        "length": "steps epochs samples batch",
        "model": "size init",
        "loss": "transforms positives pair-loss pooling uncertainty terms",
        "optimization": "optim.name optim.lr optim.muon-lr optim.warmup",
        "hardware": "device workers precision micro",
        "run": "out seed dry-run",
    }

    out: Path = setting(tyro.MISSING, "folder of the run")
    steps: int | None = setting(None, "length in steps; or give --epochs or --samples")
    epochs: float | None = setting(None, "length in passes over the data")
    samples: int | None = setting(None, "length in images seen")
    dry_run: bool = setting(False, "print what would run, and stop")
    mixing: Mixing = field(default_factory=Mixing, metadata=about(flag=""))
    options: RunOptions = field(default_factory=RunOptions, metadata=about(flag=""))
    recipe: Recipe = field(metadata=about(flag=""))


def main(argv: Sequence[str]) -> None:
    """Train a model, or resume it: kiloword train METHOD --data SRC --out DIR."""
    command = method_command(argv, "train siglip --out runs/first")
    usual = _defaults(command.method, command.flags)
    args, settings = command.read(Train(recipe=usual))
    check(args.recipe)
    recipe = replace(args.recipe, settings={} if settings is None else asdict(settings))
    from kiloword.training import effects, start
    from kiloword.training.dry_run import rehearse
    from kiloword.training.loop import train
    from kiloword.training.resolve import open_sources, visited, with_length

    start.check(recipe)
    effects.check(recipe, usual, args.options.trust_code)
    source = open_sources(recipe)
    recipe = with_length(recipe, visited(recipe, source), args.steps, args.epochs, args.samples)
    if args.dry_run:
        rehearse(recipe, source, args.out, args.options)
        return
    folder = train(recipe, args.out, source, args.options)
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        say(f"model: {folder}")


def _defaults(method: str, argv: Sequence[str]) -> Recipe:
    """The recipe that method, size, data and init imply."""
    data = values_of(argv, "--data") or ("scenes",)
    size, init = ((values_of(argv, flag) or (None,))[0] for flag in ("--size", "--init"))
    if init is None:
        return default_recipe(method, size or "tiny", data)
    from kiloword.training import start

    return start.defaults(method, init, size, data)
