"""The fit of a gain over 27 cells."""

from __future__ import annotations

from typing import Any

import pytest

from research.evidence import Decision, decided
from research.scale import ALL, CELLS, ONE, Slope, named


def runs(gain: Any) -> dict[str, list[dict[str, Any]]]:
    rows = {}
    for cell in CELLS:
        rows[named(ONE, cell)] = [{"metrics": {"top1": 0.1}}]
        rows[named(ALL, cell)] = [{"metrics": {"top1": 0.1 + gain(*cell)}}]
    return rows


def test_a_gain_that_grows_with_photos_is_told_from_one_that_does_not() -> None:
    """Widths 64, 128 and 192 are not equal steps of doublings; photos and steps are."""
    made = runs(lambda width, photos, steps: 0.02 + 0.01 * (photos - 1) - 0.005 * (steps - 1))
    decisions = [decided(Slope(term=term), made) for term in range(4)]
    assert all(isinstance(decision, Decision) for decision in decisions)
    values = [decision.effect.value for decision in decisions if isinstance(decision, Decision)]
    assert values == pytest.approx([0.02, 0.0, 0.01, -0.005], abs=1e-9)
    verdicts = [decision.verdict for decision in decisions if isinstance(decision, Decision)]
    assert [verdicts[0], *verdicts[2:]] == ["shown", "shown", "refuted"]


def test_a_missing_cell_leaves_it_open() -> None:
    made = runs(lambda *cell: 0.0)
    made.pop(named(ALL, CELLS[0]))
    assert str(decided(Slope(term=0), made)).endswith("not decided yet (53 of 54 runs are finished).")
