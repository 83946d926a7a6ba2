"""Settings of fetching and caching remote data: they change no result, and are the same for every verb."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

from kiloword.addresses import scrubbed
from kiloword.config.settings import BaseSettings, check, setting
from kiloword.data import files

VARIABLE = "KILOWORD_REMOTE"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_HOST = re.compile(r"[\w.*:\[\]-]+")


@dataclass(frozen=True, kw_only=True)
class RemoteConfig(BaseSettings):
    """From the environment variable KILOWORD_REMOTE: `limit=200GB retries=8 timeout=60 hosts=data.org,*.data.org`."""

    limit: float = setting(50e9, "bytes of shards on the local disk, of all runs and data sets together", 1, 1e18)
    retries: int = setting(5, "after the first attempt, as long as nothing arrives", 0, 1000)
    timeout: float = setting(30.0, "seconds without a byte, or below 1 kB/s, that count as a failure", 1e-3, 86_400)
    backoff: float = setting(1.0, "seconds before the first retry, doubled for each further one", 0, 3600)
    block: float = setting(8 * 2**20, "bytes of a shard that are fetched, cached and deleted together", 1, 1e12)
    ahead: int = setting(32_768, "rows of the order that are fetched ahead; 0: none", 0, 10**9)
    threads: int = setting(4, "simultaneous connections of a process, for indexing and for fetching ahead", 1, 256)
    hosts: tuple[str, ...] = ()  # hosts (`*` for any characters) that data and redirects may name; (): all

    def __post_init__(self) -> None:
        check(self, f"{VARIABLE}: ")
        if self.limit < self.block:
            raise ValueError(f"{VARIABLE}: limit is {self.limit:.12g}: expected at least a block, {self.block:.12g}.")

    def allows(self, host: str) -> bool:
        """Whether data may come from a host (of s3 and the like: a bucket)."""
        name = host.lower().rstrip(".")
        return not self.hosts or any(fnmatchcase(name, pattern) for pattern in self.hosts)


def remote_config() -> RemoteConfig:
    """The settings of the environment. Raises: ValueError for an unknown setting or a bad value."""
    kinds = {f.name: f.type for f in fields(RemoteConfig)}
    numbers: dict[str, float] = {}
    hosts: list[str] = []
    name = ""
    for word in filter(None, re.split(r"[\s,]+", os.environ.get(VARIABLE, ""))):
        value = word
        if name != "hosts" or "=" in word:  # otherwise one more host
            name, _, value = word.partition("=")
        number = _number(value)
        if name == "hosts" and _HOST.fullmatch(value):
            hosts.append(value.lower())
        elif name in kinds and name != "hosts" and number is not None:
            numbers[name] = int(number) if kinds[name] == "int" and number < 1e18 else number
        else:
            expected = f"Expected {', '.join(kinds)}, such as limit=200GB hosts=data.org,*.data.org."
            raise ValueError(f"{VARIABLE}: {scrubbed(word)[:100]!r} is no setting. {expected}")
    return RemoteConfig(**numbers, hosts=tuple(hosts))  # type: ignore[arg-type]  # int where they must be


def _number(text: str) -> float | None:
    """`50e9`, `200GB`, `8MB` in bytes; None for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgt]?)b?", text.lower())
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def remote_folder(part: str) -> Path:
    """The cache folder of one kind of remote data: "blocks", "index" or "tables"."""
    return files.folder() / "remote" / part
