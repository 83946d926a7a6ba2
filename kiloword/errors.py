"""Error messages for users: what happened and what to do; bugs keep their traceback."""

from __future__ import annotations

import difflib
import logging
import os
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

REASONS = 20  # that are printed
NAMED = 3  # of the things that are left out for one reason
FULL_DISK = ("No space left on device", "PytorchStreamWriter failed writing")
LIBRARIES = (f"{os.path.dirname(__file__)}{os.sep}", os.path.dirname(os.__file__), "-packages", "<")  # in their paths
WORKER = "Often memory (fewer --workers), a small /dev/shm, or a file system that hangs; --workers 0 shows where."


def article(noun: str) -> str:
    """A noun with its article: "an int", "a str"."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 figure", "2 figures"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass
class LeftOut:
    """What a reader or verb does not use, by reason: everything is counted, and the first of each reason are named.

    Args: noun: what is left out, such as "file", "member" or "sample".
    """

    noun: str
    most: int = NAMED
    counts: dict[str, int] = field(default_factory=Counter)  # by reason
    first: dict[str, list[str]] = field(default_factory=dict)  # names, at most `most` a reason
    done: str = "skipped"  # what happened to them

    def add(self, name: str, reason: str) -> bool:
        """Count one. Returns: whether `lines` names it."""
        self.counts[reason] += 1
        named = self.first.setdefault(reason, [])
        if room := len(named) < self.most:
            named.append(name)
        return room

    def extend(self, other: LeftOut) -> None:
        """Count what another one has counted."""
        for reason, number in other.counts.items():
            named = self.first.setdefault(reason, [])
            named += other.first[reason][: self.most - len(named)]
            self.counts[reason] += number

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        return "; ".join(self.lines()[:NAMED])

    def lines(self) -> list[str]:
        """One line a reason, the most frequent first: "808 samples skipped, no caption: 00, 01, 02 and 805 more"."""
        lines, reasons = list[str](), Counter(self.counts).most_common()
        for reason, number in reasons[:REASONS]:
            names = self.first[reason]
            more = f" and {number - len(names):,} more" if number > len(names) else ""
            lines.append(f"{count(number, self.noun)} {self.done}, {reason}: {', '.join(names)}{more}")
        if rest := reasons[REASONS:]:
            others = count(sum(number for _, number in rest), self.noun)
            lines.append(f"{others} {self.done} for {len(rest)} other reasons")
        return lines


_truncated: ContextVar[tuple[LeftOut, set[int]] | None] = ContextVar("truncated", default=None)  # and hashes of texts
log = logging.getLogger(__name__)


@contextmanager
def naming_truncated() -> Iterator[None]:
    """Count the different texts that tokenizers truncate inside, and log one warning that names the first of them.

    Inside another one, the outer one counts. It is a decorator, too.
    """
    if _truncated.get() is not None:
        yield
        return
    texts = LeftOut("text", done="truncated")
    token = _truncated.set((texts, set()))
    try:
        yield
    finally:
        _truncated.reset(token)
        for line in texts.lines():
            log.warning("%s", line)


def note_truncated(text: str, tokens: int, read: int) -> None:
    """Count a text for `naming_truncated`. Args: tokens: of the text; read: how many of them the model reads."""
    if (inside := _truncated.get()) is not None and hash(text) not in inside[1]:
        inside[1].add(hash(text))
        both_ends = text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"
        inside[0].add(f"{both_ends!r} ({read} of {tokens} tokens)", "the model reads only the beginning")


def needs(what: str, package: str, extra: str, otherwise: str = "") -> str:
    """The message of a missing package: "X needs PACKAGE: pip install 'kiloword[EXTRA]'".

    Args: extra: of pyproject.toml, that installs it; otherwise: what helps without it, such as ", or omit it."
    """
    return f"{what} needs {package}: pip install 'kiloword[{extra}]'{otherwise}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """ " Did you mean X?", or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def refuse(wrong: Mapping[str, object]) -> None:
    """Raises: ValueError with the first message whose value is true."""
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"{message}.")


def sentence_of(error: BaseException) -> str | None:
    """The message of an error that the user can fix; None for errors that need a traceback."""
    message, kind = str(error).strip(), type(error).__name__
    first = message.partition("\n")[0]
    if isinstance(error, UnicodeEncodeError):
        text = error.object[max(0, error.start - 200) : error.end + 20]
        return f"{text!r} cannot be written as {error.encoding}: rename the file or folder, or set PYTHONUTF8=1."
    if isinstance(error, ValueError):
        return f"{message}{_in_user_code(error)}"
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}."
    if any(words in message for words in FULL_DISK):  # libraries that write files wrap the error of the system
        return "No space left on device: what was there before is kept. Free some space, or write elsewhere."
    if isinstance(error, MemoryError) or "t allocate memory" in message:  # torch's on a CPU is a RuntimeError
        return f"out of memory{f' ({first})' if kind == 'MemoryError' and first else ''}: take a smaller --batch."
    if kind == "OutOfMemoryError":
        return f"{first} Take a smaller --micro, or --checkpointing selective; see `kiloword plan`."
    if isinstance(error, RuntimeError) and message.startswith("DataLoader"):
        return f"a loader worker stopped: {first.rstrip('. ')}. {WORKER}"
    return None


def _in_user_code(error: BaseException) -> str:
    """The last line of a user's file that an error, or its first cause, passed through: " (mine.py:12)"; "": none."""
    while error.__cause__:
        error = error.__cause__
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f" ({frame.filename}:{frame.lineno})" for frame in frames if not of_library(frame.filename)), "")


def of_library(path: str) -> bool:
    """Whether a file of code is of an installed package, of Python or of kiloword."""
    return any(part in path for part in LIBRARIES)
