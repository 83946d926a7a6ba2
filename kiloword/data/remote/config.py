"""How remote data is fetched and kept: settings that change no result, the same for every verb."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

from kiloword.addresses import scrubbed
from kiloword.config.settings import BaseSettings
from kiloword.data import files

VARIABLE = "KILOWORD_REMOTE"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_HOSTS = "hosts"
_HOST = re.compile(r"[\w.*:\[\]-]+")
_MOST = {  # of any setting there has to be a most, so that no sum of them overflows
    "limit": 1e18,
    "retries": 1000,
    "timeout": 86_400,
    "backoff": 3600,
    "piece": 1e12,
    "ahead": 10**9,
    "threads": 256,
}


@dataclass(frozen=True, kw_only=True)
class RemoteConfig(BaseSettings):
    """Of the environment variable KILOWORD_REMOTE: `limit=200GB retries=8 timeout=60 hosts=data.org,*.data.org`."""

    limit: float = 50e9  # bytes of shards on the local disk, of all runs and data sets together
    retries: int = 5  # after the first attempt, as long as nothing arrives
    timeout: float = 30.0  # seconds without a byte, or below 1 kB/s, that count as a failure
    backoff: float = 1.0  # seconds before the first retry, doubled from one to the next
    piece: float = 8 * 2**20  # bytes of a shard that are fetched and thrown away together
    ahead: int = 32_768  # rows of the order that are fetched ahead; 0: none
    threads: int = 4  # connections at once of a process: of indexing, of fetching ahead
    hosts: tuple[str, ...] = ()  # hosts (`*` for any characters) that data and redirects may name; (): all

    def __post_init__(self) -> None:
        least = {"limit": self.piece, "retries": 0, "timeout": 1e-3, "backoff": 0, "piece": 1, "ahead": 0, "threads": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if not low <= value <= _MOST[name]:
                limits = f"at least {low:.12g}" if value < low else f"at most {_MOST[name]:.12g}"
                raise ValueError(f"{VARIABLE}: {name} is {value:.12g}; expected {limits}.")

    def allows(self, host: str) -> bool:
        """Whether data may come from a host (of s3 and the like: a bucket)."""
        name = host.lower().rstrip(".")
        return not self.hosts or any(fnmatchcase(name, pattern) for pattern in self.hosts)


def remote_config() -> RemoteConfig:
    """What the environment says. Raises: ValueError for a setting that is none."""
    kinds = {f.name: f.type for f in fields(RemoteConfig)}
    given: dict[str, float] = {}
    hosts: list[str] = []
    name = ""
    for word in filter(None, re.split(r"[\s,]+", os.environ.get(VARIABLE, ""))):
        if name != _HOSTS or "=" in word:  # else one more host
            name, _, value = word.partition("=")
        else:
            value = word
        number = _number(value)
        if name == _HOSTS and _HOST.fullmatch(value):
            hosts.append(value.lower())
        elif name in kinds and number is not None:
            given[name] = int(number) if kinds[name] == "int" and number <= _MOST[name] else number
        else:
            expected = f"Expected {', '.join(kinds)}, such as limit=200GB hosts=data.org,*.data.org."
            raise ValueError(f"{VARIABLE}: {scrubbed(word)[:100]!r} is no setting. {expected}")
    return RemoteConfig(**given, hosts=tuple(hosts))  # type: ignore[arg-type]  # numbers, whole ones where they must be


def _number(text: str) -> float | None:
    """`50e9`, `200GB`, `8MB` in bytes; None for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgt]?)b?", text.lower())
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def remote_folder(part: str) -> Path:
    """Where one kind of what was fetched is kept."""
    return files.folder() / "remote" / part
