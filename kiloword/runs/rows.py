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


def objects(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The objects of a file from an offset in bytes on, and the offset behind them.

    A last line without its end is not read yet; lines that are no objects are omitted.
    """
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    text, found = text[: text.rfind(b"\n") + 1], []
    for line in text.splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)], start + len(text)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def number(row: Row, name: str) -> float | None:
    """A finite number of a row, or None."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def began(folder: Path, **facts: Any) -> None:
    """Add the process that begins now to the run's history. A folder that is full loses the line alone.

    Args: facts: step (done before), torch, device, ranks, images, and val (name -> [data, number of images]).
    """
    process = {"time": round(time.time(), 3), "command": command(), "version": __version__, **facts}
    with suppress(OSError), (folder / HISTORY).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(process, ensure_ascii=False) + "\n")
