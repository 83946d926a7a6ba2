"""The states of a run: finding the newest whole one, writing one down, dropping old ones."""

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

MAX_JSON = 1 << 28  # bytes; a bad sample takes some 100
_NAME, _FILE = re.compile(r"step-\d{1,18}\.json", re.ASCII), re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass
class _Bad:
    """Of `data.bad.BadRows`."""

    bad: list[tuple[NonNegativeInt, str, str]] = field(default_factory=list)


_Kind = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass
class _SinceRow:
    """Of `log.SinceRow`."""

    reports: list[dict[str, tuple[_Kind, float]]] = field(default_factory=list)
    captions: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if not all("loss" in report for report in self.reports):
            raise ValueError("a step reports no loss")


@dataclass
class _Numbers:
    """What the json of a state must hold for a run to go on from it."""

    step: NonNegativeInt
    truncated: NonNegativeInt = 0
    skipped_steps: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)  # of older states: none
    bad: _Bad = field(default_factory=_Bad)
    since_row: _SinceRow = field(default_factory=_SinceRow)  # of older states: nothing


_NUMBERS = TypeAdapter(_Numbers)


def shards_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}"


def states(folder: Path) -> list[Path]:
    """Their json files, newest first."""
    named = [path for path in folder.glob("step-*.json") if _NAME.fullmatch(path.name)]
    return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def steps_done(folder: Path) -> int:
    """Steps of the newest state; 0 where there is none."""
    return max(map(_step, states(folder)), default=0)


def write_numbers(folder: Path, step: int, files: Mapping[str, str], numbers: Mapping[str, Any]) -> None:
    """The last file of a state: from here on it exists. `files`: names in its folder -> SHA-256. Raises: SaveError."""
    value = {"step": step, **numbers, "files": dict(files)}
    write_json(folder / f"step-{step:09d}.json", {**value, "sha256": _digest(value)})


def _digest(numbers: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def drop_old(folder: Path, keep: int) -> None:
    """Drop all but the newest `keep` states, and what crashes left. Raises: SaveError."""
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
    """Files of an attempt that was cut, by another number of ranks."""
    try:
        files = _json(state)["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged: the next states push it out
        return
    for path in shards.iterdir():
        if path.name not in files:
            path.unlink()


def newest(folder: Path, warn: Callable[[str], None]) -> SavedState | None:
    """The newest undamaged state, or None when there is none; every rank finds the same.

    Rank 0 says which there are, every rank checks a share of the files, and all hear what is wrong. `warn` gets a
    sentence for each damaged one. Raises: ValueError when all are damaged.
    """
    names = collectives.all_lists([path.name for path in states(folder)] if collectives.rank() == 0 else [])
    for name in names:
        path = folder / name
        (found,) = collectives.all_lists([_read(path)] if collectives.rank() == 0 else [])
        wrong = [found] if isinstance(found, str) else collectives.all_lists(_damage(path, found))
        if not isinstance(found, str) and not wrong:
            stored = _open(path.parent, found)
            wrong = collectives.all_lists([stored] if isinstance(stored, str) else [])
            if isinstance(stored, SavedState) and not wrong:
                return stored
        warn(f"state {path.stem} is damaged ({wrong[0]}): falling back to the one before.")
    if names:
        raise ValueError(f"no state in {folder} can be read: all are damaged. Start again with another --out.")
    return None


def _open(folder: Path, found: dict[str, Any]) -> SavedState | str:
    """The state, or what is wrong with its files."""
    try:
        return SavedState([folder / file for file in found["files"]], found)
    except ValueError as e:
        return str(e)


def _check_regular(path: Path) -> None:
    """Raises: ValueError for a pipe or a device, which may have no end; OSError."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError("no regular file")


def _json(path: Path) -> dict[str, Any]:
    """Errors: OSError, ValueError, RecursionError."""
    _check_regular(path)
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path.stat().st_size:,} bytes, more than {MAX_JSON:,}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _read(path: Path) -> dict[str, Any] | str:
    """A state's numbers, whose "files" are named from `path`'s folder on; or what is wrong with them."""
    try:
        numbers = _json(path)
        if "files" not in numbers:  # one file and its BLAKE2: what kiloword wrote before states were sharded
            files = {f"{path.stem}.safetensors": numbers["checksum"]}
            return {**numbers, **asdict(_NUMBERS.validate_python(numbers)), "files": files}
        if numbers.pop("sha256") != _digest(numbers):
            return f"the checksum of {path.name} differs"
        if not numbers["files"]:
            return f"{path.name} names no files"
        files = {f"{path.stem}/{file}": known for file, known in numbers["files"].items() if _FILE.fullmatch(file)}
        if len(files) < len(numbers["files"]) or numbers["step"] != _step(path):
            return f"{path.name} names files or a step that are not its own"
        return {**numbers, **asdict(_NUMBERS.validate_python(numbers)), "files": files}
    except ValidationError as e:
        return f"{path.name}: {e.errors()[0]['loc']} {e.errors()[0]['msg'].lower()}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return f"{path.name}: {e}"


def _damage(path: Path, found: dict[str, Any]) -> list[str]:
    """What is wrong with this rank's share of a state's files."""
    out = []
    for file, checksum in list(found["files"].items())[collectives.rank() :: collectives.ranks()]:
        try:
            _check_regular(path.parent / file)
            with (path.parent / file).open("rb") as data:
                real = hashlib.file_digest(data, _old if "checksum" in found else "sha256").hexdigest()
        except (OSError, ValueError) as e:  # the second: a zero byte in the name
            out.append(f"{file}: {e.strerror if isinstance(e, OSError) else e}")
            continue
        if real != checksum:
            out.append(f"the checksum of {file} differs")
    return out


def _old() -> Any:
    return hashlib.blake2b(digest_size=16)
