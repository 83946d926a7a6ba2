"""The C library's allocator. No torch at import."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, so that the next step finds its memory mapped. Returns: whether it does.

    glibc maps each large tensor anew and gives it back when it is freed; the system then clears every page of it once
    more (research/bench.md has what that costs). Other C libraries keep their ways, as does a process whose environment
    sets glibc's by `MALLOC_...` or `GLIBC_TUNABLES`.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError, ValueError):  # no glibc
        return False
    return bool(option(M_MMAP_MAX, 0) and option(M_TRIM_THRESHOLD, -1))
