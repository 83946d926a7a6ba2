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
from typing import TextIO

from kiloword.addresses import scrubbed

LONGEST = 10_000  # characters printed of a line; a path has at most 4096
# Invisible letters and marks that isprintable() accepts.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\U000e0100-\U000e01ef]")
_warned: set[str] = set()
_words: ContextVar[tuple[str, ...]] = ContextVar("words of the command", default=())


def shown(text: str, encoding: str | None = None) -> str:
    r"""Text on one line in which invisible and control characters are escapes such as \x1b.

    These are control and format characters (line ends, ESC, C1, bidirectional, zero-width), lone surrogates, and
    characters outside `encoding` (of a stream; None: UTF-8). An escaped text is not changed again.
    """
    if not text.isprintable() or _INVISIBLE.search(text):
        text = "".join(
            letter
            if (letter.isprintable() or unicodedata.category(letter) == "Zs") and not _INVISIBLE.match(letter)
            else letter.encode("unicode_escape").decode()
            for letter in text
        )
    return text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def is_terminal(out: TextIO) -> bool:
    """Whether a stream is a terminal that can erase a line."""
    return out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines, escaped by `shown`, of each at most LONGEST characters; a line of progress gives way.

    Args: to: default stdout. Errors: those of the stream, such as BrokenPipeError; none for its encoding.
    """
    out = sys.stdout if to is None else to
    cut = (line if len(line) <= LONGEST else line[:LONGEST] + "..." for line in lines)
    erase = "\r\x1b[K" if is_terminal(out) else ""
    out.write(erase + "".join(shown(line, out.encoding) + "\n" for line in cut))
    out.flush()


def warn(*lines: str) -> None:
    """Print lines on stderr, as `say`."""
    say(*lines, to=sys.stderr)


def warn_once(*lines: str) -> None:
    """As `warn`, each line once in a command, and by the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        warn(*(line for line in lines if line not in _warned))
        _warned.update(lines)


def show_traceback(kind: object, error: BaseException, trace: object) -> None:
    """For sys.excepthook: print a traceback, escaped, as its message may come from data."""
    for part in traceback.format_exception(error):
        warn(*scrubbed(part).rstrip("\n").split("\n"))


@contextmanager
def invoked(words: Sequence[str]) -> Iterator[None]:
    """Inside, `command` returns these words; a verb that another one runs (an arm of a sweep) takes their place."""
    _warned.clear()
    token = _words.set(("kiloword", *words))
    try:
        yield
    finally:
        _words.reset(token)


def command() -> str:
    """The command as it is typed, without credentials; "" where Python called the library."""
    return scrubbed(shlex.join(_words.get()))
