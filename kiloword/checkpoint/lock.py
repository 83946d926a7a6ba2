"""Locks: only one process works in a folder at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

NAME = ".lock"
TRAINING = "training in"


class Lock:
    """The lock of a folder, held until `release`, until this object is deleted or until the process ends.

    It is a record lock, which loader workers do not inherit: a worker that outlives a killed run does not hold it. On
    file systems without locks nothing is locked.

    Args: out: the folder of --out; doing: activity of the holder, for messages; folder: folder of the lock file if not
    `out`.
    Raises: ValueError when another process holds it.
    """

    def __init__(self, out: Path, doing: str = TRAINING, folder: Path | None = None) -> None:
        self._fd, self.path = -1, (folder or out) / NAME
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd, _ = open_locked(self.path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except Held as e:
            hint = " SIGTERM ends it with its state saved." if doing == TRAINING else ""
            raise ValueError(f"{e} is {doing} {out}: wait for its end, or choose another --out.{hint}") from None
        except OSError as e:
            raise ValueError(f"--out {out} cannot be written ({e.strerror}): choose another folder.") from e
        with suppress(OSError):  # a full disk is reported at the first save
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock and remove its file."""
        with suppress(OSError):
            self.path.unlink()
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    __del__ = _close


class Held(Exception):
    """Another process holds the lock; the message is what the file says about it."""


def open_locked(path: Path, how: int) -> tuple[int, bool]:
    """Open a file, or create it, and take its record lock; again if its last holder has removed it in the meantime.

    Args: how: as in `fcntl.lockf`. Returns: file descriptor; False on a file system without locks.
    Raises: OSError as `open_regular`; Held when another process holds the lock and `how` does not wait.
    """
    while True:
        fd, locked = open_regular(path), True
        try:
            fcntl.lockf(fd, how)
        except OSError as e:
            locked = False
            if e.errno in (errno.EACCES, errno.EAGAIN) and how & fcntl.LOCK_NB:
                holder = os.pread(fd, 1000, 0).decode(errors="replace")
                os.close(fd)
                raise Held(holder or "another process") from None
        if is_at(fd, path):
            return fd, locked
        os.close(fd)


def open_regular(path: Path) -> int:
    """Open a file to read and write, or create it; links are not followed.

    Raises: OSError, also for a link, a pipe or a device.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(e.errno, f"{path} is a link or a pipe: remove it", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EEXIST, f"{path} is not a regular file: remove it", str(path))
    return fd


def is_at(fd: int, path: Path) -> bool:
    """Whether a path still names an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False
