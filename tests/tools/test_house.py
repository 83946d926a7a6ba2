"""`tools/house.py`: each measure of the package's layout breaks on a small package and holds on another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modules import module_at

ROOT = Path(__file__).resolve().parents[2]
Measured = Callable[[dict[str, str]], dict[str, Any]]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return module_at(ROOT / "tools" / "house.py", "house")


def write(root: Path, texts: dict[str, str]) -> None:
    """Files of the package by their path below it; pages of the repository by a path with `../`."""
    for name, text in {"__init__.py": "", **texts}.items():
        path = root / "kiloword" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def measured(house: ModuleType, tmp_path: Path) -> Measured:
    """All measures, by name, of a package with the files given."""

    def measure(texts: dict[str, str]) -> dict[str, Any]:
        write(tmp_path, texts)
        return {one.name: one for one in house.measure(tmp_path)}

    return measure


def offenders(measure: Any) -> list[tuple[str, int]]:
    return [(one.name, one.figure) for one in measure.offenders]


@pytest.mark.parametrize(("modules", "broken"), [(7, False), (8, True)])
def test_root_files(measured: Measured, modules: int, broken: bool) -> None:
    texts = {f"m{i}.py": "" for i in range(modules)} | {"py.typed": "", "data/more.py": ""}
    measure = measured(texts)["root files"]
    assert (measure.value, measure.broken) == (modules + 1, broken)


@pytest.mark.parametrize(("modules", "broken"), [(19, False), (20, True)])
def test_folder_files(measured: Measured, modules: int, broken: bool) -> None:
    texts = {f"data/m{i}.py": "" for i in range(modules)} | {"data/__init__.py": "", "data/remote/more.py": ""}
    root = {f"m{i}.py": "" for i in range(25)}
    measure = measured(texts | root | {"data/words.txt": ""})["folder files"]
    assert (measure.value, measure.broken) == (modules + 1, broken)
    assert offenders(measure) == [("kiloword/data", 21)] * broken


def test_file_lengths(measured: Measured) -> None:
    lengths = {"__init__.py": 1, "__main__.py": 1, "a.py": 59, "b.py": 60, "c.py": 400, "d.py": 401}
    measures = measured({name: "x = 1\n" * lines for name, lines in lengths.items()})
    assert offenders(measures["files below 60 lines"]) == [("kiloword/a.py", 59)]
    assert offenders(measures["files above 400 lines"]) == [("kiloword/d.py", 401)]
    assert measures["package lines"].value == sum(lengths.values())


def test_room_lines(measured: Measured) -> None:
    text = '"""Says\n\nall."""\n\nimport a\n\n\n# why\nx = 1\n'
    rooms = measured({"a.py": text, "data/b.py": text, "data/tars/deep/c.py": text, "data/tars/d.py": text})[
        "room lines"
    ]
    assert (rooms.limit, rooms.value) == (None, 18)
    assert offenders(rooms) == [("kiloword/data/tars", 18), ("kiloword", 9), ("kiloword/data", 9)]
    assert rooms.offenders[0].detail == "6 code, 6 docstrings, 6 blank"


def test_file_lengths_hold(measured: Measured) -> None:
    measures = measured({"b.py": "x = 1\n" * 60, "c.py": "x = 1\n" * 400})
    names = "files below 60 lines", "files above 400 lines", "package lines"
    assert not any(measures[name].broken for name in names)


@pytest.mark.parametrize(("lines", "broken"), [(33_000, False), (33_001, True)])
def test_package_lines(
    house: ModuleType, measured: Measured, monkeypatch: pytest.MonkeyPatch, lines: int, broken: bool
) -> None:
    monkeypatch.setitem(house.EXCEPTIONS, "package lines", {})
    assert measured({"a.py": "\n" * lines})["package lines"].broken is broken


@pytest.mark.parametrize(
    "statement",
    [
        "import kiloword.a",
        "from kiloword import a",
        "from kiloword.a import name",
        "from . import a",
        "from .a import name as other",
        "def f():\n    from kiloword.a import name",
        "class C:\n    def f(self):\n        if self:\n            import kiloword.a as m",
        "from importlib import import_module\nimport_module('kiloword.a')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import kiloword.a",
    ],
)
def test_import_cycles(measured: Measured, statement: str) -> None:
    measure = measured({"a.py": "import kiloword.c", "c.py": "from kiloword import b", "b.py": statement})
    cycle = measure["import cycles"]
    assert cycle.broken
    assert offenders(cycle) == [("kiloword.a, kiloword.b, kiloword.c", 3)]


@pytest.mark.parametrize(
    "statement",
    [
        "",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kiloword.a import name",
        "import typing\nif typing.TYPE_CHECKING:\n    from kiloword.a import name",
        "from kiloword import VERSION",  # its own parent's __init__ imports nothing
        "TABLE = {'a': 'kiloword.a'}",
        "import other.a",
    ],
)
def test_no_import_cycle(measured: Measured, statement: str) -> None:
    measure = measured({"__init__.py": "VERSION = 1", "a.py": "from kiloword.b import name", "b.py": statement})
    assert not measure["import cycles"].broken


def test_imports_of_a_package(measured: Measured) -> None:
    texts = {
        "data/__init__.py": "from .a import x",
        "data/a.py": "from ..c import y",
        "c.py": "from kiloword.data import x",
    }
    assert offenders(measured(texts)["import cycles"]) == [("kiloword.c, kiloword.data, kiloword.data.a", 3)]


def test_room_cycles(measured: Measured) -> None:
    texts = {"data/a.py": "import kiloword.model.a", "model/b.py": "import kiloword.data.b\nimport kiloword.data.a"}
    measure = measured(texts | {"data/b.py": "", "model/a.py": "from kiloword.data import b"})
    assert not measure["import cycles"].broken
    rooms = measure["room cycles"]
    assert (rooms.value, rooms.broken) == (1, False)
    assert offenders(rooms) == [("data, model", 2), ("model -> data", 3), ("data -> model", 1)]


def test_no_room_cycle(measured: Measured) -> None:
    texts = {"data/a.py": "import kiloword.model.a", "data/b.py": "import kiloword.data.a", "model/a.py": ""}
    assert measured(texts)["room cycles"].value == 0


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (60, ""),
        (10, "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kiloword.a as a"),
    ],
)
def test_modules_with_one_importer(measured: Measured, lines: int, text: str) -> None:
    texts = {"a.py": "\n" * lines, "b.py": text or "def f():\n    from kiloword import a", "c.py": "import kiloword.b"}
    measure = measured(texts | {"d.py": "import kiloword.b"})["modules with one importer"]
    assert offenders(measure) == [("kiloword/a.py", lines)]


def test_no_module_with_one_importer(measured: Measured) -> None:
    long, shared, allowed = "\n" * 61, "", ""
    texts = {"a.py": long, "b.py": shared, "cli/eval.py": allowed, "evaluation/vqa/task.py": allowed}
    user = "import kiloword.a\nimport kiloword.b\nimport kiloword.cli.eval\nimport kiloword.evaluation.vqa.task"
    other = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import kiloword.b"
    assert not measured(texts | {"u.py": user, "v.py": other})["modules with one importer"].broken


def function(lines: int, name: str = "f", docstring: str = "") -> str:
    return f"@cache\ndef {name}():\n{docstring}" + "    x = 1\n" * (lines - 1)


def test_function_lines(measured: Measured) -> None:
    of = {"short": 10, "middle": 11, "long": 20, "longer": 21, "longest": 61}
    texts = [function(of["short"], f"s{i}") for i in range(3)] + [function(of["middle"], f"m{i}") for i in range(4)]
    measures = measured({"a.py": "\n".join([*texts, function(20, "long"), function(21, "longer"), function(61, "g")])})
    figures = [measures[f"function lines, {name}"] for name in ("median", "p90", "longest")]
    assert [(one.value, one.broken) for one in figures] == [(11, True), (21, True), (61, True)]
    assert offenders(figures[2]) == [("kiloword/a.py:g", 61)]


def test_function_lines_hold(measured: Measured) -> None:
    nested = "class C:\n    async def f(self):\n        def g():\n            return 1\n\n        return g\n"
    texts = [function(60, docstring='    """One.\n\n    Two.\n    """\n'), *(function(20, f"f{i}") for i in range(6))]
    measures = measured({"a.py": "\n".join([*texts, *(nested,) * 6])})
    figures = [measures[f"function lines, {name}"] for name in ("median", "p90", "longest")]
    assert [(one.value, one.broken) for one in figures] == [(5, False), (20, False), (60, False)]


def test_missing_docstrings(measured: Measured) -> None:
    four = "a = 1; b = 2; c = 3; return a"
    code = f"def f(): {four}\nclass C:\n    def m(self): {four}\n"
    measure = measured({"a.py": code, "data/__init__.py": f"async def g(): {four}\n"})["missing docstrings"]
    assert sorted(offenders(measure)) == [
        ("kiloword/a.py:C", 5),
        ("kiloword/a.py:C.m", 4),
        ("kiloword/a.py:f", 4),
        ("kiloword/data/__init__.py:g", 4),
    ]


def test_docstrings_of_base_classes_count(measured: Measured) -> None:
    four = "a = 1; b = 2; c = 3; return a"
    base = f'class A:\n    """A."""\n    def m(self):\n        """M."""\n    def forward(self): {four}\n'
    code = f'import abc\nclass B(A[int]):\n    """B."""\n    def m(self): {four}\n    def n(self): {four}\n'
    more = f"class C(abc.ABC):\n    def m(self): {four}\n    def forward(self): {four}\n"
    measure = measured({"a.py": base, "b.py": code + more})["missing docstrings"]
    names = sorted(name for name, _ in offenders(measure))
    assert names == ["kiloword/b.py:B.n", "kiloword/b.py:C", "kiloword/b.py:C.forward", "kiloword/b.py:C.m"]


def test_no_missing_docstring(measured: Measured) -> None:
    four, three = "a = 1; b = 2; c = 3; return a", "a = 1; b = 2; return a"
    public = f'def f():\n    "Says."\n    def inner(): {four}\n    return inner\nclass C:\n    "Says."\n    x = 1\n'
    small = f"    def m(self): {three}\n    def __call__(self): {four}\n"
    private = f"class _C:\n    def m(self): {four}\ndef _f(): {four}\n"
    texts = {"a.py": public + small + private, "_b.py": f"def f(): {four}\n", "_data/a.py": f"def f(): {four}\n"}
    assert not measured(texts)["missing docstrings"].broken


def test_class_names_defined_twice(measured: Measured) -> None:
    texts = {
        "a.py": "class Batch: pass",
        "b.py": "class Batch: pass\nclass Rows: pass",
        "data/c.py": "class Batch: pass",
    }
    measure = measured(texts | {"d.py": "class Rows: pass"})["class names defined twice"]
    assert offenders(measure) == [("Batch", 3), ("Rows", 2)]
    assert measure.offenders[0].detail == "kiloword.a, kiloword.b, kiloword.data.c"


def test_no_class_name_defined_twice(measured: Measured) -> None:
    texts = {"a.py": "class Batch: pass", "b.py": "class Rows:\n    class Batch: pass\ndef f():\n    class Batch: pass"}
    once = "try:\n    import a\nexcept ImportError:\n    pass\nclass Twice: pass\nclass Twice: pass"
    assert not measured(texts | {"c.py": once})["class names defined twice"].broken


def test_old_words(measured: Measured) -> None:
    code = '''"""A Picture and so
many others."""
# it leaves them
# away
class SideTable: ...
def picture_rows(found, *, own=1):
    self.said, [told, x] = "so " f"many\\npictures"
    for piece in some: ...
'''
    parts = measured({"a.py": code, "../README.md": "Two `pictures`.", "../docs/x/y.md": "no\nnumber, to blame"})
    once = (
        "leave out",
        "side table",
        "no number",
        "blame",
        *(f"variable {x}" for x in ("found", "own", "said", "told")),
    )
    assert {name: n for name, n in parts["old words"].parts.items() if n} == {
        "picture": 4,
        "so many": 2,
        **dict.fromkeys(once, 1),
        "variable piece": 1,
    }
    assert ("picture in kiloword/a.py", 3) in offenders(parts["old words"])
    assert ("blame in docs/x/y.md", 1) in offenders(parts["old words"])


def test_no_old_word(measured: Measured) -> None:
    code = '''"""The image's depicture was found; some of its own pieces are so, many said."""
def f(founded): return g(found=some.own)
'''
    assert not measured({"a.py": code, "../README.md": "A number of images."})["old words"].broken


def commit(root: Path, *messages: str) -> None:
    name = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    words = [part for message in messages for part in ("-m", message)]
    subprocess.run(["git", "-C", str(root), *name, "commit", "-q", "--allow-empty", *words], check=True)


def test_commits(measured: Measured, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit(tmp_path, "x" * 72, "Because.\n\nAnd so on.")
    assert measured({})["commits to reword, %"].value == 0
    commit(tmp_path, "x" * 73, "Because.")
    commit(tmp_path, "No body")
    measure = measured({})["commits to reword, %"]
    assert (measure.value, measure.broken) == (67, False)
    assert [(one.figure, one.detail) for one in measure.offenders] == [(73, "characters"), (7, "characters, no body")]


def test_exceptions(house: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"b.py": "\n" * 60})
    assert house.main([], tmp_path) == 0
    write(tmp_path, {"a.py": "\n" * 59})
    assert house.main([], tmp_path) == 1
    monkeypatch.setitem(house.EXCEPTIONS, "files below 60 lines", {"kiloword/a.py": "a list alone"})
    assert house.main([], tmp_path) == 0
    write(tmp_path, {"c.py": "\n" * 59})
    assert house.main([], tmp_path) == 1


def test_output(
    house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {f"data/m{i}.py": "\n" * i for i in range(1, 8)})
    monkeypatch.setitem(house.EXCEPTIONS, "files below 60 lines", dict.fromkeys(("kiloword/data/m1.py", "gone"), "why"))
    house.main([], tmp_path)
    brief = capsys.readouterr().out
    assert "kiloword/data/m2.py: 2" in brief
    assert "and 1 more" in brief
    assert "BROKEN (1 excepted)" in brief
    assert "no longer needed in EXCEPTIONS: gone" in brief
    assert "m1.py" not in brief
    assert "m7.py" not in brief
    house.main(["--all"], tmp_path)
    assert "kiloword/data/m7.py: 7" in capsys.readouterr().out
    assert house.main(["--json"], tmp_path) == 1
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    short = listed["files below 60 lines"]
    assert (short["limit"], short["value"], short["broken"], len(short["offenders"])) == (0, 7, True, 7)


def test_a_file_that_cannot_be_parsed(house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"a.py": "x = 1\ny = = 2\n"})
    with pytest.raises(SystemExit) as stopped:
        house.main([], tmp_path)
    assert stopped.value.code == 2
    assert "a.py, line 2" in capsys.readouterr().err


def test_rooms_import_downward_but_where_the_architecture_page_says_so(house: ModuleType) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page.split("```")[1].split("\nresearch/")[0]
    order = {"__main__": -1} | {room: n for n, room in enumerate(re.findall(r"^  (\w+)", tree, re.MULTILINE))}
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", page.split("## What may import what")[1], re.MULTILINE)
    excepted = {(a, b) for cells in rows for a in room_names(cells[0]) for b in room_names(cells[1])}
    files = [house.File(ROOT / "kiloword", path) for path in (ROOT / "kiloword").rglob("*.py")]
    modules = {file.module for file in files}
    imports = {
        (file.module, target) for file in files for target, types_only in file.imports(modules) if not types_only
    }
    rooms = {(a.split(".")[1], b.split(".")[1]) for a, b in imports if "." in a and "." in b}
    assert len(rooms) > 100
    upward = {(a, b) for a, b in rooms if order.get(a, 99) > order.get(b, 99)}
    assert upward <= excepted


def room_names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


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
