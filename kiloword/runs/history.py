"""The processes of a run: which command and version began or resumed it, when, and from which step.

They stand in OUT/history.jsonl, a line each. Nothing of it is compared when a run is resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kiloword.__version__ import __version__
from kiloword.terminal import command

FILE = "history.jsonl"
MOST, LONGEST = 1000, 1 << 20  # processes that are read; bytes of the file that are


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a run. Unknown facts are "" or 0."""

    step: int = 0  # steps that were done before
    time: float = 0.0  # when it began, in seconds since 1970
    command: str = ""  # "": Python called the library
    version: str = ""  # of kiloword
    torch: str = ""
    device: str = ""
    ranks: int = 1
    images: int = 0  # of the training data
    val: Mapping[str, Any] = field(default_factory=dict)  # validation sets: name -> [data, number of images]


def began(folder: Path, **facts: Any) -> None:
    """Add the process that begins now. Args: facts: fields of `Process`. A folder that is full loses the line alone."""
    process = Process(time=round(time.time(), 3), command=command(), version=__version__, **facts)
    with suppress(OSError), (folder / FILE).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(asdict(process), ensure_ascii=False) + "\n")


def processes(folder: Path) -> list[Process]:
    """The processes of a run in their order; damaged lines and fields of another type are omitted."""
    path = folder / FILE
    try:
        text = path.read_bytes()[:LONGEST].decode(errors="replace") if path.is_file() else ""
    except OSError:
        return []
    read = (_parse(line) for line in text.splitlines()[:MOST])
    return [process for process in read if process is not None]


def _parse(line: str) -> Process | None:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict):
        return None
    usual = asdict(Process())
    fits = {f.name: raw[f.name] for f in fields(Process) if type(raw.get(f.name)) is type(usual[f.name])}
    return Process(**fits)


def date(seconds: float) -> str:
    """1763862905.2 -> "2025-11-23 01:55 UTC"; "" where it is no date."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds > 0 else ""
    except (ValueError, OverflowError, OSError):
        return ""
