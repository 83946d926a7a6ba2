"""The arms of a sweep: every combination of the values of its settings, and every seed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from kiloword.config.settings import Leaf, check, leaves
from kiloword.errors import suggestion

MOST = 1000  # largest number of arms
NOT_VARIED = ("out", "seed", "dry-run")  # settings that the sweep sets itself
NO_FLAGS = ("recipe.method", "recipe.settings")


@dataclass(frozen=True)
class Varied:
    """A setting and its values."""

    name: str  # as given, "settings.k"
    flag: str  # on the command line of `train`, "--settings.k"
    values: tuple[str, ...]
    switch: bool = False  # its values are True and False, for which there are flags with and without "no-"

    def words(self, value: str) -> list[str]:
        """The arguments of `train` that set a value."""
        if not self.switch:
            return [self.flag, value]
        path, _, last = self.flag.rpartition(".")
        return [self.flag if value == "True" else f"{path}.no-{last}" if path else f"--no-{last.removeprefix('--')}"]


@dataclass(frozen=True)
class Arm:
    """One run of a sweep."""

    values: Mapping[str, str]  # setting -> value
    seed: int
    words: tuple[str, ...]  # arguments of `train`

    @property
    def name(self) -> str:
        """The name of its folder below that of the sweep."""
        short = {name: name.rpartition(".")[2] for name in self.values}
        names = {n: s if list(short.values()).count(s) == 1 else n for n, s in short.items()}
        parts = [f"{names[name]}={value}" for name, value in self.values.items()]
        return re.sub(r"[^\w.=,+-]", "_", ",".join([*parts, f"seed={self.seed}"]))


def varied(words: Sequence[str], run: Any, settings: Any) -> list[Varied]:
    """The settings that `--vary` names, with values that their types and limits allow.

    Args: run: settings of `train`; settings: of the method.
    Raises: ValueError for a word that is not NAME=VALUE,..., a setting that does not exist or is given twice, and a
    value that cannot be parsed or is out of its limits.
    """
    known = {name: (run, leaf, "--") for leaf in leaves(run) for name in _names(leaf)}
    known |= {f"settings.{name}": (settings, leaf, "--settings.") for leaf in leaves(settings) for name in _names(leaf)}
    made: list[Varied] = []
    for word in words:
        name, _, listed = word.partition("=")
        values = tuple(listed.split(","))
        if not (name and listed and all(values)):
            raise ValueError(f"--vary {word}: expected SETTING=VALUE,VALUE,..., such as settings.k=1,16,32.")
        if len(set(values)) < len(values):
            raise ValueError(f"--vary {word} names a value twice.")
        key = name.removeprefix("--").replace("_", "-")
        if key not in known or key in NOT_VARIED:
            hint = "it is set by the sweep." if key in NOT_VARIED else "there is no such setting."
            raise ValueError(f"--vary {name}: {hint}{suggestion(key, known) if key not in known else ''}")
        where, leaf, prefix = known[key]
        if any(f"{prefix}{leaf.flag}" == one.flag for one in made):
            raise ValueError(f"--vary names {name} twice: give all its values at once, {name}=A,B,C.")
        parsed = [_parsed(name, value, leaf) for value in values]
        for value in parsed:
            check(_replaced(where, leaf.path.split("."), value), prefix)
        switch = isinstance(parsed[0], bool)
        made.append(Varied(key, f"{prefix}{leaf.flag}", tuple(map(str, parsed)) if switch else values, switch))
    return made


def _names(leaf: Leaf) -> set[str]:
    """How a setting may be named: as its flag, or by its place in a recipe."""
    if leaf.path in NO_FLAGS:
        return set()
    return {leaf.flag, leaf.path.removeprefix("recipe.").replace("_", "-")}


def _parsed(name: str, value: str, leaf: Leaf) -> Any:
    """A value as the type of its setting. Raises: ValueError for one that is not of this type."""
    from pydantic import TypeAdapter, ValidationError

    kind = TypeAdapter(get_type_hints(leaf.owner, include_extras=True)[leaf.field.name])
    try:
        return kind.validate_strings(value)
    except ValidationError as error:
        try:
            return kind.validate_python((value,))  # of a setting that takes several values
        except ValidationError:
            problem = error.errors()[0]["msg"].lower()
            raise ValueError(f"--vary {name}: {value!r} does not fit: {problem}.") from None


def _replaced(settings: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of nested settings with one value replaced."""
    inner = value if len(path) == 1 else _replaced(getattr(settings, path[0]), path[1:], value)
    return replace(settings, **{path[0]: inner})


def arms(settings: Sequence[Varied], seeds: Sequence[int], words: Sequence[str], out: Path) -> list[Arm]:
    """All arms, seed by seed, so that a sweep that is not finished has a whole table of fewer seeds.

    Args: words: arguments of `train` that all arms share; out: folder of the sweep.
    Raises: ValueError for too many arms, and for two that would share a folder.
    """
    made = []
    for seed, values in itertools.product(seeds, itertools.product(*(one.values for one in settings))):
        chosen = [word for one, value in zip(settings, values, strict=True) for word in one.words(value)]
        arm = Arm(dict(zip((one.name for one in settings), values, strict=True)), seed, ())
        place = ("--seed", str(seed), "--out", str(out / arm.name))
        made.append(replace(arm, words=(*words, *chosen, *place)))
    if len(made) > MOST:
        raise ValueError(f"the sweep has {len(made):,} arms: expected at most {MOST:,}.")
    names = [arm.name for arm in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two arms would share the folder {twice}: give their values names that differ.")
    return made
