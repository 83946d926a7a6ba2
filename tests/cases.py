"""Marks of tests and of their cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# After a failed read, PyTorch opens ten temporary files, to see whether they run out. The signal that the worker died
# raises an exception anywhere in this process: if in there, the file just opened is not closed by its name; if where
# a tensor of the worker is received, its socket is not.
worker_dies = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <(_io.FileIO|socket.socket):pytest.PytestUnraisableExceptionWarning"
)


def mostly_slow(cases: Iterable[Any], *main: int) -> list[Any]:
    """The cases at these positions for the main tests, all others for the slow ones."""
    listed = list(cases)
    kept = {range(len(listed))[n] for n in main}
    return [
        case if n in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for n, case in enumerate(listed)
    ]
