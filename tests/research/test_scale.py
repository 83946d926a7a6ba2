"""The fit of a gain over 27 cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from research import arms_queue
from research.evidence import Decision, decided
from research.scale import ALL, CELLS, CLASSES, EXPERIMENT, ONE, ScaleOptions, Slope, arms, named, summary


def runs(gain: Any) -> dict[str, list[dict[str, Any]]]:
    rows = {}
    for cell in CELLS:
        rows[named(ONE, cell)] = [{"metrics": {"top1": 0.1}, "cpu_s": 10.0}]
        rows[named(ALL, cell)] = [{"metrics": {"top1": 0.1 + gain(*cell)}, "cpu_s": 10.0 + cell[0]}]
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
    made[named(ONE, CELLS[1])] = []  # an arm that has no run yet
    made.pop(named(ALL, CELLS[0]))
    assert str(decided(Slope(term=0), made)).endswith("not decided yet (52 of 54 runs are finished).")
    assert any(line.endswith("| 0 of 25 | 1.11 times |") for line in summary(made))
    assert summary({named(captions, cell): [] for cell in CELLS for captions in (ONE, ALL)})[-1] == ""


def test_the_control_sees_the_captions_of_classes_alone_and_is_compared_with_all(tmp_path: Path) -> None:
    controls = arms(ScaleOptions(out=tmp_path, data="photos", val="photos", control=True))
    assert [arm.name for arm in controls] == [named(CLASSES, cell) for cell in CELLS]
    assert {arm.recipe.data.sources for arm in controls} == {("tree:photos?levels=6&captions=1",)}
    made = runs(lambda *cell: 0.02)
    assert str(decided(Slope(term=0, over=CLASSES), made)).endswith("(27 of 54 runs are finished).")
    made |= {named(CLASSES, cell): [{"metrics": {"top1": 0.15}, "cpu_s": 10.0}] for cell in CELLS}
    decision = decided(Slope(term=0, over=CLASSES), made)
    assert str(decision).startswith("gain of all captions over captions of classes in the mean of the cells: 27 cells")
    assert isinstance(decision, Decision)
    assert decision.effect.value == pytest.approx(-0.03)


def test_the_summary_says_where_the_gain_is_and_what_it_costs() -> None:
    made = runs(lambda width, photos, steps: -0.01 if (width, photos, steps) == (0, 0, 0) else 0.02)
    lines = summary(made)
    assert "| all | 0.1000 | 0.1189 | +0.0189 | 19% | 26 of 27 | 1.10 times |" in lines
    assert "| 32 wide | 0.1000 | 0.1167 | +0.0167 | 17% | 8 of 9 | 1.00 times |" in lines
    assert "| 800 steps | 0.1000 | 0.1200 | +0.0200 | 20% | 9 of 9 | 1.10 times |" in lines
    del made[named(ALL, CELLS[0])]
    assert "| all | 0.1000 | 0.1200 | +0.0200 | 20% | 26 of 26 | 1.10 times |" in summary(made)


def test_a_cell_runs_its_own_seed_and_that_of_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is a script that writes down what it is told."""
    cell, python = named(ONE, (1, 1, 1)), tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/told\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    for seeds in ((0, 1, 2), (100,)):
        options = ScaleOptions(out=tmp_path, data="photos", val="photos", arms=(cell,), seeds=seeds)
        arms_queue.run_all(EXPERIMENT, options)
    told = (tmp_path / "told").read_text().splitlines()
    assert [told[n + 1] for n, word in enumerate(told) if word == "--only"] == [f"{cell}:0", f"{cell}:100"]
