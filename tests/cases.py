"""Which cases of a dear test run in every check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *main: int) -> list[Any]:
    """The cases at these positions for the main tests, all others for the slow ones."""
    listed = list(cases)
    kept = {range(len(listed))[n] for n in main}
    return [
        case if n in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for n, case in enumerate(listed)
    ]
