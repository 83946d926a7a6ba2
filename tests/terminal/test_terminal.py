"""What the package prints: through one function, on lines of its own, in any encoding."""

from __future__ import annotations

import io
import os
import re
import sys
import termios
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from kiloword.report import page
from kiloword.terminal import say, show_traceback, shown, warn_once
from kiloword.terminal.progress import ProgressLine
from kiloword.terminal.screen import Screen, plain_table
from terminals import Terminal


class Stream(io.TextIOWrapper):
    """A terminal, or a pipe, of some encoding."""

    def __init__(self, encoding: str = "utf-8", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding, newline="", write_through=True)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a photo of a café, 犬\u3000и кот\u00a0🐶", "a photo of a café, 犬\u3000и кот\u00a0🐶"),
        ("\x1b[2J\x07\r\n\t\x00", r"\x1b[2J\x07\r\n\t\x00"),
        ("\x9b2J\x85\u2028", r"\x9b2J\x85\u2028"),
        ("a\u202eb\u2066c\u200fd\u061c", r"a\u202eb\u2066c\u200fd\u061c"),
        ("a\u200bb\ufeffc\u00add\u3164e\U000e0041", r"a\u200bb\ufeffc\xadd\u3164e\U000e0041"),
        ("\udc80\ud800", r"\udc80\ud800"),
    ],
)
def test_shown(text: str, expected: str) -> None:
    assert shown(text) == shown(shown(text)) == expected


@given(st.text(st.characters()), st.sampled_from(["utf-8", "ascii", "latin-1", "cp1252"]))  # surrogates too
def test_shown_can_be_written_and_steers_nothing(text: str, encoding: str) -> None:
    safe = shown(text, encoding)
    assert not [c for c in safe if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"]
    safe.encode(encoding)
    assert shown(safe, encoding) == safe


def test_say_and_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    out, error = Stream("ascii"), Stream()
    monkeypatch.setattr(sys, "stderr", error)
    say("é\nforged", "b\x1b", to=out)
    assert out.text == "\\xe9\\nforged\nb\\x1b\n"
    try:
        raise RuntimeError("\x1b[2J\nend")
    except RuntimeError as bug:
        show_traceback(type(bug), bug, bug.__traceback__)
    assert error.text.endswith("RuntimeError: \\x1b[2J\nend\n")
    assert "\x1b" not in error.text
    warn_once("said once in this test")
    warn_once("said once in this test")
    assert error.text.count("said once") == 1


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_tables(monkeypatch: pytest.MonkeyPatch, terminal: bool, encoding: str) -> None:
    """rich styles what we style, reads no markup or link in a text, and writes what the stream can hold."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Stream(encoding, terminal)
    table = plain_table("name", "\x1b]8;;x\x07")
    table.add_row("[red]é\n[/red] :smile:", Text(shown("[link=x]\x1b[2J"), "bold"))
    Screen(100, out).print(table)
    Screen(100, out).print("[bold]x\x9b", Text("y\x1b[2J"), style="bold")
    for text in ("[red]", "[/red] :smile:", "\\n", "\\x1b]8;;x\\x07", "[link=x]\\x1b[2J", "[bold]x\\x9b y\\x1b[2J"):
        assert text in out.text
    assert ("\x1b[1m" in out.text) == terminal
    assert not re.search("\x1b(\\]8|\\[2J|\\[31m)", out.text)


class Narrow(Terminal):
    """A terminal of 80 columns."""

    columns = 80


@pytest.mark.parametrize("file", [io.StringIO, Narrow])
@pytest.mark.parametrize("paths", [1, 3])
def test_a_table_loses_no_letter(paths: int, file: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal folds words; other output has each row on one line."""
    monkeypatch.setenv("COLUMNS", "80")
    path, number, out = "p" * 50, "0.12345 +- 0.01", file()
    table = plain_table(*(str(n) for n in range(paths)), "number", "text")
    table.add_row(*[path] * paths, number, "q " * 100)
    Screen(80, file=out).print(table)
    printed = re.sub("\x1b\\[[0-9;]*m", "", out.getvalue())
    assert (printed.count("p"), printed.count("q")) == (50 * paths, 100)
    if file is Narrow:
        assert max(map(len, printed.splitlines())) <= 80
    else:
        assert path in printed
        assert len(printed.splitlines()) == 2
    lines = io.StringIO()
    Screen(80, file=lines).print_table(table, [Text("in lines")])
    assert ("in lines" in lines.getvalue()) is (paths == 3)


def test_progress_fits_its_own_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of stderr where stdout is a pipe."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    with open(theirs, "w", encoding="utf-8") as out:
        ProgressLine(out, at_once=True).show("texts " * 20, 1, 2)
        assert len(os.read(ours, 1000)) == 40
    os.close(ours)


def test_pages_are_not_turned_around() -> None:
    """Where text begins or ends, and its direction, are the page's."""
    html = page("t\u202e\x9b", "i\u2067\udcff", [("h\x1b", "<p>\u202d\u0645\u200c\u200f</p>")])
    for text in ("t\\u202e\\x9b", "i\\u2067\\udcff", "h\\x1b", "<p>\\u202d\u0645\u200c\u200f</p>"):
        assert text in html  # joiners and marks are spelling
    html.encode()
