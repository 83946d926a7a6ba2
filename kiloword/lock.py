"""One process trains in a folder at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

NAME = ".lock"


class Lock:
    """The lock of a run's folder, held until this object goes or the process ends, however it ends.

    A record lock: loader workers do not inherit it, so that one who outlives a killed run keeps nobody out. Where the
    file system knows no locks, there is none.
    Raises: ValueError when another process holds it.
    """

    def __init__(self, out: Path) -> None:
        self._fd = -1
        try:
            self._fd = os.open(out / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as e:
            raise ValueError(f"--out {out} cannot be written ({e.strerror}): choose another folder.") from e
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                raise self._held(out) from None
        with suppress(OSError):  # a full disk is told when there is something to save
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _held(self, out: Path) -> ValueError:
        who = os.pread(self._fd, 1000, 0).decode(errors="replace") or "another process"
        return ValueError(
            f"{who} is training in {out}: wait for its end, or choose another --out. SIGTERM ends it with its state "
            "saved."
        )

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
