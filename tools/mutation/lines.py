"""Which tests run which lines: the map that the recorder's files are folded into, one JSON file for each test file."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from operators import Mutant, first_line, units

HERE = Path(__file__).parent
MOST, SPECIFIC = 40, 12
Lines = tuple[str, dict[int, list[str]]]
"""A digest of a unit as it was recorded, and which tests ran which of its lines, counted from its first."""


def digest(data: str | bytes) -> str:
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=8).hexdigest()


def record(root: Path, folder: Path, test_file: Path) -> None:
    """Runs one test file under the recorder and keeps its map in `folder`, for as long as the file stays as it is."""
    raw = folder / "raw" / f"{test_file.stem}.{os.getpid()}"
    raw.mkdir(parents=True, exist_ok=True)
    settings = os.environ | {"MUTATE_RECORD": str(raw), "MUTATE_PACKAGE": str(root / "kiloword")}
    settings["PYTHONPATH"] = f"{HERE}:{root}"
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "recorder", "-p", "no:cacheprovider", "--timeout", "900"]
    with (raw / "log").open("w") as log:
        command = [sys.executable, *words, str(test_file)]
        subprocess.run(command, env=settings, stdout=log, stderr=log, cwd=root, check=False)
    fold(root, raw, test_file, folder / f"{test_file.stem}.json")


def fold(root: Path, raw: Path, test_file: Path, out: Path) -> None:
    """The recorder's files of one test file as a map of units of the package to lines to tests."""
    tests: dict[str, int] = {}
    seconds: dict[str, float] = {}
    failed: set[str] = set()
    found: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in raw.glob("*.tsv"):
        for row in file.read_text(errors="replace").splitlines():
            test, _, rest = row.partition("\t")
            name, _, rest = rest.partition("\t")
            if not test or not rest:
                continue
            if name == "seconds":
                seconds[test] = max(float(rest.split("\t")[0]), 0.01)
            elif name == "failed":
                failed.add(test)
            else:
                found[name][int(rest)].add(tests.setdefault(test, len(tests)))
    covered = {
        f"kiloword/{name}": _by_unit(root / "kiloword" / name, lines)
        for name, lines in found.items()
        if name.endswith(".py")
    }
    good = [[test, seconds[test]] if test in seconds and test not in failed else None for test in tests]
    out.write_text(json.dumps({"digest": digest(test_file.read_bytes()), "tests": good, "units": covered}))


def _by_unit(path: Path, lines: dict[int, set[int]]) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, unit in units(ast.parse(path.read_text())):
        first, last = first_line(unit), unit.end_lineno or 0
        inside = {line - first: sorted(lines[line]) for line in lines if first <= line <= last}
        if inside:
            out[name] = {"digest": digest(ast.dump(unit)), "lines": inside}
    return out


@dataclass
class Map:
    """Tests by their names: what each costs, how many units it runs, and by unit which lines which tests run."""

    seconds: dict[str, float] = field(default_factory=dict)
    width: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    units: dict[tuple[str, str], list[Lines]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, file: Path) -> None:
        read = json.loads(file.read_text())
        names = [test and test[0] for test in read["tests"]]
        self.seconds |= dict(filter(None, read["tests"]))
        for path, found in read["units"].items():
            for unit, entry in found.items():
                lines = {int(at): [names[t] for t in tests if names[t]] for at, tests in entry["lines"].items()}
                self.units[path, unit].append((entry["digest"], lines))
                for test in {test for tests in lines.values() for test in tests}:
                    self.width[test] += 1

    def tests(self, mutant: Mutant, source: str, most: int = MOST) -> list[str]:
        """The tests that run a mutant's line, fast ones first: the fastest, and those that run little else."""
        unit = dict(units(ast.parse(source)))[mutant.unit]
        low, high = (line - mutant.first for line in mutant.lines)
        exact, loose = set(), set()
        for known, lines in self.units.get((mutant.path, mutant.unit), []):
            same = known == digest(ast.dump(unit)) and mutant.kind != "default"
            for at, tests in lines.items():
                loose.update(tests)
                exact.update(tests if not same or low <= at <= high else ())
        names = exact or loose or self.mentioning(mutant.path)
        chosen = sorted(names, key=lambda test: self.seconds[test])[: most - SPECIFIC]
        chosen += sorted(names - set(chosen), key=lambda test: (self.width[test], self.seconds[test]))[:SPECIFIC]
        return sorted(chosen, key=lambda test: self.seconds[test])

    def mentioning(self, path: str) -> set[str]:
        """Tests of the files that name a module: for lines that run as it is imported, or in processes out of sight."""
        package, _, name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
        named = re.compile(rf"{re.escape(package)}\.{name}\b|from {re.escape(package)} import .*\b{name}\b")
        files = {file for file, text in self.texts.items() if named.search(text)}
        return {test for test in self.seconds if test.partition("::")[0] in files}


def load(root: Path, folder: Path, missing: list[Path] | None = None) -> Map:
    """The map of all main tests. Test files without an up-to-date map are put into `missing`, where it is given."""
    out = Map()
    for test_file in sorted((root / "tests").rglob("test_*.py")):
        file = folder / f"{test_file.stem}.json"
        out.texts[test_file.relative_to(root).as_posix()] = test_file.read_text()
        for part in sorted(folder.glob(f"{test_file.stem}.*json")):
            out.add(part)
        known = json.loads(file.read_text())["digest"] if file.exists() else ""
        if missing is not None and known != digest(test_file.read_bytes()):
            missing.append(test_file)
    return out
