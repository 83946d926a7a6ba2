"""The states of a run: find the newest undamaged one, write one, drop old ones."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from kiloword.distributed import collectives
from kiloword.files import SaveError, write_json
from kiloword.models.state_shards import SavedState
from kiloword.terminal import warn as say_warning

MAX_JSON = 1 << 28  # bytes; a bad sample takes about 100
_NAME, _FILE = re.compile(r"step-\d{1,18}\.json", re.ASCII), re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass
class _Bad:
    """State of `data.reading.BadRows`."""

    bad: list[tuple[NonNegativeInt, str, str]]


@dataclass
class _SinceRow:
    """State of `log.SinceRow`."""

    reports: list[dict[str, tuple[Literal["float64", "float32", "bfloat16", "float16"], float]]]
    captions: NonNegativeInt

    def __post_init__(self) -> None:
        if not all("loss" in report for report in self.reports):
            raise ValueError("a step has no loss")


@dataclass
class _Numbers:
    """The fields in the JSON of a state that a resumed run needs."""

    step: NonNegativeInt
    truncated: NonNegativeInt
    skipped_steps: tuple[NonNegativeInt, NonNegativeInt]
    bad: _Bad
    since_row: _SinceRow
    files: dict[str, str]  # name -> SHA-256

    def __post_init__(self) -> None:
        if not self.files or not all(map(_FILE.fullmatch, self.files)):
            raise ValueError("it names no files, or files that are not its own")


_NUMBERS = TypeAdapter(_Numbers)
Result = TypeVar("Result")


def shards_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}"


def states(folder: Path) -> list[Path]:
    """The JSON files of all states, newest first."""
    named = [path for path in folder.glob("step-*.json") if _NAME.fullmatch(path.name)]
    return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def steps_done(folder: Path) -> int:
    """Number of steps of the newest state; 0 without a state."""
    return max(map(_step, states(folder)), default=0)


def write_numbers(folder: Path, step: int, files: Mapping[str, str], numbers: Mapping[str, Any]) -> None:
    """Write the JSON that makes a state exist. Args: files: names in its folder -> SHA-256. Raises: SaveError."""
    value = {"step": step, **numbers, "files": dict(files)}
    write_json(folder / f"step-{step:09d}.json", {**value, "sha256": _digest(value)})


def _digest(numbers: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def drop_old(folder: Path, keep: int, step: int) -> None:
    """Keep the newest `keep` states up to that of this step; remove others, and remains of crashes. Raises: SaveError.

    A state of a later step is one that could not be read when the run was resumed: it takes the place of no good one.
    """
    try:
        kept_states = [path for path in states(folder) if _step(path) <= step][:keep]
        for path in states(folder):
            if path not in kept_states:
                path.unlink()
        kept = {path.stem: path for path in states(folder)}
        for path in [*folder.glob("step-*"), *folder.glob(".*.tmp")]:
            if path.is_dir() and path.name in kept:
                _drop_strangers(path, kept[path.name])
            elif path.is_dir():
                shutil.rmtree(path)
            elif path.stem not in kept:
                path.unlink()
    except OSError as e:
        raise SaveError(f"cannot drop old states in {folder}: {e.strerror or e}.") from e


def _drop_strangers(shards: Path, state: Path) -> None:
    """Remove files of an interrupted save with another number of ranks."""
    try:
        files = _json(state)["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged: removed when newer states exist
        return
    for path in shards.iterdir():
        if path.name not in files:
            path.unlink()


def newest(folder: Path, warn: Callable[[str], None]) -> SavedState | None:
    """The newest undamaged state, the same on all ranks, or None without states. A collective.

    Rank 0 lists the states, and every rank checks a share of the files. `warn` gets a message for each damaged state.
    Raises: ValueError when all are damaged.
    """
    first = collectives.rank() == 0
    names = collectives.all_lists([path.name for path in states(folder)] if first else [])
    for name in names:
        path = folder / name
        read, problems = _on_all_ranks(lambda: [_read(path)] if first else [])  # noqa: B023
        if not problems:
            (numbers,) = collectives.all_lists(read or [])
            stored, problems = _on_all_ranks(lambda: _open(path.with_suffix(""), numbers))  # noqa: B023
            if stored is not None and not problems:
                return stored
        warn(f"state {path.stem} is damaged ({problems[0]}): falling back to the one before.")
    if names:
        raise ValueError(f"no state in {folder} can be read: all are damaged. Start again with another --out.")
    return None


def open_state(path: Path) -> SavedState:
    """A state of a run that may still train: `OUT/state` is the newest one, `OUT/state/step-000000100` that of a step.

    A collective. Raises: ValueError where there is none, it is damaged, or the run has dropped it meanwhile.
    """
    if path.name == "state":
        stored = newest(path, say_warning)
        if stored is None:
            raise ValueError(f"{path} holds no state: expected the state folder of a run that has saved one.")
        return stored
    file = path if path.suffix == ".json" else path.with_name(f"{path.name}.json")
    if file not in states(path.parent):
        known = ", ".join(one.stem for one in states(path.parent)) or "none"
        raise ValueError(f"{path} is no state: {path.parent} has {known}.")
    try:
        return _open(file.with_suffix(""), _read(file))
    except ValueError as e:
        raise ValueError(f"{path} cannot be read ({e}): the run may have dropped it, or it is damaged.") from e


def _on_all_ranks(do: Callable[[], Result]) -> tuple[Result | None, list[str]]:
    """This rank's result, and the problems of all ranks. A collective."""
    result, problems = None, list[str]()
    try:
        result = do()
    except ValueError as e:
        problems = [str(e)]
    return result, collectives.all_lists(problems)


def _json(path: Path) -> dict[str, Any]:
    """Errors: OSError, ValueError, RecursionError."""
    _check_regular(path)
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path.stat().st_size:,} bytes, more than {MAX_JSON:,}")
    contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return contents


def _check_regular(path: Path) -> None:
    """Raises: ValueError for a pipe or a device, which may be endless; OSError."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError("not a regular file")


def _read(path: Path) -> dict[str, Any]:
    """The JSON of a state. Raises: ValueError when it is damaged."""
    try:
        numbers = _json(path)
        if numbers.pop("sha256") != _digest(numbers):
            raise ValueError("its checksum differs")
        plain = asdict(_NUMBERS.validate_python(numbers))
    except ValidationError as e:
        raise ValueError(f"{path.name}: {e.errors()[0]['loc']} {e.errors()[0]['msg'].lower()}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path.name}: {e}") from None
    if plain["step"] != _step(path):
        raise ValueError(f"{path.name}: it is of step {plain['step']}")
    return {**numbers, **plain}


def _open(folder: Path, numbers: dict[str, Any]) -> SavedState:
    """The state; each rank compares the checksums of its share of the files. Raises: ValueError for a damaged file."""
    files = list(numbers["files"].items())
    for name, checksum in files[collectives.rank() :: collectives.ranks()]:
        path, shown = folder / name, f"{folder.name}/{name}"
        try:
            _check_regular(path)
            with path.open("rb") as data:
                actual = hashlib.file_digest(data, "sha256").hexdigest()
        except (OSError, ValueError) as e:
            raise ValueError(f"{shown}: {e.strerror if isinstance(e, OSError) else e}") from None
        if actual != checksum:
            raise ValueError(f"the checksum of {shown} differs")
    return SavedState([folder / name for name, _ in files], numbers)
