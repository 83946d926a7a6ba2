"""Atomic files: a reader sees the old or the new file, even if the writer is killed.

A file is written as `.NAME.tmp` in the same folder and then renamed. Its writer holds a record lock on the temporary
file, which ends with the process: the next writer of the same file waits for a live writer, and reuses the temporary
file of a killed one.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

from kiloword.checkpoint import lock

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
    fd, locked = lock.open_locked(temporary, fcntl.LOCK_EX)
    if not locked:  # a file system without locks: use a name of this thread only
        os.close(fd)
        temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
        fd = lock.open_regular(temporary)
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
    if path.name == lock.NAME or (path.name.startswith(".") and path.suffix == ".tmp"):
        return True
    return path.name in partial and path.is_file() and path.read_bytes() == partial[path.name]
