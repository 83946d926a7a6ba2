"""`kiloword plan` against real steps: FLOPs, bytes of weights, optimizer and activations, and a GPU's peak.

FLOPs as torch's FlopCounterMode counts them, activations as saved-tensor hooks see them (each storage once, those that
still wait when the forward pass is over), the rest by the tensors themselves. Asserts what the plan promises.

    python bench/plan.py
    python bench/plan.py --device cuda
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from plan_measure import CASES, Case, compare

ALLOWED = {"flops": 0.02, "activations": 0.06, "peak": 0.06}  # of what is measured; all others exact
GPU = (
    Case("siglip", "b32", 512, precision="bf16"),
    Case("siglip", "l14", 128, precision="bf16"),
    Case("siglip", "l14", 256, precision="bf16", checkpointing="selective"),
    Case("siglip", "l14", 512, precision="bf16", checkpointing="whole"),
    Case("siglip", "l14", 512, precision="bf16", micro_batches=4),
    Case("siglip", "h14", 64, precision="bf16"),
    Case("siglip", "h14", 256, precision="bf16", checkpointing="whole"),
    Case("llip", "b16", 128, precision="bf16"),
    Case("sycoca", "b16", 64, precision="bf16"),
)


def row(case: Case, name: str, plan: float, real: float) -> dict[str, Any]:
    """One comparison, printed."""
    difference = plan / real - 1
    within = abs(difference) <= ALLOWED.get(name, 0.0)
    unit, power = ("GFLOP", 1e9) if name == "flops" else ("MiB", 2.0**20)
    figures = f"{plan / power:12.3f} {real / power:12.3f} {unit:5} {100 * difference:+7.3f}%"
    print(f"{case.label:50} {name:12} {figures}{'' if within else '  more than allowed'}", flush=True)
    return {"case": case.label, "of": name, "planned": plan, "measured": real, "within": within}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose label has one of these words; all without")
    args = parser.parse_args()
    cases = CASES if args.device == "cpu" else GPU
    cases = tuple(c for c in cases if not args.only or any(word in c.label for word in args.only))
    rows = []
    for case in cases:
        for name, (plan, real) in compare(case, args.device).items():
            rows.append(row(case, name, plan, real))
        if args.device == "cuda":
            torch.cuda.empty_cache()
    within = all(r["within"] for r in rows)
    print(json.dumps({"device": args.device, "torch": torch.__version__, "within": within, "rows": rows}))
    if not within:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
