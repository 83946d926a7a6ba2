"""What a server says about a file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Checksum:
    """`algorithm` as hashlib names it; `value` hexadecimal."""

    algorithm: str
    value: str


@dataclass(frozen=True)
class Stat:
    """`tag` changes when the file does ("" : unknown); `ranged`: any part can be asked for."""

    size: int  # bytes
    tag: str
    ranged: bool
    checksum: Checksum | None = None
