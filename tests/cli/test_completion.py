"""`kiloword --install-completion`: the shells themselves complete verbs, tasks, methods, flags, choices and files."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from kiloword.__version__ import __version__
from kiloword.cli import completion
from kiloword.cli.main import CHOICES, OWN_FLAGS, app, main
from kiloword.cli.shells import SCRIPTS
from kiloword.evaluation import TASKS

LINES = [  # what is typed, and a completion that must be among those shown, and one that must not
    ("kiloword ", "classify", "--data"),
    ("kiloword --i", "--install-completion", "--version"),
    ("kiloword eval ", "retrieval", "siglip"),
    ("kiloword eval zeroshot m --temp", "--templates", "--shortlist"),
    ("kiloword eval suite ", "datacomp38", "siglip"),
    ("kiloword train ", "prolip", "retrieval"),
    ("kiloword train llip --settings.", "--settings.k", "--settings.drop"),
    ("kiloword train llip+compose --settings.", "--settings.k", "--settings.drop"),
    ("kiloword train clip --optim.n", "--optim.name", "--optim.lr"),
    ("kiloword sweep llip --va", "--vary", "--epochs"),
    ("kiloword embed m --precision ", "bf16", "auto"),
    ("kiloword train clip --size ", "tiny", "scenes"),
    ("kiloword score m --device ", "cuda", "--images"),
    ("kiloword data ", "pairs", "open_clip"),
]


@pytest.fixture(scope="module")
def table() -> completion.Table:
    return completion.table(OWN_FLAGS, app, CHOICES)


def ask(shell: list[str], script: str, line: str, folder: Path, keys: bytes) -> str:
    """What an interactive shell shows after a line that ends with the keys."""
    child, fd = pty.fork()
    if child == 0:
        os.chdir(folder)
        env = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb", "COLUMNS": "500", "LC_ALL": "C.UTF-8"}
        os.execvpe(shell[0], shell, env)
    shown = b""
    try:
        os.write(fd, f"{script}; echo READ''Y\n".encode())
        shown = _until(fd, b"READY\r\n")
        os.write(fd, line.encode() + keys)
        shown = _until(fd, None)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(fd)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", " ", shown.decode(errors="replace")).replace(line, "", 1)


def _until(fd: int, end: bytes | None) -> bytes:
    """Output up to `end`, or until nothing more comes."""
    shown, deadline = b"", time.monotonic() + 20
    while time.monotonic() < deadline:
        if select.select([fd], [], [], 0.5 if end is None else 5)[0]:
            shown += os.read(fd, 65536)
            if end is not None and end in shown:
                return shown
        elif shown:
            break
    return shown


def test_bash_itself(table: completion.Table, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(SCRIPTS["bash"](table, "1"))
    (tmp_path / "some photo.jpg").touch()
    (tmp_path / "some photos").touch()
    setup = (
        "bind 'set show-all-if-ambiguous on' 'set completion-query-items 0' 'set page-completions off'; source ./script"
    )
    shell = ["bash", "--norc", "--noprofile", "-i"]
    for line, there, absent in LINES[::3]:
        words = ask(shell, setup, line, tmp_path, b"\t\t").split()
        assert there in words or there in "".join([line.split()[-1], *words]), (line, words)
        assert absent not in words, line
    assert "photo" in ask(shell, setup, "kiloword score m --images so", tmp_path, b"\t\t")


def complete_in_bash(script: Path, line: str) -> list[str]:
    """What the function of the script answers for a line; "=" is a word of its own, as in bash."""
    words = [word for part in line.split(" ") for word in re.split("(=)", part) if word or part == ""]
    quoted = " ".join(f"'{word}'" for word in words)
    ending = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _kiloword; echo ${{COMPREPLY[@]}}"
    return subprocess.run(["bash", "--norc", "-c", ending], capture_output=True, text=True, check=True).stdout.split()


def test_the_function_of_bash(table: completion.Table, tmp_path: Path) -> None:
    (script := tmp_path / "script").write_text(SCRIPTS["bash"](table, "1"))
    for line, there, absent in LINES:
        words = complete_in_bash(script, line)
        assert there in words, line
        assert absent not in words, line
    assert complete_in_bash(script, "kiloword embed m --dtype=i") == ["int8"]
    assert complete_in_bash(script, "kiloword embed m --dtype=") == ["fp16", "fp32", "int8"]
    assert complete_in_bash(script, "kiloword train clip --data ") == []  # files


def test_flags_that_help_hides_are_hidden(table: completion.Table) -> None:
    assert [key for key, words in table.items() if completion.HIDDEN in words] == []


def test_every_verb_task_and_method_has_its_flags(table: completion.Table) -> None:
    for verb in app._subcommands:
        assert table[verb if verb != "eval" else "eval zeroshot"], verb
    for task in TASKS:
        assert {"--data", "--json", "--batch"} <= set(table[f"eval {task}"]), task
    for method in table["train :"]:
        assert not set(table["train"]) & set(table[f"train {method}"]), method
    assert "--settings.k" in table["sweep llip"]
    assert {"--vary", "--optim.lr", "--seeds"} <= set(table["sweep"])


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.slow
def test_other_shells_themselves(table: completion.Table, tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (script := tmp_path / "_kiloword").write_text(SCRIPTS[shell](table, "1"))
    (tmp_path / "photo.jpg").touch()
    for line, there, absent in [*LINES, ("kiloword score m --images ph", "photo.jpg", "--texts")]:
        if shell == "fish":
            asked = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
            words = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
        else:
            setup = "PS1='> '; fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D; LISTMAX=9999"
            words = ask(["zsh", "-f", "-i"], setup, line, tmp_path, b"\t\t").split()
        assert there in words or there in "".join([line.split()[-1], *words]), (line, words)
        assert absent not in words, line


def test_where_scripts_go(
    table: completion.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(completion, "table", lambda *args: table)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    places = {
        "bash": "data/bash-completion/completions/kiloword",
        "zsh": "data/kiloword/completions/_kiloword",
        "fish": "config/fish/completions/kiloword.fish",
    }
    for shell, place in places.items():
        main(["--install-completion", shell])
        assert str(tmp_path / place) in capsys.readouterr().out
        assert (
            f"# kiloword {__version__}: written by `kiloword --install-completion {shell}`"
            in (tmp_path / place).read_text()
        )
    for words, got in ((["zhs"], "zhs"), ([], "nothing"), (["bash", "zsh"], "bash zsh")):
        with pytest.raises(SystemExit) as end:
            main(["--install-completion", *words])
        assert end.value.code == 2
        assert f"--install-completion got {got}: expected bash, zsh, fish." in capsys.readouterr().err
