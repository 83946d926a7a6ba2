"""Fuzzes the readers: `python fuzz/run.py [--inputs 50000] [--reader captions] [--plain]`; prints a table.

Guided by coverage where atheris is there (pip install atheris; wheels for Python 3.11), else by mutation of seeds.
Ends with 1 when there is a finding; its input is kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("tars", "images", "captions", "configs")
HERE = Path(__file__).parent


def fuzz(name: str, inputs: int, plain: bool, into: Path) -> dict[str, Any]:
    """Counts and findings of one reader, read in a process of its own on a disk in memory where there is one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        folder = Path(made)
        words = [sys.executable, str(HERE / "target.py"), name, str(inputs), made, *(["--plain"] if plain else [])]
        settings = {"KILOWORD_CACHE": f"{made}/cache", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with (into / f"{name}.log").open("w") as log:
            code = subprocess.run(words, env=os.environ | settings, stdout=log, stderr=log).returncode
        found = folder / "result.json"
        result: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {"inputs": 0, "findings": {}}
        if code:
            result["findings"][f"the process ended with {code}, see {into / name}.log"] = "last"
        for file in result["findings"].values():
            if (folder / file).exists():
                (into / f"{name}-{file}").write_bytes((folder / file).read_bytes())
        return result


def row(name: str, result: dict[str, Any]) -> str:
    numbers = (result.get(key, 0.0) for key in ("seconds", "slowest", "more_megabytes"))
    return f"| {name} | {result['inputs']:,} | {{:.0f}} | {{:.2f}} | {{:.0f}} | {len(result['findings'])} |".format(
        *numbers
    )


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--inputs", type=int, default=50_000, help="for each reader")
    ask.add_argument("--reader", choices=NAMES, action="append")
    ask.add_argument("--plain", action="store_true", help="mutate seeds even where atheris is there")
    ask.add_argument(
        "--into", type=Path, default=Path("fuzz-findings"), help="a folder for inputs of findings, and logs"
    )
    asked = ask.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    plain = asked.plain or importlib.util.find_spec("atheris") is None
    print("by mutation of seeds" if plain else "guided by coverage (atheris)", flush=True)
    print(
        "| reader | inputs | seconds | slowest input, CPU s | memory gained, MB | findings |\n|---|---|---|---|---|---|"
    )
    findings: dict[str, str] = {}
    for name in asked.reader or NAMES:
        result = fuzz(name, asked.inputs, plain, asked.into)
        print(row(name, result), flush=True)
        findings |= {f"{name}: {what}": file for what, file in result["findings"].items()}
    for what, file in findings.items():
        print(f"{what} ({file})")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
