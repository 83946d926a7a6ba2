"""Whether another checkout trains the same: losses and final weights of seeded runs, compared bit by bit.

    python tools/same.py OTHER [METHOD ...] [--steps 5] [--precision fp64]

Each METHOD, with flags if it is quoted (default: all presets and some mixes), is trained by both checkouts on scenes.
OTHER is a folder, such as a `git worktree` of an earlier commit. Exit code 1 if any run differs. The environment must
have the packages of both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
QUESTIONS = "scenes:train?task=vqa"
METHODS = (
    *("cappa", "clip", "clip-c", "coca", "filip", "flair", "llip", "pcme++", "prolip", "prolip-released"),
    *("siglip", "slip", "sycoca", "vqa", "fff --settings.positives annotated", "siglip+many+bias-search"),
    *("llip+compose", "prolip+mixup", "siglip+exact+many", "siglip+matryoshka", "clip+negatives", "clip+gaussian"),
    *("siglip+superclass", "clip+self-distill", "flair+cutmix", "clip+clic", "sycoca+many"),
    *("clip+maxsim", "siglip+caption+simclr", "siglip+concepts", "llip+gaussian+inclusion"),
)


def train_all(methods: list[str], steps: str, precision: str, out: Path) -> None:
    """Train every method with the package on the path, in this process; a line of JSON each."""
    from safetensors.numpy import load_file

    from kiloword.cli.main import main

    for method in methods:
        name, *flags = method.split()
        data = QUESTIONS if name == "vqa" else "scenes"
        words = f"--device cpu --data {data} --size debug --steps {steps} --batch 16 --seed 1 --workers 0 --log-every 1"
        run = out / re.sub(r"\W+", "-", method)
        try:
            main(
                ["train", name, *flags, *words.split(), "--precision", precision, "--device", "cpu", "--out", str(run)]
            )
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            losses = [(row["loss"], row["gradient_norm"]) for row in rows]
            weights = {
                name: value.tobytes().hex() for name, value in load_file(run / "model/model.safetensors").items()
            }
        except SystemExit as refused:
            losses, weights = [("refused", refused.code)], {}
        (out / "result.jsonl").open("a").write(json.dumps([method, losses, weights]) + "\n")


def results(tree: Path, arguments: argparse.Namespace) -> dict[str, tuple[list[object], dict[str, str]]]:
    """{method: (losses and gradient norms of each step, {tensor: bytes})} of one checkout."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*arguments.methods, "--steps", arguments.steps, "--precision", arguments.precision, "--into", folder]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "KILOWORD_CACHE": folder}
        with (Path(folder) / "printed").open("w+") as printed:
            command = [sys.executable, __file__, str(tree), *words]
            if subprocess.run(command, env=environment, stdout=printed, stderr=printed).returncode:
                printed.seek(0)
                raise SystemExit(f"{tree}:\n{printed.read()[-2000:]}")
        lines = (Path(folder) / "result.jsonl").read_text().splitlines()
    return {method: (losses, weights) for method, losses, weights in map(json.loads, lines)}


def main() -> int:
    """Print a line a method; returns the number of methods that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--steps", default="5")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # the call for one checkout
    arguments = parser.parse_args()
    if arguments.into:
        train_all(arguments.methods, arguments.steps, arguments.precision, arguments.into)
        return 0
    before, after = results(arguments.other.resolve(), arguments), results(HERE, arguments)
    different = 0
    for method, (losses, weights) in before.items():
        same = (losses, weights) == after[method]
        different += not same
        last = f"loss {losses[-1][0]}" if weights else "refused by the other checkout"
        print(
            f"{'same     ' if same else 'DIFFERENT'}  {method:24} {len(losses)} steps  {len(weights)} tensors  {last}"
        )
    print(f"{len(before) - different} of {len(before)} the same")
    return different > 0


if __name__ == "__main__":
    raise SystemExit(main())
