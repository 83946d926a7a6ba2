"""Folders of runs for tests of what watches them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(step: int, **more: Any) -> Row:
    values = {"loss": 10.0 / step, "pair": 10.0 / step, "gradient_norm": 1.0, "pairs_per_s": 100.0, "data_wait": 0.01}
    return {"step": step, "epoch": step / 100, **values, "skipped": 0, "truncated": 0, "restarts": 0, **more}


def write(out: Path, rows: list[Row], steps: int = 100, **recipe: Any) -> Path:
    """A run's folder as `train` leaves it."""
    out.mkdir(parents=True, exist_ok=True)
    told = {"method": "siglip", "size": "b32", "steps": steps, "batch": 10, "settings": {}, **recipe}
    (out / "config.json").write_text(json.dumps({"format": "kiloword-run-1", "recipe": told}))
    (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return out
