"""What a run writes line by line: its rows in `metrics.jsonl`, and its processes in `history.jsonl`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kiloword.__version__ import __version__
from kiloword.terminal import command

ROWS, HISTORY = "metrics.jsonl", "history.jsonl"
Row = Mapping[str, Any]


def objects(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, a line each; lines that are none, as one that is not whole yet, are omitted."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a `metrics.jsonl`."""
    return [row for row in objects(path) if type(row.get("step")) is int]


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def numbers(row: Row) -> dict[str, float]:
    """The finite numbers of a row."""
    return {n: float(value) for n, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}


def began(folder: Path, **facts: Any) -> None:
    """Add the process that begins now to the run's history. A folder that is full loses the line alone.

    Args: facts: step (done before), torch, device, ranks, images, and val (name -> [data, number of images]).
    """
    process = {"time": round(time.time(), 3), "command": command(), "version": __version__, **facts}
    with suppress(OSError), (folder / HISTORY).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(process, ensure_ascii=False) + "\n")
