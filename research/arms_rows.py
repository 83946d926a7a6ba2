"""Finished runs of an experiment: OUT/results.jsonl, a row an arm and seed, and when a row still stands."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

from kiloword.config.recipes import Recipe
from kiloword.runs.rows import read_metrics
from research.arms import Arm, Options

LOSSES = 20  # first losses of a run that say whether another commit computes the same
OTHER_LOSSES = 3  # exit code of a check that finds others; 1 and 2 are those of failures
JUDGED_BY = ("val", "level", "chains", "pairs", "photos", "scenes")  # options that decide what a model is judged on

Row = dict[str, Any]


def recipe_hash(recipe: Recipe) -> str:
    """What tells recipes apart, seeds aside: of what differs from the defaults, so that new settings change nothing."""
    changes = _changes(dataclasses.replace(recipe, seed=0), Recipe(method=""))
    return hashlib.blake2b(json.dumps(changes, sort_keys=True).encode(), digest_size=6).hexdigest()


def _changes(value: Any, default: Any) -> Any:
    """The part of a recipe that is not the default, as plain data; names of sizes are replaced by their values."""
    if not is_dataclass(value) or type(value) is not type(default):
        return value
    pairs = {f.name: (getattr(value, f.name), getattr(default, f.name)) for f in fields(value)}
    return {name: _changes(a, b) for name, (a, b) in pairs.items() if a != b}


def judged_by(options: Options) -> dict[str, Any]:
    """The options that decide what models are judged on, those that are set; of a path its last two parts: "tiny/dev".

    The same data may lie in another folder on another machine. Data of two folders with equal last parts passes for
    one; a name of one part alone ("dev") and a longer one for two: the trained models are then judged again.
    """
    values = {name: value for name in JUDGED_BY if (value := getattr(options, name, None)) is not None}
    return {name: _ending(value) if isinstance(value, str) else value for name, value in values.items()}


def _ending(src: str) -> str:
    path, mark, query = src.partition("?")
    return "/".join(PurePath(path).parts[-2:]) + mark + query


def read(out: Path) -> list[Row]:
    """All rows of the folder of an experiment."""
    return read_file(out / "results.jsonl")


def read_file(path: Path) -> list[Row]:
    """All rows, none where there is no file; a line that a crash cut is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def append(out: Path, row: Row) -> None:
    """Add a row in one write, behind whatever a crash has left, while no other process writes."""
    with (out / "results.jsonl").open("a+b") as file, _locked(file.fileno()):
        file.seek(0, 2)
        whole = file.tell() == 0
        if not whole:
            file.seek(-1, 2)
            whole = file.read() == b"\n"
        file.write((b"" if whole else b"\n") + json.dumps(row).encode() + b"\n")
        file.flush()


def finished(rows: Sequence[Row], arm: Arm, seed: int, options: Options | None = None) -> Row | None:
    """The newest row of an arm's very recipe and seed.

    Args: options: rows that were judged on other data than theirs do not count; those of older versions do,
    as they do not name it. Default: all count.
    """
    same = (arm.name, seed, recipe_hash(arm.recipe))
    of_run = (row for row in reversed(rows) if (row["arm"], row["seed"], row["recipe"]) == same)
    return next((row for row in of_run if options is None or _is_of(row, options)), None)


def _is_of(row: Row, options: Options) -> bool:
    return "judged" not in row or row["judged"] == judged_by(options)


def folder_of(out: Path, arm: Arm, seed: int) -> Path:
    """Where a run lies: another recipe has another folder."""
    return out / f"{arm.name}-{seed}-{recipe_hash(arm.recipe)}"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process works in the folder: an older script's run may still be alive."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w", encoding="utf-8") as file, _locked(file.fileno()):
        yield


@contextmanager
def _locked(handle: int) -> Iterator[None]:
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


def losses(folder: Path) -> list[float]:
    """The first losses of a run whose every step was logged."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    return [float(row["loss"]) for row in rows[:LOSSES]]


def losses_hash(values: Sequence[float]) -> str:
    """Equal when losses are equal bit for bit."""
    return hashlib.blake2b(",".join(v.hex() for v in values).encode(), digest_size=8).hexdigest()


def commit() -> tuple[str, bool]:
    """The commit of kiloword/ and research/, and whether their files differ; ("unknown", True) outside a checkout."""
    here = Path(__file__).parents[1]
    try:
        head = _git(here, "rev-parse", "HEAD").strip()
        return head, bool(_git(here, "status", "--porcelain", "--", "kiloword", "research").strip())
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True, text=True).stdout
