"""Commands that end with all that they have started, also in groups and sessions of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

GRACE_S = 20.0  # for each signal; training saves its state at SIGTERM
LATE = 124  # status at the limit, as of `timeout`


def run(command: Sequence[str], limit: float, environment: Mapping[str, str], folder: Path) -> tuple[int, str, str]:
    """Run a command for at most `limit` seconds; then, or at an interrupt, `end` it.

    Returns: exit status, LATE at the limit; what it printed until then, and on stderr. Raises: OSError when it cannot
    be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = LATE
        finally:
            end(process)
        printed, errors = (_text(file) for file in (out, error))
    return status, printed, errors


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process begun with `start_new_session`, and what it started: SIGTERM, then SIGKILL GRACE_S later.

    SIGTERM goes to the group, whose members pass it on (torchrun to its ranks, kill.py to its forks); SIGKILL to every
    session that descends from the process. Returns at once where nothing is alive, else within 2 * GRACE_S seconds.
    """
    sessions = _sessions(process)
    try:
        if _members(sessions):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        _wait(process, sessions)
    finally:  # also when one is interrupted while waiting
        for pid in _members(sessions):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _wait(process, sessions)


def _sessions(process: subprocess.Popen[bytes]) -> set[int]:
    """The session of the process and, while it runs, those of all that descends from it."""
    there, family = _processes(), set[int]()
    new = set() if process.returncode is not None else {process.pid}
    while new:
        family |= new
        new = {pid for pid, (parent, _) in there.items() if parent in family} - family
    return {process.pid} | {there[pid][1] for pid in family if pid in there}


def _members(sessions: set[int]) -> list[int]:
    return [pid for pid, (_, session) in _processes().items() if session in sessions]


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and session of every process of this machine that is not dead, by its id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if state not in "ZX":
                found[int(path.parent.name)] = (int(parent), int(session))
    return found


def _wait(process: subprocess.Popen[bytes], sessions: set[int]) -> None:
    """Until all have ended, at most GRACE_S seconds."""
    until = time.monotonic() + GRACE_S
    while (process.poll() is None or _members(sessions)) and time.monotonic() < until:
        time.sleep(0.05)
