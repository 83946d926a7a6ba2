"""Kernels, casts and waits of the second step of presets on a pretended CUDA device (`tests/pretended.py`).

Copies of tensors between types under autocast are casts; what one call launches for many tensors is one kernel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.pretended import step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--size", default="b32")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--optim", default="muon")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches")
    args = parser.parse_args()
    print("| preset | passes | optimizer | casts | waits |\n|---|---|---|---|---|")
    for name in args.presets:
        made = step(name, args.precision, args.micro, args.optim, {}, args.size, steps=2)
        rest = sum(made.watch.kernels.values()) - made.passes
        print(
            f"| {name} | {made.passes} | {rest} | {made.watch.casts} | {sum(made.watch.waits.values())} |", flush=True
        )


if __name__ == "__main__":
    main()
