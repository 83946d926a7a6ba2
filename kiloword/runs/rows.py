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
from kiloword.terminal.progress import per_second

ROWS, HISTORY = "metrics.jsonl", "history.jsonl"
Row = Mapping[str, Any]
SHOWN = {  # metrics as one line shows them
    "epoch": "epoch {:.2f}",
    "loss": "loss {:.4g}",
    "pairs_per_s": "{} pairs/s",
    "data_wait": "data wait {:.0%}",
    "slowest_data_wait": "{:.0%} of the slowest rank",
    "loader_pairs_per_s": "loader makes {}/s",
    "lr": "lr {:.2e}",
    "skipped": "{:,.0f} bad samples",
    "truncated": "{:,.0f} captions cut",
    "skipped_steps": "{:,.0f} steps skipped",
    "memory": "memory {:,.0f} MB",
}


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
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def numbers(row: Row) -> dict[str, float]:
    """The finite numbers of a row."""
    return {n: float(value) for n, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}


def in_words(row: Row) -> list[str]:
    """The metrics of a row for a line of progress, without those that are 0."""
    values = {name: value for name in SHOWN if (value := row.get(name))}
    values |= {name: per_second(value) for name, value in values.items() if name.endswith("pairs_per_s")}
    return [SHOWN[name].format(value) for name, value in values.items()]


def began(folder: Path, **facts: Any) -> None:
    """Add the process that begins now to the run's history. A folder that is full loses the line alone.

    Args: facts: step (done before), torch, device, ranks, images, and val (name -> [data, number of images]).
    """
    process = {"time": round(time.time(), 3), "command": command(), "version": __version__, **facts}
    with suppress(OSError), (folder / HISTORY).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(process, ensure_ascii=False) + "\n")
