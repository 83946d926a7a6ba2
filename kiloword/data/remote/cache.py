"""Files on the local disk that can be fetched again: made once for all processes, the least recently used given up.

A file is made as `NAME.part` and renamed when it is whole; `flock` on it says that its maker lives. Readers hold a
shared lock, so that what is in use stays. `total` counts the bytes of the folder and is the lock of all that add to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kiloword.checkpoint.lock import is_at
from kiloword.data.remote.errors import Unreachable

_PART = ".part"
_TOTAL = "total"
_KEEP = 0.95  # of the limit: what is left after files were given up, so that not every new one has to look at all
_WAIT = 0.02  # seconds between looks at a cache that is full of what others use
_PATIENCE = 240.0  # seconds


@dataclass(frozen=True)
class FileCache:
    """A folder of at most `limit` bytes (None: any number), files in the making included."""

    folder: Path
    limit: float | None = None

    @contextmanager
    def opened(self, name: str, size: int, fill: Callable[[int], None]) -> Iterator[int]:
        """A descriptor of a file, which stays while it is open; `fill` writes one that is not there.

        Errors: those of `fill`, after which there is no file; Unreachable when the folder cannot hold it.
        """
        fd = self._existing(name, size)
        if fd is None:
            fd = self._make(name, size, fill, wait=True)
        assert fd is not None
        try:
            yield fd
        finally:
            _release(fd)

    def fetch(self, name: str, size: int, fill: Callable[[int], None]) -> None:
        """Makes a file that is not there and that nobody else makes. Errors: as of `opened`."""
        if not (self.folder / name).exists():
            fd = self._make(name, size, fill, wait=False)
            if fd is not None:
                _release(fd)

    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def drop_all(self, beginning: str) -> None:
        """Drops every file whose name begins so."""
        for path in self.folder.glob(f"{beginning}*"):
            if not path.name.endswith(_PART):
                path.unlink(missing_ok=True)

    def _existing(self, name: str, size: int) -> int | None:
        try:
            fd = os.open(self.folder / name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_size == size:
            with suppress(OSError):  # another user's file: its age stays
                os.utime(fd)
            return fd
        _release(fd)
        self.drop(name)
        return None

    def _make(self, name: str, size: int, fill: Callable[[int], None], wait: bool) -> int | None:
        """A descriptor with a shared lock; None when another process makes the file and `wait` is False."""
        part = self.folder / (name + _PART)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                fd = os.open(part, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    os.close(fd)
                    return None
                mine = is_at(fd, part)  # else its maker has finished, or given up
                if not mine:
                    _release(fd)  # it may be the finished file by now
                whole = self._existing(name, size)
                if whole is None and not mine:
                    continue
                if whole is not None:
                    if mine:
                        part.unlink(missing_ok=True)
                        _release(fd)
                    return whole
                return self._filled(fd, part, size, fill)
        except OSError as error:
            raise Unreachable(
                f"{self.folder} cannot keep what is fetched ({error.strerror or error}). Set KILOWORD_CACHE to a "
                "folder with space on a local disk."
            ) from error

    def _filled(self, fd: int, part: Path, size: int, fill: Callable[[int], None]) -> int:
        try:
            self._reserve(fd, size)
            fill(fd)
            os.fsync(fd)
            os.replace(part, part.with_name(part.name.removesuffix(_PART)))
        except BaseException:
            part.unlink(missing_ok=True)
            _release(fd)
            raise
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def _reserve(self, fd: int, size: int) -> None:
        """Disk space for a file; others are given up for it, the least recently used first."""
        if self.limit is not None and size > self.limit:
            raise Unreachable(
                f"a file of {size:,} bytes does not fit into {self.folder}, which may hold {self.limit:,.0f}: set "
                "KILOWORD_REMOTE to another limit, such as limit=200GB."
            )
        deadline = time.monotonic() + _PATIENCE
        while (obstacle := self._obstacle(fd, size)) is not None:
            if time.monotonic() > deadline:
                raise obstacle
            time.sleep(_WAIT)

    def _obstacle(self, fd: int, size: int) -> Exception | None:
        """None when the space is reserved; otherwise what to raise if the files in use stay in use.

        Raises: OSError when the disk is full, although the folder holds no other file.
        """
        with self._counted() as count:
            total = count.read()
            if self.limit is not None and (total is None or total + size > self.limit):
                total = self._give_up(self.limit * _KEEP - size)
                if total + size > self.limit:
                    count.write(total)
                    return Unreachable(f"{self.folder} is full of files in use: set KILOWORD_REMOTE to a higher limit.")
            count.write(None if total is None else total + size)  # first: a kill here leaves it too high, never too low
            while not _allocate(fd, size):
                count.write(None)
                before = self._give_up(float("inf"))
                if self._give_up(before - size) == before:
                    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    if before == 0:
                        raise full
                    return full
            return None

    @contextmanager
    def _counted(self) -> Iterator[_Count]:
        fd = os.open(self.folder / _TOTAL, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield _Count(fd)
        finally:
            _release(fd)

    def _give_up(self, target: float) -> int:
        """Deletes files out of use until at most `target` bytes are there: what dead processes left, then the oldest.

        Returns: bytes that are there.
        """
        names = set(os.listdir(self.folder)) - {_TOTAL}
        found = [file for name in names if (file := self._look(name))]
        total = sum(size for *_, size, _ in found)
        for _, _, size, path in sorted(found):
            if total > target and _delete(path):
                total -= size
        return total

    def _look(self, name: str) -> tuple[bool, int, int, Path] | None:
        """Whether a file is whole, its age, size and path; None when it is gone."""
        path = self.folder / name
        try:
            stat = path.stat()
        except FileNotFoundError:  # finished since, as nobody asks before renaming, or given up
            return self._look(name.removesuffix(_PART)) if name.endswith(_PART) else None
        return not name.endswith(_PART), stat.st_mtime_ns, stat.st_size, path


@dataclass(frozen=True)
class _Count:
    """The bytes of the folder, as a number in an open file. Only ever too high, but for files that users add."""

    fd: int

    def read(self) -> int | None:
        """None when nobody has counted."""
        raw = os.pread(self.fd, 32, 0)
        return int(raw) if raw.isdigit() else None

    def write(self, total: int | None) -> None:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, b"" if total is None else str(total).encode(), 0)


def _allocate(fd: int, size: int) -> bool:
    """Whether the disk has the space; real blocks, so that it does not fill up in the middle of a file."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            os.ftruncate(fd, size)
            return True
        if error.errno == errno.ENOSPC:
            os.ftruncate(fd, 0)  # blocks that it got before the disk was full: others may need them
            return False
        raise
    return True


def _delete(path: Path) -> bool:
    """Whether a file was out of use, and is gone."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(fd, path):
            return False
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        _release(fd)
    return True


def _release(fd: int) -> None:
    """Unlocked by word: a process forked meanwhile holds the same lock, and closing alone would leave it."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
