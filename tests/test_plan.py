"""`kiloword plan`: formulas against real steps, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kiloword.cli import main
from kiloword.planning.measure import CASES, Case, compare

FLOPS, ACTIVATIONS = 0.02, 0.15  # relative differences that are asked for

# Small ones of every method's own parts, each in about a second.
SMALL = (
    Case("siglip", "tiny", 8, pieces=2),
    Case("llip", "tiny", 8, checkpointing="whole"),
    Case("prolip", "tiny", 16, captions=2),
    Case("sycoca", "tiny", 4, captions=2),
)
MORE = (
    Case("clip", "tiny", 8, precision="bf16"),
    Case("coca", "tiny", 8, checkpointing="selective"),
    Case("fff", "tiny", 8, captions=3, pieces=2),
    Case("pcme++", "tiny", 8),
    Case("prolip-released", "tiny", 16),
    Case("vqa", "tiny", 8),
    Case("sycoca", "tiny", 8, captions=2, precision="bf16", checkpointing="whole"),
    Case("llip", "s16", 4),
    *(case for case in CASES if case not in SMALL),
)


def check(case: Case) -> None:
    for name, (planned, measured) in compare(case).items():
        allowed = {"flops": FLOPS, "activations": ACTIVATIONS}.get(name, 0.0)
        assert abs(planned - measured) <= allowed * measured, (case.label, name, planned, measured)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
def test_formulas_agree_with_a_real_step(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.label)
def test_formulas_agree_with_a_real_step_of(case: Case) -> None:
    check(case)


def plan(tmp_path: Path, *words: str) -> dict[str, object]:
    main(["plan", *words, "--json", str(tmp_path / "plan.json")])
    found: dict[str, object] = json.loads((tmp_path / "plan.json").read_text())
    return found
