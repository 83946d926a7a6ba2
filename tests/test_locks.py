"""The lock files of `make`: complete, hashed, and of the pins in constraints.txt. The files of the wheel."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def entries(lock: str) -> dict[str, tuple[str, str]]:
    """Normalised name to version and whole entry."""
    text = (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8")
    found = re.split(r"\n(?=[^\s#])", text.split("\n", 1)[1].strip())
    pins = [re.match(r"([\w.-]+)==([^\s;]+)", entry) for entry in found]
    return {normal(pin[1]): (pin[2], entry) for pin, entry in zip(pins, found, strict=True) if pin}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_locks_have_hashes_and_the_pins_of_the_constraints() -> None:
    for lock in ("core", "torch", "torch-cpu", "checks", "audit", "photos"):
        for name, (_, entry) in entries(lock).items():
            assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), name
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {normal(name): version for name, _, version in (s.partition("==") for s in lines if not s.startswith("#"))}
    locked = entries("torch") | entries("checks") | entries("core") | entries("photos")
    shared = pins.keys() & locked.keys()
    assert len(shared) > 60
    assert {n: locked[n][0] for n in shared} == {n: pins[n] for n in shared}, "constraints.txt has changed: make lock"
    assert entries("torch-cpu")["torch"][0] == f"{pins['torch']}+cpu"


def test_locks_hold_what_the_project_asks_for() -> None:
    project = PROJECT["project"]
    extras = ("dev", "openclip", "fast", "hf", "log", "photos")
    asked = sum((project["optional-dependencies"][name] for name in extras), project["dependencies"])
    locked = entries("core") | entries("torch") | entries("checks") | entries("photos")
    assert {normal(re.match(r"[\w.-]+", line)[0]) for line in asked} <= locked.keys()  # type: ignore[index]


def test_make_installs_nothing_without_a_hash() -> None:
    """Every installation by the Makefile names a lock file and checks hashes, but that of the project itself."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    assert re.search(r"^LOCKED := \$\(PIP\) --require-hashes ", text, re.M)
    calls = [line.strip() for line in text.splitlines() if re.match(r"\s*@?\S*(\$\(PIP\)|python -m pip install)", line)]
    assert [call for call in calls if "--require-hashes" not in call] == [
        "@$(PIP) --editable . --config-settings editable_mode=compat"
    ]
    assert len(calls) == 2


def test_the_page_lists_every_extra_and_messages_name_existing_ones() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = page.partition("| extra |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(extras)
    asked = re.findall(r"(?:\.|kiloword|\.whl)\[([\w,-]+)\]", page)
    assert asked
    assert {name for names in asked for name in names.split(",")} <= extras
    named = set[str]()
    for path in (ROOT / "kiloword").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        calls = (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "needs")
        named |= {str(n.args[2].value) for n in calls if len(n.args) > 2 and isinstance(n.args[2], ast.Constant)}
    assert {"openclip", "hf", "fast", "remote"} <= named <= extras


def test_the_wheel_holds_every_file_of_the_package() -> None:
    data, package = PROJECT["tool"]["setuptools"]["package-data"], ROOT / "kiloword"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    listed = {path for pattern in data["kiloword"] for path in package.glob(pattern)}
    assert {path for path in files if path.suffix != ".py"} == listed
