"""What the package prints: through one function, on lines of its own, in any encoding."""

from __future__ import annotations

import io
import os
import re
import sys
import termios
import unicodedata

import pytest
from hypothesis import given, strategies as st

from kiloword.report import Page, Text
from kiloword.report.render import html
from kiloword.terminal import progress, say, show_traceback, shown, warn_once
from kiloword.terminal.progress import ProgressLine
from kiloword.terminal.screen import say_table


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
    for _ in range(2):
        warn_once("said once in this test")
        assert error.text.count("said once") == 1


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_tables_lose_no_letter_and_no_text_steers(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, encoding: str
) -> None:
    """rich reads no markup or link in a text; a terminal folds words, other output has each row on one line."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    out = Stream(encoding, terminal)
    monkeypatch.setattr(sys, "stdout", out)
    hostile = "[red]é\n[/red] :smile: \x1b]8;;x\x07"
    say_table([("p" * 50, "0.125", "q " * 100), (hostile, "-1.5", "z" * 30_000)], "name", "number", "text")
    printed = re.sub("\r|\x1b\\[[0-9;]*[mK]", "", out.text)
    assert (printed.count("p"), printed.count("q")) == (50, 100)
    assert printed.count("z") == 10_000
    lines = printed.splitlines()
    if terminal:
        assert max(map(len, lines)) <= 80
    else:
        assert len(lines) == 3
        assert "[/red] :smile: \\x1b]8;;x\\x07" in printed
    assert "\x1b]" not in out.text


def test_progress_fits_its_own_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of stderr where stdout is a pipe."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    with open(theirs, "w", encoding="utf-8") as out:
        ProgressLine(out, at_once=True).show("texts " * 20, 1, 2)
        assert len(os.read(ours, 1000)) == 41  # at both ends the cursor goes to the beginning
    os.close(ours)


def test_only_the_outer_work_shows_its_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    with progress.showing(True):
        for name in ("outer", "later"):
            for _ in progress.track(range(2), name, "files", 2):
                assert list(progress.track(range(2), "inner", "rows", 2)) == [0, 1]
    assert set(re.findall("outer|later|inner", capsys.readouterr().err)) == {"outer", "later"}


def test_pages_are_not_turned_around() -> None:
    """Where text begins or ends, and its direction, are the page's."""
    page = html(Page("t\u202e\x9b", "i\u2067\udcff", {"h\x1b": [Text("\u202d\u0645\u200c\u200f")]}))
    for text in ("t\\u202e\\x9b", "i\\u2067\\udcff", "h\\x1b", "<p>\\u202d\u0645\u200c\u200f</p>"):
        assert text in page  # joiners and marks are spelling
    page.encode()
