"""What sweep.json holds of earlier calls, and whether they are of the same sweep. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiloword.apps.sweep.arms import Arm
from kiloword.config.options import RunOptions
from kiloword.config.settings import leaves

PLACE = 4  # words of --seed and --out, the last ones of an arm
# With --patience these decide when a run stops early, and so its result.
EARLY = {"--patience", "--keep-best", "--eval-every", "--eval-epochs"}
# Flags in which calls of a sweep may differ: the seed is the arm's, the others change no result.
FREE = {"--seed", *(f"--{leaf.flag}" for leaf in leaves(RunOptions()))}


@dataclass(frozen=True)
class Stored:
    """An arm with its results."""

    arm: Arm
    row: Mapping[str, Any]  # as JSON holds it

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Stored:
        """Raises: KeyError, TypeError, ValueError for a row that no sweep has written."""
        command, values = row["command"], row["values"]
        if not all(isinstance(word, str) for word in (*command, *values, *values.values())):
            raise TypeError("words of an arm are texts")
        arm = Arm(values, int(row["seed"]), tuple(command))
        if arm.name != row["name"]:
            raise ValueError("an arm has the name of its values")
        return cls(arm, row)


def read(path: Path) -> dict[str, Stored]:
    """The arms with results in a file, by name; of a file that does not exist none.

    Raises: ValueError for a file that is not sweep.json.
    """
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["arms"]
        return {row["name"]: Stored.of(row) for row in rows if "metrics" in row}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path} is no sweep of kiloword, or damaged: choose another --out.") from e


def check_same(out: Path, stored: Mapping[str, Stored], arms: Sequence[Arm]) -> None:
    """Refuse a call that would mix its results with those of other settings, or replace them.

    Args: out: folder of the sweep. Raises: ValueError naming the settings that differ.
    """
    by_name = {arm.name: arm for arm in arms}
    for name, one in stored.items():
        there, here = _settings(one.arm), _settings(by_name.get(name, arms[0]))
        if name in by_name:  # two settings may have one short name
            there, here = there | dict(one.arm.values), here | dict(by_name[name].values)
        if differ := [flag for flag in {**there, **here} if there.get(flag) != here.get(flag)]:
            shown = ", ".join(f"{flag} {_shown(flag, there)} there, {_shown(flag, here)} here" for flag in differ)
            raise ValueError(f"{out} holds a sweep of other settings ({shown}): choose another --out.")


def _shown(flag: str, settings: Mapping[str, str]) -> str:
    return (settings[flag] or "given") if flag in settings else "not given"


def _settings(arm: Arm) -> dict[str, str]:
    """The words that an arm shares with the others of its sweep: flag -> values; the first words are of METHOD."""
    words = list(arm.words[:-PLACE])
    for _ in arm.values:  # behind the shared words each varied setting has its flag and value, or a flag alone
        del words[-1 if words[-1].startswith("--") else -2 :]
    values: dict[str, list[str]] = {}
    flag = "METHOD"
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            flag = flag.replace("_", "-")
            values[flag] = [value] if equals else []  # of a flag that comes again the last counts
        else:
            values.setdefault(flag, []).append(word)
    free = FREE - EARLY if "--patience" in values else FREE
    return {flag: " ".join(words_of_flag) for flag, words_of_flag in values.items() if flag not in free}
