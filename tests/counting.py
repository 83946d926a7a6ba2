"""What is counted: work in place of its time, the same on any machine, however loaded; and files that are open."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


def opened_in(folder: Path) -> list[str]:
    """The files in a folder that this process has open. (Those of all folders change as garbage is collected.)"""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return [
        target for link in links if link.is_symlink() and f"{(target := os.readlink(link))}/".startswith(f"{folder}/")
    ]


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
