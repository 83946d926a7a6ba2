"""The program as processes of their own."""

from __future__ import annotations

import subprocess
import sys


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    """A command as it ended, by so many ranks; one is started without torchrun."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launch, "kiloword", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)
