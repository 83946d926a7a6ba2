"""Where the members of a plain tar lie, by its headers alone (POSIX.1-2001 pax, ustar, GNU); nothing is ever extracted.

Sizes and names in headers are claims of strangers: each read is bounded, each step leads forward, and what cannot be
is damage, at which reading ends. `tarfile`, which the tests compare with, follows negative sizes backwards and makes
room for whatever size a pax header claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from kiloword.data.files import PositionlessFile


class FileTimes(Protocol):
    """The part of `os.stat` that decides whether an index still holds."""

    @property
    def st_size(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...


class ReadableFile(Protocol):
    """A file that is no path of this machine."""

    def stat(self) -> FileTimes: ...
    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer at the end of the file."""


BLOCK = 512
_PADDING = 1 << 20  # zeros that may stand behind the end; tar itself writes at most 10 kB
_LONGEST = 1 << 20  # bytes of a long name or of a pax header; paths have at most 4096
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes: their size says nothing
_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK, _SPARSE = (b"x", b"X"), b"g", b"L", b"K", b"S"
_HOLES = b"GNU.sparse"  # several keys, of which one is kept: such a file does not lie in one piece
_RECORD = re.compile(rb"(\d{1,9}) ([^=]{1,4096})=")


class Damage(Exception):
    """What stands here is no header of a tar."""


class Member(NamedTuple):
    """A regular file in a tar; its bytes may go past the tar's end."""

    name: str
    offset: int
    size: int


@dataclass
class _Extended:
    """What the headers before a member say about it."""

    name: bytes | None = None  # GNU's long name
    pax: dict[bytes, bytes] = field(default_factory=dict)


class Tar:
    """Iterates over a tar's regular files; then `note` says what is wrong with the tar.

    Errors: ValueError when the file does not begin as a plain tar; OSError when it cannot be read.
    """

    def __init__(self, path: Path | ReadableFile) -> None:
        self.path, self.note = path, ""
        self._file = PositionlessFile(path) if isinstance(path, Path) else path
        self._end = path.stat().st_size

    def __iter__(self) -> Iterator[Member]:
        position, extended, shared = 0, _Extended(), dict[bytes, bytes]()
        while (header := self._header(position)) is not None:
            kind, data = header[156:157], position + BLOCK
            try:
                size = number(header[124:136])
                if kind in (*_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK):
                    self._extend(kind, self._body(data, size), extended, shared)
                    position = data + _blocks(size)
                    continue
                pax = shared | extended.pax
                size = _pax_size(pax, size)
                position = self._next(kind, data, size)
                name = self._name(header, extended, pax)
            except Damage:
                self.note = f"damaged at byte {data - BLOCK:,}; what follows is not read"
                return
            if kind in _REGULAR and not name.endswith(b"/") and _HOLES not in pax:
                yield Member(name.decode("utf-8", "surrogateescape"), data, min(size, self._end + 1))
            extended = _Extended()

    def _header(self, position: int) -> bytes | None:
        """The header there; None, with the note, where the tar ends, well or badly."""
        block = self._file.read(position, BLOCK) if position < self._end else b""
        if not _is_header(block):
            if position == 0 and (len(block) < BLOCK or any(block)):
                raise self._refusal(block)
            self.note = self._ending(block, position)
            return None
        return block

    def _refusal(self, block: bytes) -> ValueError:
        what = "the file is empty" if not block else "it does not begin with a header of a tar"
        return ValueError(
            f"{self.path} cannot be read as a plain tar ({what}). Compressed tars have no byte offsets: unpack the .gz."
        )

    def _ending(self, block: bytes, position: int) -> str:
        """A whole tar ends with blocks of zeros; anything else is damage.

        Behind the end may stand a second tar (`cat a.tar b.tar`), or the zeros of a download that never finished.
        """
        if len(block) < BLOCK:
            return f"cut at byte {self._end:,}"
        if any(block):
            return f"damaged at byte {position:,}; what follows is not read"
        rest = self._file.read(position + BLOCK, _PADDING)
        more = any(rest) or len(rest) == _PADDING
        return f"ended at byte {position:,}; what follows is not read" if more else ""

    def _body(self, data: int, size: int) -> bytes:
        """The bytes of a header that speaks about the next member."""
        if size > _LONGEST:
            raise Damage
        return self._file.read(data, size)

    def _extend(self, kind: bytes, body: bytes, extended: _Extended, shared: dict[bytes, bytes]) -> None:
        if kind == _LONG_NAME:
            extended.name = _text(body)
        elif kind in _PAX:
            extended.pax = dict(_pax_records(body))
        elif kind == _GLOBAL:
            shared |= dict(_pax_records(body))

    def _next(self, kind: bytes, data: int, size: int) -> int:
        """Where the header after a member stands."""
        if kind == _SPARSE:
            data = self._behind_sparse_map(data)
        return data if kind in _WITHOUT_DATA else data + _blocks(size)

    def _behind_sparse_map(self, data: int) -> int:
        """Old GNU sparse files go on with blocks that list their holes, as long as a flag in each says so."""
        block = self._file.read(data - BLOCK, BLOCK)
        more = block[482:483]
        while more not in (b"", b"\0"):
            more, data = self._file.read(data, BLOCK)[504:505], data + BLOCK
        return data

    def _name(self, header: bytes, extended: _Extended, pax: dict[bytes, bytes]) -> bytes:
        if b"path" in pax:
            return pax[b"path"]
        if extended.name is not None:
            return extended.name
        name, prefix = _text(header[:100]), _text(header[345:500])
        posix = header[257:263] == b"ustar\0"
        return prefix + b"/" + name if posix and prefix else name


def number(raw: bytes) -> int:
    """A header's number: octal digits, or big-endian behind a byte 0x80. Raises Damage, also for negative ones."""
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:], "big")
    digits = raw.split(b"\0")[0].strip(b" ")
    if re.fullmatch(rb"[0-7]*", digits) is None:
        raise Damage
    return int(digits or b"0", 8)


def _is_header(block: bytes) -> bool:
    """Whether the checksum is right; old tars summed signed bytes."""
    if len(block) < BLOCK or not any(block):
        return False
    try:
        stated = number(block[148:156])
    except Damage:
        return False
    rest = block[:148] + b" " * 8 + block[156:]
    total = sum(rest)
    return stated == total or stated == total - 256 * sum(byte > 127 for byte in rest)


def _pax_records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """What matters here of `LENGTH KEY=VALUE\\n`, one after the other; the length counts the whole record."""
    position = 0
    while position < len(body) and body[position]:
        found = _RECORD.match(body, position)
        end = position + int(found[1]) if found else 0
        if not found or not found.end() < end <= len(body) or body[end - 1 : end] != b"\n":
            raise Damage
        key, value = found[2], body[found.end() : end - 1]
        if key in (b"path", b"size"):
            yield key, value
        elif key.startswith(_HOLES):
            yield _HOLES, b""
        position = end


def _pax_size(pax: dict[bytes, bytes], size: int) -> int:
    if b"size" not in pax:
        return size
    if re.fullmatch(rb"\d{1,18}", pax[b"size"]) is None:
        raise Damage
    return int(pax[b"size"])


def _text(raw: bytes) -> bytes:
    return raw.split(b"\0", 1)[0]


def _blocks(size: int) -> int:
    """Rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK
