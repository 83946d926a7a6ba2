"""`kiloword.train`: the verb train, called from Python."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from kiloword.addresses import public
from kiloword.api import Matcher, load
from kiloword.data.open import open_source
from kiloword.distributed.device import choose
from kiloword.training.command import Training, read


def train(data: Any, method: str | None = None, *, out: str | Path, **settings: Any) -> Matcher:
    """Train a model, as `kiloword train` does; the same call again resumes.

    Args: data: what --data takes, one or a list of them, or a data set in Python (`MapStyleSource` has its forms);
    method: a preset with components; None: the method of `recipe`, else "siglip"; out: folder of the run; settings:
    flags of the command, with "_" for "-": steps=2000, val="photos/dev", optim={"lr": 1e-3}, settings={"k": 16}. None
    stands for the default.
    Returns: the trained model, on the device that trained it. `load(out)` gives it again.
    Raises: ValueError, as the command, for settings and data that cannot be used; Stopped after a signal.
    """
    paths = data if isinstance(data, list | tuple) else [data]
    source = None
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        source, paths = open_source(data), ["dataset"]
    if method is None and not (settings.get("recipe") or settings.get("config")):
        method = "siglip"
    training = _read([*filter(None, [method]), *_words({"data": paths, "out": out} | settings)])
    folder, args = training.run(source), training.args
    return load(folder, str(choose(args.options.device)), method=args.recipe.method)


def _words(settings: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    """The words of a command line. Raises: ValueError for values that no flag takes."""
    for name, value in settings.items():
        name = name.replace("_", "-")
        values = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, Mapping):
            yield from _words(value, f"{prefix}{name}.")
        elif name in ("dry-run", "help", "help-all"):
            raise ValueError(f"{name} is of the command line alone: kiloword train --{name}.")
        elif not all(isinstance(one, str | Path | int | float | None) for one in values):
            kinds = ", ".join(sorted({type(one).__name__ for one in values}))
            raise ValueError(f"{name} is {kinds}: expected text, a path, a number or a list of these, as of the flag.")
        elif isinstance(value, bool):
            yield prefix + "no-" * (not value) + name
        elif value is not None:
            yield from (f"{prefix}{name}", *(public(str(one)) for one in values))


def _read(words: list[str]) -> Training:
    """Read words. Raises: ValueError with the message that the command line prints in a frame."""
    with redirect_stderr(StringIO()) as printed:
        try:
            training = read(words)
        except SystemExit:
            lines = [line.strip("│ ") for line in printed.getvalue().splitlines() if line[0] not in "╭╰"]
            raise ValueError(" ".join("" if "───" in line else line for line in lines)) from None
    sys.stderr.write(printed.getvalue())
    return training
