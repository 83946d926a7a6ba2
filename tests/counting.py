"""Work that is counted, not timed: the same on any machine, however loaded."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(work: Callable[[], object]) -> int:
    """The number of functions, of Python and of C, that are called in this thread. Errors: those of `work`.

    Garbage is not collected meanwhile: the finalizers of what other tests left behind are no part of the work.
    """
    count = 0

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
