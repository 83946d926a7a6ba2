"""What a server says about a file."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST = 10 * 10**12  # bytes of a file: twice the largest object of S3


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


def decimal(text: str) -> int | None:
    """A whole number of at most 18 ASCII digits, as headers have it; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def size_problem(claim: str) -> str | None:
    """What is wrong with the length of a file as a server gives it; None for one that can be."""
    size = decimal(claim)
    if not claim:
        return "the server does not say how long it is. Expected a Content-Length."
    if size is None:
        return f"the server gives {claim[:40]!r} as its length. Expected a whole number of bytes."
    if size > LARGEST:
        return f"the server says that it has {size:,} bytes. Expected at most {LARGEST:,}: split it into several tars."
    return None
