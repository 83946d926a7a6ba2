"""What each way to install kiloword gives: whether it works outside the repository, megabytes and processor seconds.

Clones the committed files, builds the source archive and from that the wheel, as pip does, and installs into new
environments: the wheel alone, the wheel with one extra after the other, the unpacked source archive with `dev` (whose
tests it runs some of), and the clone. An environment with an extra begins as a copy (hard links, the same path) of the
one with the wheel alone, where what the extra opens must be refused with the command that installs it; in it the doctor
must find the extra, and what the extra opens must run. The other three import, train and score. All work in a folder
that holds nothing of the repository. Prints a table for research/bench.md; asks pip's index, and nothing else of the
network.

    python bench/installs.py [--python python3.12] [--torch WORDS] [--only core onnx] [--scratch DIR]

`--torch` is what pip installs first, such as "torch --index-url https://download.pytorch.org/whl/cpu"; by default the
CPU build of requirements/torch-cpu.lock. Exit code 1 where something does not work.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from installed_uses import SILENT, USES, prepared

ROOT = Path(__file__).resolve().parents[1]
TRAIN = '-m kiloword train siglip --data "scenes?n=64" --size debug --vocab 300 --batch 8 --steps 2 --out siglip'
BASIC = (  # words of python, in a folder with what `prepared` makes
    '-c "import kiloword, sys; assert kiloword.__file__.startswith(sys.prefix), kiloword.__file__"',
    "-m kiloword --help",
    TRAIN,
    '-m kiloword score siglip/model --images photos/0.jpg --texts "a red circle" "two blue stars"',
)
SMOKE = "-m pytest -n 0 tests/losses tests/test_files.py tests/test_api.py"  # in the source archive


@dataclass
class Row:
    """One way of installing: processor seconds of pip, MB in all and of torch, what it replaced, and what failed."""

    name: str
    seconds: float
    size: float = 0.0
    torch: float = 0.0
    moved: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Place:
    """The scratch folder: `env` is the environment of the moment, `core` the one with the wheel alone."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python = folder, python
        self.env, self.core, self.work = folder / "env", folder / "core", folder / "work"
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.variables = {k: v for k, v in os.environ.items() if k not in hidden} | {
            "PYTHONNOUSERSITE": "1",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PATH": f"{self.env / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder / "home"),
        }

    def run(self, words: str | Sequence[str], cwd: Path | None = None, limit: float = 900) -> str:
        """What `python WORDS` of the environment printed. Raises: RuntimeError with its last lines."""
        listed = shlex.split(words) if isinstance(words, str) else list(words)
        command = [str(self.env / "bin" / "python"), *listed]
        options = {"env": self.variables, "text": True, "capture_output": True, "timeout": limit}
        done = subprocess.run(command, cwd=cwd or self.work, check=False, **options)  # type: ignore[call-overload]
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip() or "nothing printed").splitlines()
            raise RuntimeError(f"python {shlex.join(listed)[:100]}: {' '.join(lines[-3:])[-400:]}")
        return str(done.stdout)

    def fresh(self) -> None:
        """An empty environment."""
        shutil.rmtree(self.env, ignore_errors=True)
        subprocess.run([self.python, "-m", "venv", str(self.env)], check=True)

    def copied(self) -> None:
        """The environment with the wheel alone: hard links, since pip replaces files and never writes into one."""
        shutil.rmtree(self.env, ignore_errors=True)
        shutil.copytree(self.core, self.env, symlinks=True, copy_function=os.link)

    def install(self, *words: str, cwd: Path | None = None) -> float:
        """Processor seconds of `pip install WORDS`, the index and the disk not counted."""
        begun = used()
        self.run(["-m", "pip", "install", "--quiet", *words], cwd=cwd, limit=1800)
        return used() - begun

    def sizes(self) -> tuple[float, float]:
        """MB on disk of the environment, and those of torch with the libraries of its CUDA build."""
        return megabytes(self.env), sum(
            megabytes(path)
            for path in self.env.glob("lib/python*/site-packages/*")  # lib64 is a link to lib
            if re.match(r"(torch|nvidia|triton|functorch|torchgen)\b", path.name)
        )

    def versions(self) -> dict[str, str]:
        lines = self.run("-m pip freeze --all").splitlines()
        return dict(line.split("==", 1) for line in lines if "==" in line)


def used() -> float:
    """Processor seconds of all ended processes that this one started, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def megabytes(path: Path) -> float:
    """Of the blocks of all files, each inode once, links not followed."""
    files = {s.st_ino: s.st_blocks for p in (path, *path.rglob("*")) for s in (p.lstat(),)}
    return sum(files.values()) * 512 / 1e6


def check(place: Place, row: Row, commands: Sequence[str], cwd: Path | None = None) -> str:
    """Run each, keep what fails. Returns: what the last one printed."""
    out = ""
    for words in commands:
        try:
            out = place.run(words, cwd)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            row.failures.append(str(error))
    return out


def check_refusals(place: Place, row: Row) -> None:
    """Without any extra, what each opens must stop with the command that installs it."""
    for extra, uses in USES.items():
        try:
            place.run(uses[0])
            told = ""
        except RuntimeError as error:
            told = str(error)
        if f"pip install 'kiloword[{extra}]'" not in told and extra not in SILENT:
            row.failures.append(f"without {extra}: {told or 'no message'}")


def built(place: Place, clone: Path) -> tuple[Path, Path]:
    """The wheel, made from the source archive by pip's isolated build, and the unpacked archive."""
    place.run(["-m", "pip", "install", "--quiet", "setuptools>=77"])
    out = place.folder / "dist"
    place.run(["-c", f"import setuptools.build_meta as b; b.build_sdist({str(out)!r})"], cwd=clone)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        tar.extractall(place.folder, filter="data")
    place.run(["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(sdist)])
    (wheel,) = out.glob("*.whl")
    return wheel, place.folder / sdist.name.removesuffix(".tar.gz")


def measured(place: Place, row: Row, uses: Sequence[str], before: dict[str, str]) -> Row:
    """Sizes, packages of `before` that another version replaced, what the doctor says of an extra, and the commands."""
    row.size, row.torch = place.sizes()
    now = place.versions()
    row.moved = [f"{n} {v} became {now.get(n, 'nothing')}" for n, v in before.items() if now.get(n) != v]
    shutil.rmtree(place.work / "siglip", ignore_errors=True)
    lines = [line for line in check(place, row, ["-m kiloword doctor"]).splitlines() if f"extra {row.name} " in line]
    if lines and "pip install" in lines[0]:
        row.failures.append(f"doctor: {lines[0].strip()}")
    check(place, row, uses)
    return row


def rows(place: Place, clone: Path, torch: str, only: Sequence[str]) -> list[Row]:
    """One a way, in the order of the table."""

    def wanted(name: str) -> bool:
        return not only or name in only

    place.fresh()
    wheel, unpacked = built(place, clone)
    place.fresh()
    core = Row("core", place.install(*shlex.split(torch)) + place.install(str(wheel)))
    prepared(place.run)
    before = place.versions()
    out = []
    if wanted("core"):
        measured(place, core, BASIC, before)
        check_refusals(place, core)
        out.append(shown(core))
    place.env.rename(place.core)
    project = tomllib.loads((clone / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in filter(wanted, project["optional-dependencies"]):
        place.copied()
        if extra == "dev":
            row = Row("dev", place.install(f"{unpacked}[dev]"))
            check(place, row, [SMOKE], cwd=unpacked)
        else:
            row = Row(extra, place.install(f"{wheel}[{extra}]"))
        out.append(shown(measured(place, row, USES.get(extra, BASIC), before)))
    if wanted("clone"):
        place.fresh()
        row = Row("clone", place.install(*shlex.split(torch)) + place.install(".", cwd=clone))
        out.append(shown(measured(place, row, BASIC, {})))
    return out


def shown(row: Row) -> Row:
    print(f"{row.name}: {row.seconds:.0f} s, {row.size:.0f} MB", *row.moved, *row.failures, sep="\n  ", flush=True)
    return row


def table(lines: Sequence[Row], first: float) -> str:
    """Markdown. Args: first: MB of the environment with the wheel alone."""
    head = "| installed | MB with torch | without | more than the core | processor seconds | works |\n"
    return f"{head}|---|---|---|---|---|---|\n" + "\n".join(
        f"| {r.name} | {r.size:,.0f} | {r.size - r.torch:,.0f} | {r.size - first:,.0f} | {r.seconds:.0f} | "
        f"{'; '.join(r.failures) or 'yes'} |"
        for r in lines
    )


def main() -> None:
    pin = re.search(r"^torch==\S+", (ROOT / "requirements" / "torch-cpu.lock").read_text(encoding="utf-8"), re.M)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    parser.add_argument("--torch", default=pin[0] if pin else "torch", help="what pip installs first")
    parser.add_argument("--only", nargs="+", default=[], help="core, clone or extras; default: all")
    parser.add_argument("--scratch", type=Path, help="folder for the environments, which are removed at the end")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="kiloword-installs-") as folder:
        place = Place(Path(folder), args.python)
        for part in (place.work, place.folder / "home"):
            part.mkdir()
        clone = place.folder / "clone"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
        done = rows(place, clone, args.torch, args.only)
        print(table(done, megabytes(place.core)))
    sys.exit(any(row.failures for row in done))


if __name__ == "__main__":
    main()
