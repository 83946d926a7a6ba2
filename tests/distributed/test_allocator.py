"""What a process frees is not cleared by the system again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from kiloword.distributed.allocator import keep_freed_memory

kept = keep_freed_memory()
a = torch.zeros(1 << 24)
for _ in range(3):
    a + 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    a + 1  # 64 MiB
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**settings: str) -> tuple[bool, int]:
    """Whether a process keeps what it frees, and how many pages the system gave it for 20 results of 64 MiB."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    program = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(program, env={**own, **settings}, capture_output=True, text=True, check=True)
    kept, pages = ended.stdout.split()
    return kept == "True", int(pages)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is of Linux")
def test_freed_memory_is_kept_but_where_the_environment_says_how() -> None:
    kept, few = faults()
    if not kept:
        pytest.skip("this C library is not glibc")
    kept, many = faults(MALLOC_ARENA_MAX="8")
    assert not kept
    assert many > 2 * few  # mostly 10 times; pages of 4 kB, or huge ones
