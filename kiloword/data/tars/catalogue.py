"""The headers of the indexes of many tars in one file, so that opening a set of tars opens none of them.

The file lies in the cache folder. An entry is valid while its tar, and each file that may be the tar's index, has the
size and time of change that it had. Format: a digest of the JSON that follows, a line end, `_Catalogue`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from kiloword.data import files
from kiloword.data.remote.file import RemoteFile
from kiloword.data.remote.index import open_remote_index
from kiloword.data.tars.index import SUFFIX, Header, open_header
from kiloword.files import replacing

LEAST = 100  # number of tars from which on a catalogue is written
_NAME = 24  # characters of a digest
_Stamp = tuple[int, int] | None  # size and mtime_ns; None: no such file


class _Entry(NamedTuple):
    stamps: tuple[_Stamp, ...]  # of the tar and of its possible indexes
    header: Header  # without blocks


class _Catalogue(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: Literal["kwcatalogue-1"] = "kwcatalogue-1"
    tars: dict[str, _Entry] = {}


def headers(tars: Sequence[Path | RemoteFile]) -> list[Header]:
    """The headers of the tars' indexes, in order and without `blocks`; missing indexes are made.

    Errors: as of `open_index` and `open_remote_index`.
    """
    if len(tars) < LEAST:
        return [_header(tar) for tar in tars]
    folder = str(files.folder())
    catalogue = Path(_index_paths(tars[0], folder)[-1]).with_suffix(".kwcatalogue")
    old, new, in_order = _read(catalogue), dict[str, _Entry](), list[Header]()
    for tar in tars:
        paths = _index_paths(tar, folder)
        name, stamps = os.path.basename(paths[-1])[:_NAME], _stamps(tar, paths)
        entry = old.get(name)
        if entry is None or entry.stamps != stamps:
            entry = _entry(tar, paths, stamps)
        new[name] = entry
        in_order.append(entry.header)
    if any(old.get(name) is not entry for name, entry in new.items()):
        text = _Catalogue(tars=new).model_dump_json(exclude_defaults=True).encode()
        with suppress(OSError), replacing(catalogue) as file:  # without it, the next start opens all indexes
            file.write(_digest(text) + b"\n" + text)
    return in_order


def _index_paths(tar: Path | RemoteFile, folder: str) -> tuple[str, ...]:
    """Possible paths of the index; the last one is in the cache folder, and its name begins with a digest."""
    if isinstance(tar, RemoteFile):
        return (str(tar.index),)
    return f"{tar}{SUFFIX}", files.fallback(str(tar), SUFFIX, folder)


def _stamps(tar: Path | RemoteFile, paths: Sequence[str]) -> tuple[_Stamp, ...]:
    return tar.times() if isinstance(tar, RemoteFile) else _stamp(str(tar)), *map(_stamp, paths)


def _stamp(path: str) -> _Stamp:
    with suppress(OSError):
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    return None


def _entry(tar: Path | RemoteFile, paths: Sequence[str], stamps: tuple[_Stamp, ...]) -> _Entry:
    """Args: stamps: taken before the header is read, so that a change in between is noticed the next time."""
    header = _header(tar)
    if (now := _stamps(tar, paths)) != stamps:  # an index was made
        stamps, header = now, _header(tar)
    return _Entry(stamps, header)


def _header(tar: Path | RemoteFile) -> Header:
    header = open_remote_index(tar).header if isinstance(tar, RemoteFile) else open_header(tar)
    return header.model_copy(update={"blocks": ()})


def _read(catalogue: Path) -> dict[str, _Entry]:
    """The entries; none if the catalogue is missing or damaged, as the indexes hold the same."""
    try:
        digest, _, text = catalogue.read_bytes().partition(b"\n")
        return _Catalogue.model_validate_json(text).tars if digest == _digest(text) else {}
    except (OSError, ValidationError):
        return {}


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()
