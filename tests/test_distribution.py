"""The files that are given away: a source archive of everything tracked, and from it a wheel that works alone."""

from __future__ import annotations

import hashlib
import os
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
    found, project = message_from_string(text), tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found["Version"] == kiloword.__version__
    assert (found["Author"], found["License-Expression"]) == ("kiloword developers", "Apache-2.0")
    assert found.get_all("License-File") == ["LICENSE"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(found.get_all("Provides-Extra", ())) == set(project["project"]["optional-dependencies"])
    assert found.get_all("Classifier") == project["project"]["classifiers"]
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
