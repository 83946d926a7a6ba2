"""What is given away: an archive of all that is tracked, a wheel that works alone, and the lock files of `make`."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import kiloword

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MADE = ("PKG-INFO", "setup.cfg", "kiloword.egg-info")  # by setuptools
BUILD = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def python(*words: str, cwd: Path, **variables: str) -> str:
    env = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, text=True, capture_output=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


def tracked() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone")
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()
    return [name for name in found if (ROOT / name).is_file()]


def build(kind: str, source: Path, out: Path) -> Path:
    """An archive of a copy of the sources, which is left as it was."""
    copy = out / "copy"
    shutil.copytree(source, copy)
    python("-c", BUILD, f"build_{kind}", str(out), cwd=copy, SOURCE_DATE_EPOCH="1700000000")
    shutil.rmtree(copy)
    (path,) = out.iterdir()
    return path


def check_metadata(text: str) -> None:
    """What an index and `pip show` print: complete, with the README, and without addresses."""
    found = message_from_string(text)
    assert found["Version"] == kiloword.__version__
    assert (found["Author"], found["License-Expression"]) == ("kiloword developers", "Apache-2.0")
    assert found.get_all("License-File") == ["LICENSE"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(found.get_all("Provides-Extra", ())) == set(PROJECT["project"]["optional-dependencies"])
    assert found.get_all("Classifier") == PROJECT["project"]["classifiers"]
    assert not any(found.get_all(name) for name in ("Home-page", "Project-URL", "Author-email", "Download-URL"))


@pytest.mark.slow
def test_a_wheel_from_the_source_archive_works_alone(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="the build needs setuptools")
    names, clone = tracked(), tmp_path / "clone"
    for name in names:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    sdist = build("sdist", clone, tmp_path / "sdist")
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"kiloword-{kiloword.__version__}"
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert {name for name in files if not name.startswith(MADE)} == set(names) - {".gitignore"}

    wheels = [build("wheel", source, tmp_path / f"wheel-{source.name}") for source in (clone, unpacked)]
    assert len({hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}) == 1
    alone = tmp_path / "alone"
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(alone)
    assert {name for name in names if name.startswith("kiloword/")} == {
        path.relative_to(alone).as_posix() for path in (alone / "kiloword").rglob("*") if path.is_file()
    }
    assert (alone / "kiloword" / "py.typed").is_file()
    info = f"kiloword-{kiloword.__version__}.dist-info"
    assert (alone / info / "licenses" / "LICENSE").is_file()
    assert {path.name for path in alone.iterdir()} == {"kiloword", info}
    check_metadata((alone / info / "METADATA").read_text(encoding="utf-8"))
    assert kiloword.__version__ in python("-m", "kiloword", "--version", cwd=tmp_path, PYTHONPATH=str(alone))
    where = python("-c", "import kiloword; print(kiloword.__file__)", cwd=tmp_path, PYTHONPATH=str(alone))
    assert Path(where.strip()).is_relative_to(alone)


@pytest.mark.parametrize("name", ["CITATION.cff", "CHANGELOG.md"])
def test_versions_agree(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert f"version: {kiloword.__version__}\n" in text or f"\n## {kiloword.__version__}" in text


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
