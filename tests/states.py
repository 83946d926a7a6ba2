"""The newest state of a run as plain tensors and numbers; runs that are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from kiloword.checkpoint.states import newest
from kiloword.training.optimizer import Optimizer


def load_state(folder: Path, warn: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """None where there is no state; `warn` gets a sentence for each damaged one."""
    stored = newest(folder, warn)
    if stored is None:
        return None
    names = list(stored.specs)
    return dict(zip(names, stored.whole(names), strict=True)), stored.numbers


def failing_at(step: int) -> Callable[..., dict[str, Tensor]]:
    """`Optimizer.step` that fails at a step."""
    original = Optimizer.step

    def failing(self: Optimizer, n: int, loss: Tensor | None = None) -> dict[str, Tensor]:
        if n == step:
            raise RuntimeError("stop here")
        return original(self, n, loss)

    return failing
