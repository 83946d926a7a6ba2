"""How remote data is fetched and kept: settings that change no result, the same for every verb."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

from kiloword.data import cache
from kiloword.recipes import Settings

VARIABLE = "KILOWORD_REMOTE"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True, kw_only=True)
class RemoteConfig(Settings):
    """Of the environment variable KILOWORD_REMOTE: `limit=200GB retries=8 timeout=60`."""

    limit: float = 50e9  # bytes of shards on the local disk, of all runs and data sets together
    retries: int = 5  # after the first attempt, as long as nothing arrives
    timeout: float = 30.0  # seconds without a byte, or below 1 kB/s, that count as a failure
    backoff: float = 1.0  # seconds before the first retry, doubled from one to the next
    piece: float = 8 * 2**20  # bytes of a shard that are fetched and thrown away together
    ahead: int = 32_768  # rows of the order that are fetched ahead; 0: none
    threads: int = 4  # connections at once of a process: of indexing, of fetching ahead

    def __post_init__(self) -> None:
        least = {"limit": self.piece, "retries": 0, "timeout": 1e-3, "backoff": 0, "piece": 1, "ahead": 0, "threads": 1}
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise ValueError(f"{VARIABLE}: {name} is {getattr(self, name):.12g}; expected at least {low:.12g}.")


def remote_config() -> RemoteConfig:
    """What the environment says. Raises: ValueError for a setting that is none."""
    kinds = {f.name: f.type for f in fields(RemoteConfig)}
    given: dict[str, float] = {}
    for word in re.split(r"[\s,]+", os.environ.get(VARIABLE, "").strip()):
        if not word:
            continue
        name, _, value = word.partition("=")
        number = _number(value)
        if name not in kinds or number is None:
            raise ValueError(f"{VARIABLE}: {word!r} is no setting. Expected {', '.join(kinds)}, such as limit=200GB.")
        given[name] = int(number) if kinds[name] == "int" else number
    return RemoteConfig(**given)  # type: ignore[arg-type]  # numbers all, whole ones where they must be


def _number(text: str) -> float | None:
    """`50e9`, `200GB`, `8MB` in bytes; None for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmgt]?)b?", text.lower())
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def remote_folder(part: str) -> Path:
    """Where one kind of what was fetched is kept."""
    return cache.folder() / "remote" / part
