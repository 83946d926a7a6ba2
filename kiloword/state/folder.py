"""The states of a run: finding the newest whole one, writing one down, dropping old ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kiloword import parallel
from kiloword.files import SaveError, write_json
from kiloword.state.shards import Stored


def shards_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}"


def states(folder: Path) -> list[Path]:
    """Their json files, newest first."""
    return sorted(folder.glob("step-*.json"), reverse=True)


def steps_done(folder: Path) -> int:
    """Steps of the newest state; 0 where there is none."""
    return max((int(path.stem.removeprefix("step-")) for path in states(folder)), default=0)


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
        files = json.loads(state.read_text())["files"]
    except (ValueError, KeyError, TypeError):  # damaged: the next states push it out
        return
    for path in shards.iterdir():
        if path.name not in files:
            path.unlink()


def newest(folder: Path, warn: Callable[[str], None]) -> Stored | None:
    """The newest undamaged state, or None when there is none; every rank finds the same.

    Rank 0 says which there are, every rank checks a share of the files, and all hear what is wrong. `warn` gets a
    sentence for each damaged one. Raises: ValueError when all are damaged.
    """
    names = parallel.all_lists([path.name for path in states(folder)] if parallel.rank() == 0 else [])
    for name in names:
        path = folder / name
        (found,) = parallel.all_lists([_read(path)] if parallel.rank() == 0 else [])
        wrong = [found] if isinstance(found, str) else parallel.all_lists(_damage(path, found))
        if not isinstance(found, str) and not wrong:
            return Stored([path.parent / file for file in found["files"]], found)
        warn(f"state {path.stem} is damaged ({wrong[0]}): falling back to the one before.")
    if names:
        raise ValueError(f"no state in {folder} can be read: all are damaged. Start again with another --out.")
    return None


def _read(path: Path) -> dict[str, Any] | str:
    """A state's numbers, whose "files" are named from `path`'s folder on; or what is wrong with them."""
    try:
        numbers: dict[str, Any] = json.loads(path.read_text())
        if "files" not in numbers:  # one file and its BLAKE2: what kiloword wrote before states were sharded
            return {**numbers, "files": {f"{path.stem}.safetensors": numbers["checksum"]}}
        if numbers.pop("sha256") != _digest(numbers):
            return f"the checksum of {path.name} differs"
        if not numbers["files"]:
            return f"{path.name} names no files"
        return {**numbers, "files": {f"{path.stem}/{file}": known for file, known in numbers["files"].items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return f"{path.name}: {e}"


def _damage(path: Path, found: dict[str, Any]) -> list[str]:
    """What is wrong with this rank's share of a state's files."""
    out = []
    for file, checksum in list(found["files"].items())[parallel.rank() :: parallel.ranks()]:
        try:
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
