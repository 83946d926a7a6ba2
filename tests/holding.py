"""Other processes that are in the middle of something."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from kiloword.files import Lock
lock = Lock(Path(sys.argv[1]), "writing", Path(sys.argv[2]))
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(code: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A process of Python, once it has printed a line."""
    command = [sys.executable, "-c", code, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        yield other
        other.kill()


def held_by_another(out: Path, folder: Path | None = None) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process that writes `out`, by its lock in `folder` (`out` itself if not given)."""
    return process(HOLD, out, folder or out)
