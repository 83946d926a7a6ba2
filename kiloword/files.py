"""Atomic files, folders in which one process works at a time, and the cache folder."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from uuid import uuid4

LOCK = ".lock"
TEMPORARY = ".kw.tmp"  # ends the name of what is being written


class SaveError(ValueError):
    """A file could not be written; the previous file is kept."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, renamed to `path` at the end: a reader sees the old or the new file, even after a crash.

    Raises: OSError, for callers with their own message; see `atomic`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}{TEMPORARY}")  # others may write the same file
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """As `replacing`. Raises: SaveError (disk full, no permission)."""
    try:
        with replacing(path) as file:
            yield file
    except OSError as e:
        raise SaveError(f"cannot write {path}: {e.strerror or e}. What was there before is kept.") from e


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file as `atomic`."""
    with atomic(path) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as `atomic`; lone surrogates of file names are written as JSON escapes them."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace"))


def cache_folder() -> Path:
    """KILOWORD_CACHE, or ~/.cache/kiloword."""
    return Path(os.environ.get("KILOWORD_CACHE") or Path.home() / ".cache" / "kiloword").absolute()


def utf8(text: str) -> str:
    """A string from the system as UTF-8; in other locales Python decodes its bytes to lone surrogates."""
    with suppress(UnicodeEncodeError):  # surrogates made in Python, not by decoding
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return text


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    path.unlink() if path.is_file() else shutil.rmtree(path)


class Lock:
    """The lock of a folder, held until `release`, until this object is deleted or until the process ends.

    Temporary files that a killed process left in the folder are removed. Args: out: the folder of --out; doing:
    activity of the holder, for messages; folder: of the lock file if not `out`.
    Raises: ValueError when another process holds it, or the folder cannot be written.
    """

    def __init__(self, out: Path, doing: str = "training in", folder: Path | None = None) -> None:
        from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

        folder = folder or out
        self.path = folder / LOCK
        self._lock = cast(BaseFileLock, FileLock(self.path, timeout=0, thread_local=False, is_singleton=True))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            if not isinstance(self._lock, SoftFileLock):  # of a file system without locks: its file says who holds it
                self.path.write_text(f"process {os.getpid()} on {socket.gethostname()}", "utf-8")
            for left in folder.rglob(f".*{TEMPORARY}"):
                _remove(left)
        except Timeout:
            holder = self.path.read_text("utf-8")[:200] or "another process"
            raise ValueError(f"{holder} is {doing} {out}: wait for its end, or choose another folder.") from None
        except OSError as e:
            raise ValueError(f"{out} cannot be written ({e.strerror}): choose another folder.") from e

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock and remove its file."""
        if self._lock.lock_counter == 1:
            self.path.unlink(missing_ok=True)
        self._lock.release()


def held(folder: Path) -> bool:
    """Whether a process of this machine holds the `Lock` of a folder, by what the lock's file says."""
    try:
        process, _, machine = (folder / LOCK).read_text("utf-8").removeprefix("process ").partition(" on ")
        os.kill(int(process), 0)
    except PermissionError:  # of another user
        pass
    except (OSError, ValueError):  # no lock, or its process has ended
        return False
    return machine == socket.gethostname()


def is_taken(path: Path) -> bool:
    """Whether a path exists and is not an empty folder; a lock, and what a killed process left, do not count."""
    return path.exists() and not (
        path.is_dir() and all(p.name == LOCK or p.name.endswith(TEMPORARY) for p in path.iterdir())
    )


@contextmanager
def new_folder(out: Path, doing: str = "writing") -> Iterator[Path]:
    """A folder to fill beside `out`, which is there as a whole at the end, and after an error as it was before.

    Raises: ValueError when `out` is neither new nor an empty folder, or when another process fills it.
    """
    if is_taken(out):
        raise ValueError(f"{out} exists and is not an empty folder: choose another --out, or remove it.")
    out = out.resolve()  # a link stays one
    work = out.with_name(f".{out.name}{TEMPORARY}")
    with Lock(out, doing, folder=work):
        try:
            for left in work.iterdir():  # of a killed process
                if left.name != LOCK:
                    _remove(left)
            yield work
            (work / LOCK).unlink(missing_ok=True)
            if out.exists():  # empty, but perhaps the folder of the shell: nothing takes its place
                for path in sorted(work.iterdir(), key=lambda path: path.stat().st_size):  # weights last
                    path.replace(out / path.name)
            else:
                work.rename(out)
            sync(out.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
