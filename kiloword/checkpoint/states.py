"""The states of a run: find the newest undamaged one, write one, drop old ones."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from kiloword.checkpoint.files import SaveError, write_json
from kiloword.checkpoint.state_shards import SavedState
from kiloword.distributed import collectives

MAX_JSON = 1 << 28  # bytes; a bad sample takes about 100
_NAME, _FILE = re.compile(r"step-\d{1,18}\.json", re.ASCII), re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass
class _Bad:
    """State of `data.reading.BadRows`."""

    bad: list[tuple[NonNegativeInt, str, str]] = field(default_factory=list)


_Kind = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass
class _SinceRow:
    """State of `log.SinceRow`."""

    reports: list[dict[str, tuple[_Kind, float]]] = field(default_factory=list)
    captions: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if not all("loss" in report for report in self.reports):
            raise ValueError("a step has no loss")


@dataclass
class _Numbers:
    """The fields in the JSON of a state that a resumed run needs."""

    step: NonNegativeInt
    truncated: NonNegativeInt = 0
    skipped_steps: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)  # missing in older states
    bad: _Bad = field(default_factory=_Bad)
    since_row: _SinceRow = field(default_factory=_SinceRow)  # missing in older states


_NUMBERS = TypeAdapter(_Numbers)


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


def drop_old(folder: Path, keep: int) -> None:
    """Remove all except the newest `keep` states, and remains of crashes. Raises: SaveError."""
    try:
        for old in states(folder)[keep:]:
            old.unlink()
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
    names = collectives.all_lists([path.name for path in states(folder)] if collectives.rank() == 0 else [])
    for name in names:
        path = folder / name
        (numbers,) = collectives.all_lists([_read(path)] if collectives.rank() == 0 else [])
        wrong = [numbers] if isinstance(numbers, str) else collectives.all_lists(_damage(path, numbers))
        if not isinstance(numbers, str) and not wrong:
            stored = _open(path.parent, numbers)
            wrong = collectives.all_lists([stored] if isinstance(stored, str) else [])
            if isinstance(stored, SavedState) and not wrong:
                return stored
        warn(f"state {path.stem} is damaged ({wrong[0]}): falling back to the one before.")
    if names:
        raise ValueError(f"no state in {folder} can be read: all are damaged. Start again with another --out.")
    return None


def _open(folder: Path, numbers: dict[str, Any]) -> SavedState | str:
    """The state, or the problem with its files."""
    try:
        return SavedState([folder / file for file in numbers["files"]], numbers)
    except ValueError as e:
        return str(e)


def _check_regular(path: Path) -> None:
    """Raises: ValueError for a pipe or a device, which may be endless; OSError."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError("not a regular file")


def _json(path: Path) -> dict[str, Any]:
    """Errors: OSError, ValueError, RecursionError."""
    _check_regular(path)
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path.stat().st_size:,} bytes, more than {MAX_JSON:,}")
    contents: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return contents


def _read(path: Path) -> dict[str, Any] | str:
    """The JSON of a state with "files" relative to the folder of `path`; or the problem with it."""
    try:
        numbers = _json(path)
        if "files" not in numbers:  # a state of one file with BLAKE2, from before states were sharded
            files = {f"{path.stem}.safetensors": numbers["checksum"]}
            return {**numbers, **asdict(_NUMBERS.validate_python(numbers)), "files": files}
        if numbers.pop("sha256") != _digest(numbers):
            return f"the checksum of {path.name} differs"
        if not numbers["files"]:
            return f"{path.name} names no files"
        files = {f"{path.stem}/{file}": sha for file, sha in numbers["files"].items() if _FILE.fullmatch(file)}
        if len(files) < len(numbers["files"]) or numbers["step"] != _step(path):
            return f"{path.name} names files or a step that are not its own"
        return {**numbers, **asdict(_NUMBERS.validate_python(numbers)), "files": files}
    except ValidationError as e:
        return f"{path.name}: {e.errors()[0]['loc']} {e.errors()[0]['msg'].lower()}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return f"{path.name}: {e}"


def _damage(path: Path, numbers: dict[str, Any]) -> list[str]:
    """Problems of this rank's share of a state's files."""
    problems = []
    for file, checksum in list(numbers["files"].items())[collectives.rank() :: collectives.ranks()]:
        try:
            _check_regular(path.parent / file)
            with (path.parent / file).open("rb") as data:
                real = hashlib.file_digest(data, _old if "checksum" in numbers else "sha256").hexdigest()
        except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
            problems.append(f"{file}: {e.strerror if isinstance(e, OSError) else e}")
            continue
        if real != checksum:
            problems.append(f"the checksum of {file} differs")
    return problems


def _old() -> Any:
    return hashlib.blake2b(digest_size=16)
