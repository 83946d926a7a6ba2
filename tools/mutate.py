"""How many faults of ordinary kinds do the main tests notice? Mutants of the package, drawn with a seed.

    python tools/mutate.py --map                  first: which tests run which lines (twice the main tests' time)
    python tools/mutate.py --seed 1 --count 60    draws, runs, reports; goes on where it stopped
    python tools/mutate.py --seed 1 --recheck     runs the survivors again, after tests were written

A quarter of the mutants comes from each stratum, one mutant a function. A mutant's tests are those that run its line
(at most 40, or 60 s of processor time, fast ones first), until one fails; a test that fails without the mutant too does
not count. Linux, and the packages of the checks; nothing else is needed. No file of the checkout is written.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "mutation"))
import lines
import operators
import server

ROOT = Path(__file__).resolve().parents[1]
# The first stratum with a prefix of the module's path has it.
STRATA = {
    "data": ("data/",),
    "numerics": (
        "model/",
        "methods/",
        "losses/",
        "explain/",
        "training/muon",
        "distributed/gather",
        "distributed/device",
    ),
    "training": ("training/", "distributed/", "models/", "features/", "config/", "verify/"),
    "evaluation and command line": ("",),
}
Row = dict[str, Any]


def stratum(path: str) -> str:
    name = path.removeprefix("kiloword/")
    return next(stratum for stratum, prefixes in STRATA.items() if name.startswith(prefixes))


def draw(seed: int, count: int) -> list[Row]:
    """`count` mutants, the same number of each stratum: a function, then a kind, then a place, each equally likely."""
    functions: dict[str, list[tuple[str, str, Counter[str]]]] = defaultdict(list)
    for file in sorted((ROOT / "kiloword").rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        for unit_name, unit in operators.units(ast.parse(file.read_text())):
            if kinds := Counter(kind for kind, _, _ in operators.sites(unit)):
                functions[stratum(path)].append((path, unit_name, kinds))
    strata = list(STRATA)
    rows: list[tuple[int, Row]] = []
    for index, name in enumerate(strata):
        pick = random.Random(f"{seed} {name}")
        share = count // len(strata) + (index < count % len(strata))
        for place, (path, function, kinds) in enumerate(pick.sample(functions[name], share)):
            kind = pick.choice(sorted(kinds))
            about = {"stratum": name, "path": path, "unit": function, "kind": kind, "nth": pick.randrange(kinds[kind])}
            rows.append((place, about))
    return [row for _, row in sorted(rows, key=lambda numbered: numbered[0])]  # strata in turns


def key(row: Row) -> str:
    return "{path} {unit} {kind} {nth}".format(**row)


class Rows:
    """What came of each mutant, in a file that a stopped run goes on with."""

    def __init__(self, file: Path) -> None:
        self.file, self.rows = file, {}
        for line in file.read_text().splitlines() if file.exists() else []:
            row = json.loads(line)
            self.rows[key(row)] = row

    def add(self, row: Row) -> None:
        self.rows[key(row)] = row
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


class Clean:
    """Whether a test passes without a mutant, asked once a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, bool] = {}

    def passes(self, test: str) -> bool:
        if test not in self.known:
            job = server.start({}, ROOT, self.folder / "clean", [test], budget=300, limit=900)
            while (result := job.done()) is None:
                pass
            self.known[test] = result["outcome"] == "survived" and result["ran"] > 0
        return self.known[test]


def run(todo: list[Row], rows: Rows, known: lines.Map, folder: Path, options: argparse.Namespace) -> None:
    """Runs mutants, `jobs` at a time, and adds a row for each as it ends."""
    clean, waiting = Clean(folder), list(reversed(todo))
    running: list[server.Job] = []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            job = begin(waiting.pop(), known, folder, options)
            rows.add(job) if isinstance(job, dict) else running.append(job)
        for job in list(running):
            if (result := job.done()) is None:
                continue
            running.remove(job)
            failing = [test for test in job.row["tests"] if test.startswith(result["by"])][:1] if result["by"] else []
            if failing and not clean.passes(failing[0]):
                waiting.append(job.row | {"without": [*job.row.get("without", []), *failing]})
                continue
            rows.add(job.row | {"tests": job.row["tests"][:8]} | result)
            print(f"{len(rows.rows):4} {result['outcome']:9} {key(job.row)}  {result['by']}", flush=True)


def begin(row: Row, known: lines.Map, folder: Path, options: argparse.Namespace) -> server.Job | Row:
    """Starts a mutant's tests; a mutant whose line no test runs has survived already."""
    source = (ROOT / row["path"]).read_text()
    mutant = operators.mutant(row["path"], source, row["unit"], row["kind"], row["nth"])
    tests = [t for t in known.tests(mutant, source, options.tests) if t not in row.get("without", [])]
    row = row | {"diff": mutant.diff, "covering": len(tests), "tests": tests, "line": mutant.lines[0]}
    if not tests:
        return row | {"outcome": "survived", "ran": 0, "by": "", "why": "no test runs this line"}
    place = folder / "work" / lines.digest(key(row))
    return server.start(row, ROOT, place, tests, source=mutant.source, budget=options.budget, limit=20 * options.budget)


def interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    if not count:
        return 0.0, 1.0
    z, share = 1.96, hits / count
    middle, spread = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    return (middle - spread) / (1 + z * z / count), (middle + spread) / (1 + z * z / count)


def judged(file: Path) -> dict[str, str]:
    """Verdicts by hand, a line each: `same` or `cost`, a mutant's key, `#` and a reason."""
    listed = file.read_text().splitlines() if file.exists() else []
    entries = (line.partition("#")[0].split(maxsplit=1) for line in listed)
    return {rest.strip(): verdict for verdict, rest in entries}


def report(rows: list[Row], verdicts: dict[str, str]) -> Iterator[str]:
    def line(name: str, of: list[Row]) -> str:
        lost = [row for row in of if row["outcome"] == "survived"]
        changed = len(of) - sum(verdicts.get(key(row)) == "same" for row in lost)
        cost = sum(verdicts.get(key(row)) == "cost" for row in lost)
        caught = len(of) - len(lost)
        low, high = interval(caught, changed)
        late = sum(row["outcome"] == "timeout" for row in of)
        rate, behaviour = (caught / max(count, 1) for count in (changed, changed - cost))
        return (
            f"{name:28} {caught:3} of {changed:3} that change anything: {rate:4.0%} [{low:.0%}, {high:.0%}]; "
            f"{behaviour:4.0%} without cost alone; {late} by time; {len(of) - changed} change nothing"
        )

    for name in filter(None, STRATA):
        yield line(name, [row for row in rows if row["stratum"] == name])
    yield line("all", rows)
    for row in rows:
        if row["outcome"] == "survived":
            tests = "\n".join(f"    {test}" for test in row["tests"])
            head = f"{verdicts.get(key(row), 'survived')} {key(row)}  ({row['ran']} of {row['covering']} tests ran)"
            yield f"\n{head}\n{row['diff']}\n{tests}"


def main() -> int:
    options = arguments()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    missing: list[Path] = []
    known = lines.load(ROOT, folder, missing)
    if options.map:
        with ThreadPoolExecutor(options.jobs) as pool:
            for file, _ in zip(missing, pool.map(partial(lines.record, ROOT, folder), missing), strict=True):
                print(f"recorded {file.name}", flush=True)
        return 0
    if missing:
        print(f"no map yet, or an old one, of {len(missing)} test files: run --map", file=sys.stderr)
    rows = Rows(folder / f"seed{options.seed}.jsonl")
    drawn = draw(options.seed, options.count)
    if options.recheck:
        todo = [row for row in rows.rows.values() if row["outcome"] == "survived"]
    else:
        todo = [row for row in drawn if key(row) not in rows.rows]
    server.preload()
    began = time.monotonic()
    run(todo, rows, known, folder, options)
    print(f"{len(todo)} mutants in {time.monotonic() - began:,.0f} s")
    print("\n".join(report(list(rows.rows.values()), judged(folder / "judged.txt"))))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="mutants or test files at a time")
    parser.add_argument("--tests", type=int, default=lines.MOST, help="most tests of a mutant")
    parser.add_argument("--budget", type=float, default=60, help="seconds of processor time a mutant")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutate", help="map, rows and scratch files")
    parser.add_argument("--map", action="store_true", help="record the lines of new and changed test files, and end")
    parser.add_argument("--recheck", action="store_true", help="run the survivors again")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
