"""Files that are whole: a reader sees the old one or the new one, whatever dies meanwhile.

A file is written as `.NAME.tmp` beside it and renamed. Each file has one temporary name, and its writer holds a record
lock on it, which ends with the process: the next writer of the same file waits for one that lives, and takes over what
a killed one left. Nothing is left behind for longer than until the same file is written again.
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

_of_threads: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()  # record locks exclude processes alone


class SaveError(ValueError):
    """A file could not be written; what was there before still is."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one. Raises SaveError (disk full, no permission)."""
    with atomic(path) as file:
        file.write(data)


def utf8(text: str, errors: str = "surrogateescape") -> str:
    """A word of the system as UTF-8: where the locale is another, Python decodes its bytes to lone surrogates.

    Args: errors: what becomes of bytes that are not UTF-8, as of `bytes.decode`.
    """
    with suppress(UnicodeEncodeError):  # surrogates of another kind: from Python, not from the system
        return text.encode("utf-8", "surrogateescape").decode("utf-8", errors)
    return text


def write_json(path: Path, value: Any) -> None:
    """As `write_atomic`."""
    write_atomic(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """What `write_json` writes."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # lone surrogates of file names, as JSON writes them


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when it is whole. Raises SaveError as `write_atomic`."""
    try:
        with replacing(path) as file:
            yield file
    except OSError as e:
        raise SaveError(f"cannot write {path}: {e.strerror or e}. What was there before is kept.") from e


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """As `atomic`, for callers with a message of their own. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _of_threads.setdefault(path.absolute(), threading.Lock()), _opened(path) as (file, temporary):
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:  # Ctrl-C too; before the file is closed, which gives up its lock
            with suppress(OSError):
                temporary.unlink()
            raise
    sync(path.parent)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """The empty temporary file of a path, locked."""
    temporary = path.with_name(f".{path.name}.tmp")
    while True:
        with open(lock.open_regular(temporary), "wb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: a name that no other thread has
                temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
                with open(lock.open_regular(temporary), "wb") as own:
                    own.truncate(0)
                    yield own, temporary
                return
            if lock.is_at(file.fileno(), temporary):
                file.truncate(0)
                yield file, temporary
                return
        # its writer has renamed it meanwhile


def sync(path: Path) -> None:
    """What was written to a file, or the names in a folder, survive a power cut. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_taken(path: Path, own: Mapping[str, bytes] | None = None) -> bool:
    """Whether a path is anything but a folder to be, an empty one, or one that a killed process had begun.

    Args: own: files that such a process may have written, by name, and all that they hold.
    """
    return path.exists() and (not path.is_dir() or any(not _is_passing(p, own or {}) for p in path.iterdir()))


def _is_passing(path: Path, own: Mapping[str, bytes]) -> bool:
    """Whether a file is a temporary one, a lock or one of `own`."""
    if path.name == lock.NAME or (path.name.startswith(".") and path.suffix == ".tmp"):
        return True
    return path.name in own and path.is_file() and path.read_bytes() == own[path.name]
