"""`tools/house.py`: values may only fall, and each rule breaks on a small package and holds on another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from commands import module_at

ROOT = Path(__file__).resolve().parents[2]
TREE = "```\nkiloword/\n  cli/   verbs\n  data/  sources\n  deep/\nresearch/\n```\n"
LONG = 'def _f():\n    """Two\n    lines."""\n'
DOCUMENTED = 'class A:\n    """It."""\n    def {}(self):\n        a = 1\n        b = 2\n        c = 3\n        d = 4\n'
Checked = Callable[[dict[str, str]], tuple[int, str]]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return module_at(ROOT / "tools" / "house.py", "house")


@pytest.fixture
def checked(house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Checked:
    """Exit code and output for a repository with these files of the package added (others by a path with `../`)."""
    values = dict.fromkeys(house.measure(ROOT, [], []), 10_000)
    record = {"values": values, "targets": {"test lines": 7}, "rooms": {"cli": 900}}

    def check(texts: dict[str, str]) -> tuple[int, str]:
        start = {"__init__.py": "", "../docs/architecture.md": TREE, "../tools/house.json": json.dumps(record)}
        for name, text in (({} if (tmp_path / "docs").exists() else start) | texts).items():
            path = tmp_path / "kiloword" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return house.main(tmp_path), capsys.readouterr().out

    return check


def stored(root: Path) -> dict[str, int]:
    values: dict[str, int] = json.loads((root / "tools" / "house.json").read_text())["values"]
    return values


def test_values_fall_and_never_rise(checked: Checked, tmp_path: Path) -> None:
    text = '"""Two\nlines."""\n\n# why\nx = f(1, "a")  # no token\n'
    files = {"cli/a.py": text, "data/b.py": text, "../tests/t.py": "\n" * 8}
    pages = {"../README.md": "three words here", "../research/log.md": "not counted"}
    assert checked(files | pages)[0] == 0
    expected = {"package lines": 10, "package code lines": 4, "package tokens": 18, "test lines": 8}
    words = len(TREE.split()) + 3
    assert stored(tmp_path) == expected | {"words for users": words, "upward imports": 0}
    code, printed = checked({"cli/a.py": text + "y = 1\n"})
    assert code == 1
    assert "package lines: 11, above 10" in printed
    assert stored(tmp_path)["package lines"] == 10
    assert checked({"cli/a.py": text, "../README.md": "two words"})[0] == 0
    assert stored(tmp_path)["words for users"] == words - 1
    assert checked({"../README.md": "three words again"})[0] == 1


@pytest.mark.parametrize(
    "statement",
    [
        "import kiloword.data.a",
        "from kiloword.data import a",
        "from kiloword.data.a import name",
        "from . import a",
        "from .a import name as other",
        "from ..data.a import name",
        "def f():\n    from kiloword.data.a import name",
        "class C:\n    def f(self):\n        if self:\n            import kiloword.data.a as m",
        "from importlib import import_module\nimport_module('kiloword.data.a')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import kiloword.data.a",
    ],
)
def test_circles_of_imports(checked: Checked, statement: str) -> None:
    files = {"data/__init__.py": "", "data/a.py": "import kiloword.data.c", "data/c.py": "from kiloword.data import b"}
    code, printed = checked(files | {"data/b.py": statement})
    assert code == 1
    assert "circle" in printed
    types_alone = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kiloword.data.a"
    assert "circle" not in checked({"data/b.py": types_alone})[1]


def test_upward_imports(checked: Checked, tmp_path: Path) -> None:
    files = {"cli/a.py": "import kiloword.data.b", "data/b.py": "import kiloword.ground", "ground.py": ""}
    assert checked(files | {"__init__.py": "from kiloword.cli import a"})[0] == 0
    code, printed = checked({"data/c.py": "def f():\n    from kiloword.cli.a import name"})
    assert code == 1
    assert "kiloword.data.c -> kiloword.cli.a" in printed
    assert stored(tmp_path)["upward imports"] == 0


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("x = 1\n" * 500, ""),
        ("x = 1\n" * 501, "501 lines"),
        (LONG + "    x = 1\n" * 79, ""),
        (LONG + "    x = 1\n" * 80, "_f has 81 lines"),
        ("class A:\n    x = 1\n", "A has no docstring"),
        ("def f():\n    a = 1\n    b = 2\n    return 3\n", ""),
        ("def f():\n    a = 1\n    b = 2\n    c = 3\n    return 4\n", "f has no docstring"),
        ("class _A:\n    def f(self):\n        a = 1\n        b = 2\n        c = 3\n        return 4\n", ""),
        (DOCUMENTED.format("forward"), ""),
        (DOCUMENTED.format("other"), "other has no docstring"),
    ],
)
def test_files_functions_docstrings(checked: Checked, text: str, broken: str) -> None:
    code, printed = checked({"cli/a.py": text})
    assert code == int(bool(broken))
    assert broken in printed


def test_docstrings_of_base_classes_count(checked: Checked) -> None:
    lines = "".join(f"        x{n} = 1\n" for n in range(4))
    base = f'class Base:\n    """It."""\n    def f(self):\n        """Do."""\n{lines}'
    for parent, expected in (("Base[int]", 0), ("Other", 1)):
        derived = f'class B({parent}):\n    """It."""\n    def f(self):\n{lines}'
        assert checked({"cli/a.py": base, "data/b.py": derived})[0] == expected
    assert checked({"cli/a.py": "y = = 2\n"})[0] == 2  # cannot be parsed


def test_this_repository(house: ModuleType, tmp_path: Path) -> None:
    files = [house.File(ROOT / "kiloword", path) for path in (ROOT / "kiloword").rglob("*.py")]
    rooms = {file.room for file in files} - {"ground"}
    assert rooms == set(house.order(ROOT)), "the tree in docs/architecture.md names every room"
    circles, upward = house.broken_imports(ROOT, files)
    assert circles == []
    assert len(upward) <= stored(ROOT)["upward imports"]


@pytest.mark.slow
def test_every_module_can_be_the_first_import() -> None:
    """A circle of imports shows only where a user's script enters it; each module is imported by a fork of its own."""
    script = """
import os, sys
import PIL.Image, numpy, rich.table, torch, tyro  # once, for all forks
for name in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        __import__(name)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print(name)
"""
    files = sorted((ROOT / "kiloword").rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    command = [sys.executable, "-c", script, *(name for name in names if not name.endswith("__main__"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout == "", done.stderr[-2000:]
