"""What the package prints: through one function, on lines of its own, in any encoding."""

from __future__ import annotations

import ast
import functools
import io
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.live import Live
from rich.text import Text

import kiloword
from folders import model_folder
from kiloword.cli.main import main
from kiloword.report import page
from kiloword.terminal import guarded, say, show_traceback, shown, warn
from kiloword.terminal.screen import Screen, plain_table, shares
from terminals import Terminal

PACKAGE = Path(kiloword.__file__).parent
WRITERS = {"terminal/__init__.py", "terminal/screen.py"}
ANY = st.text(st.characters())  # surrogates too


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
    assert shown(text) == expected
    assert shown(shown(text)) == expected


@given(ANY, st.sampled_from(["utf-8", "ascii", "latin-1", "cp1252"]))
def test_shown_can_be_written_and_steers_nothing(text: str, encoding: str) -> None:
    safe = shown(text, encoding)
    assert not [c for c in safe if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029"]
    safe.encode(encoding)
    assert shown(safe, encoding) == safe


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_say(encoding: str) -> None:
    out = Stream(encoding)
    say("é\nforged", "b\x1b", to=out)
    assert out.text == ("\\xe9" if encoding == "ascii" else "é") + "\\nforged\nb\\x1b\n"


def test_what_others_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe, also a bug's traceback: lines, and nothing else that steers."""
    out, error = Stream("ascii"), Stream("ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    with guarded():
        print("a\x1b[31mb\né")
        sys.stderr.writelines(["\x1b]0;t\x07\n", "\u202e\n"])
        say("\x1b")
        warn("\x07")
    try:
        raise RuntimeError("\x1b[2J\nend")
    except RuntimeError as bug:
        show_traceback(type(bug), bug, bug.__traceback__)
    assert sys.stdout is out
    assert out.text == "a\\x1b[31mb\n\\xe9\n\\x1b\n"
    assert "\\x1b]0;t\\x07" in error.text
    assert "\\u202e" in error.text
    assert error.text.endswith("RuntimeError: \\x1b[2J\nend\n")
    assert "\x1b" not in error.text


@pytest.mark.parametrize("argument", ["plain", "\x1b[8m"])
def test_colours_of_others_on_a_terminal(monkeypatch: pytest.MonkeyPatch, argument: str) -> None:
    """They pass, unless they may be what was asked for on the command line."""
    out = Stream(terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["kiloword", argument])
    with guarded():
        print("\x1b[1mbold\x1b[0m \x1b[2J\rx")
        say("\rown")
        assert sys.stdout.isatty() == (argument == "plain")
    clean = "\x1b[1mbold\x1b[0m \\x1b[2J\rx\n\\rown\n"
    assert out.text == (clean if argument == "plain" else "\\x1b[1mbold\\x1b[0m \\x1b[2J\\rx\n\\rown\n")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_tables(monkeypatch: pytest.MonkeyPatch, terminal: bool, encoding: str) -> None:
    """rich styles what we style, reads no markup or link in a text, and writes what the stream can hold."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Stream(encoding, terminal)
    monkeypatch.setattr(sys, "stdout", out)
    table = plain_table("name", "\x1b]8;;x\x07")
    table.add_row("[red]é\n[/red] :smile:", Text(shown("[link=x]\x1b[2J"), "bold"))
    with guarded():
        Screen(100).print(table)
        Screen(100).print("[bold]x\x9b", Text("y\x1b[2J"), style="bold")
    for text in ("[red]", "[/red] :smile:", "\\n", "\\x1b]8;;x\\x07", "[link=x]\\x1b[2J", "[bold]x\\x9b y\\x1b[2J"):
        assert text in out.text
    assert ("\x1b[1m" in out.text) == terminal
    assert "\x1b]8" not in out.text
    assert "\x1b[2J" not in out.text
    assert "\x1b[31m" not in out.text


def test_frames_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich's own control characters come through: one frame over the other."""
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Stream(terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    with guarded(), Live(console=Screen(), screen=True, auto_refresh=False) as live:
        for text in ("a\x1b[2J", "b"):
            live.update(Text(text), refresh=True)
    assert out.text.count("\x1b[H") >= 3
    assert out.text.startswith("\x1b[?1049h\x1b[H\x1b[?25l")
    assert out.text.endswith("\x1b[?25h\x1b[?1049l")
    assert "a\\x1b[2J" in out.text
    assert "\\x1b[H" not in out.text


@functools.cache
def _calls() -> list[tuple[str, ast.Call | ast.ImportFrom]]:
    """All calls and imports of the package, and where they stand."""
    return [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", node)
        for path in PACKAGE.rglob("*.py")
        if re.search(r"print|Console|\.write|warnings", text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call | ast.ImportFrom)
    ]


def test_every_print_goes_one_way() -> None:
    """No print, no console and no stream of its own anywhere in the package."""
    assert [at for at, node in _calls() if at.partition(":")[0] not in WRITERS and _writes(node)] == []


def _writes(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
        return any(name.name in ("print", "Console", "get_console") for name in node.names) and not _typing(node)
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("write", "writelines"):
        stream = ast.unparse(node.func.value)
        return stream.startswith("sys.") or stream in ("out", "self.out")
    return ast.unparse(node.func) in ("print", "builtins.print", "Console", "rich.print", "pprint", "warnings.warn")


def _typing(node: ast.ImportFrom) -> bool:
    """watch's frames are drawn on a console that somebody else made."""
    return [name.name for name in node.names] == ["Console"]


@pytest.mark.parametrize("line", ["print(1)", "sys.stderr.write('')", "self.out.write('')", "Console()"])
def test_the_test_of_prints_can_fail(line: str) -> None:
    assert any(map(_writes, ast.walk(ast.parse(line))))


def test_pages_are_not_turned_around() -> None:
    """Where text begins or ends, and its direction, are the page's."""
    html = page("t\u202e\x9b", "i\u2067\udcff", [("h\x1b", "<p>\u202d\u0645\u200c\u200f</p>")])
    assert "t\\u202e\\x9b" in html
    assert "i\\u2067\\udcff" in html
    assert "h\\x1b" in html
    assert "<p>\\u202d\u0645\u200c\u200f</p>" in html  # joiners and marks are spelling
    html.encode()


ASCII = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.mark.slow
def test_terminals_of_ascii(tmp_path: Path) -> None:
    """Where nothing but ASCII can be written or named: no traceback, and escapes for the rest."""
    (tmp_path / "é").mkdir()
    verbs = [["methods"], ["doctor"], ["x\udcff\x1b"], ["data", "stats", "scenes?n=4"]]
    code = (
        f"import sys; from kiloword.cli.main import main\nfor verb in [*{verbs!a}, ['data', 'stats', sys.argv[1]]]:\n"
    )
    code += "  try: main(verb)\n  except SystemExit as end: print(end.code)"
    command = [sys.executable, "-c", code, str(tmp_path / "é")]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **ASCII}, check=True)
    assert done.stdout.isascii()
    assert done.stderr.isascii()
    assert b"Traceback" not in done.stderr
    assert b"\\udcff\\x1b" in done.stderr
    assert b"\\udcc3\\udca9" in done.stderr
    assert done.stdout.split()[-1] == b"2"


def test_version_and_interruption(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(["--version"])
    assert capsys.readouterr().out == kiloword.__version__ + "\n"


def test_texts_of_a_locale_of_ascii_are_the_same_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python hands over the bytes of such a command line as lone surrogates."""
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    model_folder(tmp_path / "model")

    def score(text: str) -> str:
        main(["score", str(tmp_path / "model"), "--images", str(tmp_path / "a.png"), "--texts", text])
        return capsys.readouterr().out

    assert score("läuft".encode().decode("ascii", "surrogateescape")) == score("läuft")


class Narrow(Terminal):
    """A terminal of 80 columns."""

    columns = 80


@pytest.mark.parametrize("file", [io.StringIO, Narrow])
@pytest.mark.parametrize("paths", [1, 3])
def test_a_table_loses_no_letter(paths: int, file: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    """Words stay whole beside long texts where they fit, and always where the output is no terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    path, number, out = "p" * 50, "0.12345 +- 0.01", file()
    table = plain_table(*(str(n) for n in range(paths)), "number", "text")
    table.add_row(*[path] * paths, number, "q " * 100)
    Screen(80, file=out).print(table)
    printed = re.sub("\x1b\\[[0-9;]*m", "", out.getvalue())
    assert "\u2026" not in printed
    assert (printed.count("p"), printed.count("q")) == (50 * paths, 100)
    whole = paths == 1 or file is io.StringIO
    assert (path in printed) is whole
    assert "0.12345" in printed
    assert (max(map(len, printed.splitlines())) <= 80) is (paths == 1 or file is Narrow)


def test_lines_in_place_of_a_table_that_would_fold_words() -> None:
    for width, expected in ((80, "a"), (20, "0.5  a")):
        out, table = io.StringIO(), plain_table("", "")
        table.add_row("word " * 8, "x" * 20)
        Screen(width, file=out).print_table(table, [Text("0.5  a")])
        assert ("0.5  a" in out.getvalue()) is (expected != "a")


def test_shares_of_a_width() -> None:
    assert shares([3, 5], [10, 7], 30) == [10, 7]
    assert shares([3, 5], [10, 7], 12) == [6, 6]
    assert shares([3, 5], [10, 9], 6) == [3, 5]
