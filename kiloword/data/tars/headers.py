"""Positions of the members of a plain tar, from its headers alone (POSIX.1-2001 pax, ustar, GNU); nothing is extracted.

Sizes and names in headers may be hostile: each read is bounded, each step leads forward, and an impossible value is
damage, which ends reading. `tarfile`, which the tests compare with, follows negative sizes backwards and allocates
whatever size a pax header claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from kiloword.data.files import PositionlessFile
from kiloword.errors import LeftOut
from kiloword.terminal import shown


class ReadableFile(Protocol):
    """A file that is not a local path."""

    def times(self) -> tuple[int, int]:
        """Size and mtime_ns, which decide whether an index is still valid."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer at the end of the file."""


BLOCK = 512
_PADDING = 1 << 20  # zeros that may follow the end; tar itself writes at most 10 kB
_LONGEST = 1 << 20  # bytes of a long name or of a pax header; paths have at most 4096
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes: their size has no meaning
_FOLDER = b"5"
_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK, _SPARSE = (b"x", b"X"), b"g", b"L", b"K", b"S"
_HOLES = b"GNU.sparse"  # stands for all keys with this prefix: the data of such a file is not contiguous
_RECORD = re.compile(rb"(\d{1,9}) ([^=]{1,4096})=")


class Damage(Exception):
    """The bytes are not a header of a tar."""


class Member(NamedTuple):
    """A regular file in a tar; its bytes may go past the tar's end."""

    name: str
    offset: int
    size: int


class Tar:
    """Iterates over a tar's regular files; afterwards `note` says what is wrong with the tar, `left_out` counts links.

    Errors: ValueError when the file does not begin as a plain tar; OSError when it cannot be read.
    """

    def __init__(self, path: Path | ReadableFile) -> None:
        self.path, self.note, self.left_out = path, "", LeftOut("member")
        self._file = PositionlessFile(path) if isinstance(path, Path) else path
        self.times = self._file.times()
        self._end = self.times[0]

    def __iter__(self) -> Iterator[Member]:
        position, shared = 0, dict[bytes, bytes]()  # pax records of all later members
        long_name, pax = b"", dict[bytes, bytes]()  # of the next member
        while (header := self._header(position)) is not None:
            kind, data = header[156:157], position + BLOCK
            try:
                size = number(header[124:136])
                if kind in (*_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK):
                    body, position = self._body(data, size), data + _blocks(size)
                    if kind == _LONG_NAME:
                        long_name = _text(body)
                    elif kind in _PAX:
                        pax = dict(_pax_records(body))
                    elif kind == _GLOBAL:
                        shared |= dict(_pax_records(body))
                    continue
                records = shared | pax
                size = _pax_size(records, size)
                position = self._next(kind, data, size)
            except Damage:
                self.note = f"damaged at byte {data - BLOCK:,}; what follows is not read"
                return
            name = records.get(b"path", long_name or _short_name(header))
            if kind in _REGULAR and not name.endswith(b"/") and _HOLES not in records:
                yield Member(name.decode("utf-8", "surrogateescape"), data, min(size, self._end + 1))
            elif kind != _FOLDER and not name.endswith(b"/"):
                self.left_out.add(shown(name.decode("utf-8", "surrogateescape")), "no file, but a link or the like")
            long_name, pax = b"", {}

    def _header(self, position: int) -> bytes | None:
        """The header there; None, with the note, where the tar ends, intact or damaged."""
        block = self._file.read(position, BLOCK) if position < self._end else b""
        if _is_header(block):
            return block
        if position == 0 and block and (len(block) < BLOCK or any(block)):
            raise ValueError(
                f"{self.path} cannot be read as a plain tar (it does not begin with a header of a tar). Compressed "
                "tars have no byte offsets: unpack the .gz."
            )
        self.note = self._ending(block, position)
        return None

    def _ending(self, block: bytes, position: int) -> str:
        """A complete tar ends with blocks of zeros; anything else is damage.

        After the end may come a second tar (`cat a.tar b.tar`), or the zeros of a download that never finished.
        """
        if len(block) < BLOCK:
            return f"cut at byte {self._end:,}"
        if any(block):
            return f"damaged at byte {position:,}; what follows is not read"
        rest = self._file.read(position + BLOCK, _PADDING)
        more = any(rest) or len(rest) == _PADDING
        return f"ended at byte {position:,}; what follows is not read" if more else ""

    def _body(self, data: int, size: int) -> bytes:
        """The bytes of a header that describes the next member."""
        if size > _LONGEST:
            raise Damage
        return self._file.read(data, size)

    def _next(self, kind: bytes, data: int, size: int) -> int:
        """The position of the header after a member."""
        if kind == _SPARSE:  # old GNU format: blocks that list holes follow as long as a flag in each says so
            more = self._file.read(data - BLOCK, BLOCK)[482:483]
            while more not in (b"", b"\0"):
                more, data = self._file.read(data, BLOCK)[504:505], data + BLOCK
        return data if kind in _WITHOUT_DATA else data + _blocks(size)


def number(raw: bytes) -> int:
    """A header's number: octal digits, or big-endian after a byte 0x80. Raises: Damage, also for negative ones."""
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


def _short_name(header: bytes) -> bytes:
    name, prefix = _text(header[:100]), _text(header[345:500])
    return prefix + b"/" + name if header[257:263] == b"ustar\0" and prefix else name


def _pax_records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The needed records of a sequence of `LENGTH KEY=VALUE\\n`; the length counts the whole record."""
    position = 0
    while position < len(body) and body[position]:
        match = _RECORD.match(body, position)
        end = position + int(match[1]) if match else 0
        if not match or not match.end() < end <= len(body) or body[end - 1 : end] != b"\n":
            raise Damage
        key, value = match[2], body[match.end() : end - 1]
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
    """`size` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK
