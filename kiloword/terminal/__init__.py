"""All output of this package: no text can control the terminal or fail to encode."""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO, cast

from kiloword.addresses import scrubbed

LONGEST = 10_000  # characters printed of a line; a path has at most 4096
# Invisible letters and marks that isprintable() accepts.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\U000e0100-\U000e01ef]")
_LINES = re.compile("(\n)")
_STYLED = re.compile("(\x1b\\[[0-9;]*m|[\n\r])")  # colours and rewritten lines of other libraries


def shown(text: str, encoding: str | None = None) -> str:
    r"""Text on one line in which invisible and control characters are escapes such as \x1b.

    These are control and format characters (line ends, ESC, C1, bidirectional, zero-width), lone surrogates, and
    characters outside `encoding` (of a stream; None: UTF-8). An escaped text is not changed again.
    """
    if not text.isprintable() or _INVISIBLE.search(text):
        text = "".join(map(_letter, text))
    return text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


@dataclass
class Cursor:
    """Where the terminal's cursor is."""

    inside_line: bool = False  # behind a line of progress, which has no line end


CURSOR = Cursor()


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines, escaped by `shown`, of each at most LONGEST characters, below a line of progress if there is one.

    Args: to: default stdout. Errors: those of the stream, such as BrokenPipeError; none for its encoding.
    """
    out = sys.stdout if to is None else to
    raw = getattr(out, "raw_stream", out)
    encoding = getattr(raw, "encoding", None)
    cut = (line if len(line) <= LONGEST else line[:LONGEST] + "..." for line in lines)
    end_line(raw)
    raw.write("".join(shown(line, encoding) + "\n" for line in cut))
    raw.flush()


def end_line(out: TextIO) -> None:
    """End a line of progress on the terminal `out`; elsewhere nothing."""
    if CURSOR.inside_line and out.isatty():
        CURSOR.inside_line = False
        getattr(out, "raw_stream", out).write("\n")


def warn(*lines: str) -> None:
    """Print lines on stderr, as `say`."""
    say(*lines, to=sys.stderr)


@contextmanager
def guarded() -> Iterator[None]:
    """Inside, output of other libraries is escaped like that of `say`; line ends are kept.

    On a terminal colours and rewritten lines pass, except when the command line contains such characters, as a message
    may repeat them.
    """
    before = sys.stdout, sys.stderr
    styled = all(word.isprintable() for word in sys.argv)
    sys.stdout, sys.stderr = (cast(TextIO, _Guard(stream, styled)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For sys.excepthook: print a traceback, escaped, as its message may come from data."""
    for part in traceback.format_exception(kind, error, trace):
        warn(*scrubbed(part).rstrip("\n").split("\n"))


class _Guard:
    """A stream that escapes its input. `say` and Screen, which escape themselves, write to `raw_stream`."""

    def __init__(self, stream: TextIO, styled: bool) -> None:
        self.raw_stream = getattr(stream, "raw_stream", stream)
        self._terminal = styled and self.raw_stream.isatty()

    def isatty(self) -> bool:
        """Whether other libraries may print styles."""
        return self._terminal

    def write(self, text: str) -> int:
        """Write escaped text; returns the number of characters of the input."""
        encoding = getattr(self.raw_stream, "encoding", None)
        parts = (_STYLED if self._terminal else _LINES).split(text)
        parts[::2] = [shown(part, encoding) for part in parts[::2]]
        self.raw_stream.write("".join(parts))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def _letter(letter: str) -> str:
    fine = letter.isprintable() or unicodedata.category(letter) == "Zs"  # spaces: of no width, or wide, or unbroken
    if fine and not _INVISIBLE.match(letter):
        return letter
    return letter.encode("unicode_escape").decode()


def warn_once(*lines: str) -> None:
    """As `warn`, each line once in a command, and by the first rank only."""
    new = [line for line in lines if line not in _WARNED and os.environ.get("RANK", "0") == "0"]
    warn(*new)
    _WARNED.update(new)


_WARNED: set[str] = set()
_WORDS: ContextVar[tuple[str, ...]] = ContextVar("words of the command", default=())


@contextmanager
def invoked(words: Sequence[str]) -> Iterator[None]:
    """Inside, `command` returns these words; a verb that another one runs (an arm of a sweep) takes their place."""
    _WARNED.clear()
    token = _WORDS.set(("kiloword", *words))
    try:
        yield
    finally:
        _WORDS.reset(token)


def command() -> str:
    """The command as it is typed, without credentials; "" where Python called the library."""
    return scrubbed(shlex.join(_WORDS.get()))
