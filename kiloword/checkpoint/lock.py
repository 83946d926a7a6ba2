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
        self._fd = -1
        self.path = (folder or out) / NAME
        try:
            while not self._open(out, doing):
                pass
        except OSError as e:
            raise ValueError(f"--out {out} cannot be written ({e.strerror}): choose another folder.") from e
        with suppress(OSError):  # a full disk is reported at the first save
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _open(self, out: Path, doing: str) -> bool:
        """Try to take the lock; False if its last holder has just removed the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = open_regular(self.path)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                raise self._held(out, doing) from None
        if is_at(self._fd, self.path):
            return True
        os.close(self._fd)
        self._fd = -1
        return False

    def _held(self, out: Path, doing: str) -> ValueError:
        who = os.pread(self._fd, 1000, 0).decode(errors="replace") or "another process"
        hint = " SIGTERM ends it with its state saved." if doing == TRAINING else ""
        return ValueError(f"{who} is {doing} {out}: wait for its end, or choose another --out.{hint}")

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

    def __del__(self) -> None:
        self._close()


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
