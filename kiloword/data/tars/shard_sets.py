"""Sets of shards, local or remote: their names, their order, and the lists of words beside them."""

from __future__ import annotations

import math
import re

RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MOST = 1_000_000  # files of one pattern


def expand(pattern: str) -> list[str]:
    """`x-{08..10}.tar` to x-08.tar, x-09.tar, x-10.tar: the digits of the first number give the width.

    Errors: ValueError for a range that is empty, and for more than a million names.
    """
    sizes = [max(1, int(last) - int(first) + 1) for first, last in RANGE.findall(pattern)]
    if math.prod(sizes) > _MOST:
        raise ValueError(f"{pattern} names {math.prod(sizes):,} files. Expected at most {_MOST:,}.")
    match = RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match[1], match[2]
    if int(last) < int(first):
        raise ValueError(f"{pattern}: the range {match[0]} is empty. Write the smaller number first.")
    numbers = (str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return [whole for n in numbers for whole in expand(pattern[: match.start()] + n + pattern[match.end() :])]


def natural(name: str) -> list[tuple[int, str]]:
    """A key by which numbers in names compare as numbers: 2.tar before 10.tar."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,1000})", name)]


def text_lines(where: str, raw: bytes) -> list[str]:
    """The lines of a file. Errors: ValueError for one that is not UTF-8, or has an empty line."""
    try:
        lines = [line.strip() for line in raw.decode("utf-8-sig").strip().split("\n")]
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8.") from None
    if not all(lines):  # class indices count lines: skipping an empty one would move all that follow
        raise ValueError(f"{where}: line {lines.index('') + 1} is empty. Expected text in every line.")
    return lines
