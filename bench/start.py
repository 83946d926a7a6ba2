"""How long the command line takes to answer: processor time of a process, the best of some.

python bench/start.py [--times 5]
"""

from __future__ import annotations

import argparse
import os
import sys

COMMANDS = {
    "import kiloword": "import kiloword",
    "kiloword --help": "from kiloword.cli.main import main; main(['--help'])",
    "kiloword train --help": "from kiloword.cli.main import main; main(['train', '--help'])",
    "kiloword plan --help": "from kiloword.cli.main import main; main(['plan', '--help'])",
}


def seconds(code: str) -> float:
    """Of one process, the start of Python included."""
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", code],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    used = os.wait4(child, 0)[2]
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    for name, code in COMMANDS.items():
        print(f"{name:24}{min(seconds(code) for _ in range(times)):.2f} s")


if __name__ == "__main__":
    main()
