"""Local copies of files that can be fetched again: made once for all processes; the least recently used are deleted.

A file is made as `NAME.part` and renamed when complete; its maker holds an exclusive `flock` on it, readers a shared
one, so that files in use stay. `total` counts the bytes of the folder. It is the lock for adding to it, and for
renaming: a listing may show a file that is renamed meanwhile under both names, or under none.
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

from kiloword.data.remote.errors import Unreachable

_PART = ".part"
_TOTAL = "total"
_FILLED = 0.95  # of the limit that is used after deletions, so that not every new file has to list the folder
_WAIT = 0.02  # seconds between checks of a cache that is full of files in use
_PATIENCE = 240.0  # seconds


@dataclass(frozen=True)
class FileCache:
    """A folder of at most `limit` bytes (None: unlimited), unfinished files included."""

    folder: Path
    limit: float | None = None

    @contextmanager
    def opened(self, name: str, size: int, fill: Callable[[int], None]) -> Iterator[int]:
        """A descriptor of a file, which stays while it is open; `fill` writes a missing file to a descriptor.

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
        """Make a file that is missing and that no other process is making. Errors: as of `opened`."""
        if not (self.folder / name).exists():
            fd = self._make(name, size, fill, wait=False)
            if fd is not None:
                _release(fd)

    def drop_all(self, prefix: str) -> None:
        """Delete every complete file whose name has this prefix."""
        for path in self.folder.glob(f"{prefix}*"):
            if not path.name.endswith(_PART):
                path.unlink(missing_ok=True)

    def _existing(self, name: str, size: int) -> int | None:
        try:
            fd = os.open(self.folder / name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_size == size:
            with suppress(OSError):  # another user's file keeps its age
                os.utime(fd)
            return fd
        _release(fd)
        (self.folder / name).unlink(missing_ok=True)
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
                is_ours = is_at(fd, part)  # otherwise its maker has finished, or failed
                if not is_ours:
                    _release(fd)  # it may be the complete file by now
                complete = self._existing(name, size)
                if is_ours and complete is None:
                    return self._filled(fd, part, size, fill)
                if is_ours:
                    part.unlink(missing_ok=True)
                    _release(fd)
                if complete is not None:
                    return complete
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
            with self._locked_total():
                os.replace(part, part.with_name(part.name.removesuffix(_PART)))
        except BaseException:
            part.unlink(missing_ok=True)
            _release(fd)
            raise
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def _reserve(self, fd: int, size: int) -> None:
        """Reserve disk space for a file; the least recently used files are deleted for it."""
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
        """None when the space is reserved; otherwise the error to raise if the files in use stay in use.

        Raises: OSError when the disk is full, although the folder holds no other file.
        """
        with self._locked_total() as count:
            total = _read_total(count)
            if self.limit is not None and (total is None or total + size > self.limit):
                total = self._shrink(self.limit * _FILLED - size)
                if total + size > self.limit:
                    _write_total(count, total)
                    return Unreachable(f"{self.folder} is full of files in use: set KILOWORD_REMOTE to a higher limit.")
            # before the file grows: a process killed here leaves the total too high, never too low
            _write_total(count, None if total is None else total + size)
            while not _allocate(fd, size):
                _write_total(count, None)
                before = self._shrink(float("inf"))
                if self._shrink(before - size) == before:
                    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    if before == 0:
                        raise full
                    return full
            return None

    @contextmanager
    def _locked_total(self) -> Iterator[int]:
        fd = os.open(self.folder / _TOTAL, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            _release(fd)

    def _shrink(self, target: float) -> int:
        """Delete unused files until at most `target` bytes are left: first those of dead processes, then the oldest.

        Returns: bytes that are left.
        """
        names = set(os.listdir(self.folder)) - {_TOTAL}
        files = sorted(file for name in names if (file := self._look(name)))
        total = sum(size for *_, size, _ in files)
        for _, _, size, path in files:
            if total > target and _delete(path):
                total -= size
        return total

    def _look(self, name: str) -> tuple[bool, int, int, Path] | None:
        """Whether a file is complete, its time, size and path; None when it is gone."""
        path = self.folder / name
        try:
            stat = path.stat()
        except FileNotFoundError:  # its maker failed
            return None
        return not name.endswith(_PART), stat.st_mtime_ns, stat.st_size, path


def _read_total(fd: int) -> int | None:
    """The bytes of the folder, which may be too high, or too low by files that users add; None when unknown."""
    raw = os.pread(fd, 32, 0)
    return int(raw) if raw.isdigit() else None


def _write_total(fd: int, total: int | None) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"" if total is None else str(total).encode(), 0)


def _allocate(fd: int, size: int) -> bool:
    """Whether the disk has the space; allocates blocks, so that it does not fill up in the middle of a file."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            os.ftruncate(fd, size)
            return True
        if error.errno == errno.ENOSPC:
            os.ftruncate(fd, 0)  # free the blocks allocated before the disk was full: others may need them
            return False
        raise
    return True


def _delete(path: Path) -> bool:
    """Delete a file unless it is in use. Returns: whether this call deleted it."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(fd, path):
            return False
        path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        _release(fd)


def is_at(fd: int, path: Path) -> bool:
    """Whether a path still names an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _release(fd: int) -> None:
    """Unlock explicitly: a process forked meanwhile shares the lock, and closing alone would keep it."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
