"""The newest state of a run as plain tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from kiloword.checkpoint.states import newest


def load_state(folder: Path, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """None where there is no state; `warn` gets a sentence for each damaged one."""
    stored = newest(folder, warn)
    if stored is None:
        return None
    names = list(stored.specs)
    return dict(zip(names, stored.whole(names), strict=True)), stored.numbers
