"""Atomic files and locks. A reader sees the old or the new file, even if the writer is killed.

A file is written as `.NAME.tmp` in the same folder and then renamed. Its writer holds a record lock on the temporary
file, which ends with the process: the next writer of the same file waits for a live writer, and reuses the temporary
file of a killed one. A lock lets only one process work in a folder at a time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

LOCK = ".lock"
TRAINING = "training in"
_of_threads: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()  # record locks exclude other processes


class SaveError(ValueError):
    """A file could not be written; the previous file is kept."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one. Raises SaveError (disk full, no permission)."""
    with atomic(path) as file:
        file.write(data)


def utf8(text: str, errors: str = "surrogateescape") -> str:
    """A string from the system as UTF-8; in other locales Python decodes its bytes to lone surrogates.

    Args: errors: handling of bytes that are not UTF-8, as in `bytes.decode`.
    """
    with suppress(UnicodeEncodeError):  # surrogates made in Python, not by decoding
        return text.encode("utf-8", "surrogateescape").decode("utf-8", errors)
    return text


def write_json(path: Path, value: Any) -> None:
    """As `write_atomic`."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """The bytes that `write_json` writes."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # lone surrogates of file names, as JSON writes them


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, renamed to `path` at the end. Raises SaveError as `write_atomic`."""
    try:
        with replacing(path) as file:
            yield file
    except OSError as e:
        raise SaveError(f"cannot write {path}: {e.strerror or e}. What was there before is kept.") from e


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """As `atomic`, for callers with their own message. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _of_threads.setdefault(path.absolute(), threading.Lock()), _opened(path) as (file, temporary):
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:  # also for Ctrl-C; before closing the file releases its lock
            with suppress(OSError):
                temporary.unlink()
            raise
    sync(path.parent)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """The empty temporary file of a path, locked."""
    temporary = path.with_name(f".{path.name}.tmp")
    fd, locked = open_locked(temporary, fcntl.LOCK_EX)
    if not locked:  # a file system without locks: use a name of this thread only
        os.close(fd)
        temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
        fd = open_regular(temporary)
    with open(fd, "wb") as file:
        file.truncate(0)
        yield file, temporary


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_taken(path: Path, partial: Mapping[str, bytes] | None = None) -> bool:
    """Whether a path exists and is not an empty folder or one that a killed process had begun.

    Args: partial: files that such a process may have written: name -> contents.
    """
    return path.exists() and (not path.is_dir() or any(not _is_passing(p, partial or {}) for p in path.iterdir()))


def _is_passing(path: Path, partial: Mapping[str, bytes]) -> bool:
    """Whether a file is a temporary one, a lock or one of `partial`."""
    if path.name == LOCK or (path.name.startswith(".") and path.suffix == ".tmp"):
        return True
    return path.name in partial and path.is_file() and path.read_bytes() == partial[path.name]


class Lock:
    """The lock of a folder, held until `release`, until this object is deleted or until the process ends.

    It is a record lock, which loader workers do not inherit: a worker that outlives a killed run does not hold it. On
    file systems without locks nothing is locked.

    Args: out: the folder of --out; doing: activity of the holder, for messages; folder: folder of the lock file if not
    `out`.
    Raises: ValueError when another process holds it.
    """

    def __init__(self, out: Path, doing: str = TRAINING, folder: Path | None = None) -> None:
        self._fd, self.path = -1, (folder or out) / LOCK
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
