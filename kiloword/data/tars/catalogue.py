"""The headers of the indexes of many tars in one file, so that opening a set looks at its tars but opens none.

The file lies in the cache folder. What it says of a tar holds as long as the tar, and each file that may be its index,
has the size and the time of change that it had. Format: a digest of the JSON that follows, a line end, `_Catalogue`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from kiloword.checkpoint.files import replacing
from kiloword.data import cache
from kiloword.data.remote.file import RemoteFile
from kiloword.data.remote.index import open_remote_index
from kiloword.data.tars.index import open_header
from kiloword.data.tars.index_file import SUFFIX, Header

LEAST = 100  # tars of which a catalogue is kept
_NAME = 24  # characters of a digest
_Stamp = tuple[int, int] | None  # size and mtime_ns; None: there is no such file


class _Entry(NamedTuple):
    stamps: tuple[_Stamp, ...]  # of the tar and of its possible indexes
    header: Header  # without blocks


class _Catalogue(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: Literal["kwcatalogue-1"] = "kwcatalogue-1"
    tars: dict[str, _Entry] = {}


def headers(tars: Sequence[Path | RemoteFile]) -> list[Header]:
    """The headers of the tars' indexes, which are made where there are none; in order, without their `blocks`.

    Errors: as of `open_index` and `open_remote_index`.
    """
    if len(tars) < LEAST:
        return [_header(tar) for tar in tars]
    folder = str(cache.folder())
    place = Path(_files(tars[0], folder)[-1]).with_suffix(".kwcatalogue")
    kept, entries, found = _read(place), dict[str, _Entry](), list[Header]()
    for tar in tars:
        files = _files(tar, folder)
        name, stamps = os.path.basename(files[-1])[:_NAME], _stamps(tar, files)
        entry = kept.get(name)
        if entry is None or entry.stamps != stamps:
            entry = _entry(tar, files, stamps)
        entries[name] = entry
        found.append(entry.header)
    if any(kept.get(name) is not entry for name, entry in entries.items()):
        _write(place, entries)
    return found


def _files(tar: Path | RemoteFile, folder: str) -> tuple[str, ...]:
    """Where the index may be; the last one is in the cache folder, under a name that begins with a digest."""
    if isinstance(tar, RemoteFile):
        return (str(tar.index),)
    return f"{tar}{SUFFIX}", cache.fallback(str(tar), SUFFIX, folder)


def _stamps(tar: Path | RemoteFile, files: Sequence[str]) -> tuple[_Stamp, ...]:
    if isinstance(tar, RemoteFile):
        size, version = tar.stat()
        return (size, version), *map(_stamp, files)
    return _stamp(str(tar)), *map(_stamp, files)


def _stamp(path: str) -> _Stamp:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _entry(tar: Path | RemoteFile, files: Sequence[str], stamps: tuple[_Stamp, ...]) -> _Entry:
    """Args: stamps: taken before the header is read, so that what changes meanwhile is noticed the next time."""
    header = _header(tar)
    if (now := _stamps(tar, files)) != stamps:  # an index was made
        stamps, header = now, _header(tar)
    return _Entry(stamps, header)


def _header(tar: Path | RemoteFile) -> Header:
    header = open_remote_index(tar).header if isinstance(tar, RemoteFile) else open_header(tar)
    return header.model_copy(update={"blocks": ()})


def _read(place: Path) -> dict[str, _Entry]:
    """Empty for a catalogue that is missing or damaged: the indexes say the same."""
    try:
        digest, _, text = place.read_bytes().partition(b"\n")
        return _Catalogue.model_validate_json(text).tars if digest == _digest(text) else {}
    except (OSError, ValidationError):
        return {}


def _write(place: Path, entries: dict[str, _Entry]) -> None:
    text = _Catalogue(tars=entries).model_dump_json(exclude_defaults=True).encode()
    with suppress(OSError), replacing(place) as file:  # without it, the next start opens all indexes
        file.write(_digest(text) + b"\n" + text)


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()
