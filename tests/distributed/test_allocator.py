"""What a process frees is not cleared by the system again: page faults of 20 results of 64 MiB."""

from __future__ import annotations

import os
import platform
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
def test_freed_memory_is_kept_but_where_the_environment_says_how() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    kept, few, said, many = " ".join(
        subprocess.check_output([sys.executable, "-c", PROGRAM], env=own | more, text=True)
        for more in ({}, {"MALLOC_ARENA_MAX": "8"})
    ).split()
    assert (kept, said) == ("True", "False")
    assert int(many) > 2 * int(few)
