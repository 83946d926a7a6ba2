"""What a row is of: its recipe and what it was judged on; rows of other losses, and rows that cannot be checked."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kiloword.config.recipes import Recipe
from research import arms_queue, arms_rows as rows
from research.arms import TUNING, Arm, Experiment, Options
from research.arms_table import table
from research.classes import ClassOptions
from research.evidence import Claim, Runs

ARM = Arm(name="plain", recipe=Recipe(method="siglip"), judge=lambda matcher: {"top1": 0.5})
EXPERIMENT = Experiment(
    module="stub", title="A stub", options=ClassOptions, arms=lambda _: [ARM], columns={"top-1": "top1"}
)


def row(top1: float, seed: int = 0, **more: Any) -> rows.Row:
    row: rows.Row = {"arm": "plain", "seed": seed, "recipe": rows.recipe_hash(ARM.recipe), "steps": 1, "images": 2}
    return row | {"commit": "0123456789", "dirty": False, "cpu_s": 1.0, "metrics": {"top1": top1}} | more


def options(out: Path, val: str = "/here/tiny/dev", level: int = 6, seeds: tuple[int, ...] = (0,)) -> ClassOptions:
    return ClassOptions(out=out, data="tiny/train", val=val, level=level, seeds=seeds)


def test_figures_of_other_data_are_not_printed(tmp_path: Path) -> None:
    """The same data may lie in another folder of another machine: the last two parts of its path name it."""
    rows.append(tmp_path, row(0.25, judged={"val": "tiny/dev", "level": 6}))
    assert "| plain | 0.250 | 1 | 1 |" in table(EXPERIMENT, options(tmp_path))
    for others in (options(tmp_path, val="/there/tiny/test"), options(tmp_path, val="/there/tiny-2/dev")):
        assert "| plain | - | - | 0 |" in table(EXPERIMENT, others)
    assert "| plain | - | - | 0 |" in table(EXPERIMENT, options(tmp_path, level=2))
    rows.append(tmp_path, row(0.5, judged={"val": "tiny/test", "level": 6}))
    assert "| plain | 0.250 |" in table(EXPERIMENT, options(tmp_path))
    assert "| plain | 0.500 |" in table(EXPERIMENT, options(tmp_path, val="tiny/test/"))
    rows.append(tmp_path, row(0.75))  # of before the field: of anything
    assert "| plain | 0.750 |" in table(EXPERIMENT, options(tmp_path))


def test_the_seed_that_chose_the_rates_stands_in_no_table_of_others(tmp_path: Path) -> None:
    for seed in (0, TUNING):
        rows.append(tmp_path, row(0.25 if seed == 0 else 0.75, seed))
    seen = list[Runs]()

    def summary(runs: Runs) -> list[str]:
        seen.append(runs)
        return []

    claim = Claim(says="it helps", arm="plain", rivals=(), least=0.0)
    told = Experiment(
        module="stub", title="", arms=EXPERIMENT.arms, columns=EXPERIMENT.columns, summary=summary, claims=[claim]
    )
    assert "| plain | 0.250 | 1 | 1 |" in table(told, options(tmp_path, seeds=(0, TUNING)))
    assert "seeds finished: plain [0]" in table(told, options(tmp_path, seeds=(0, TUNING)))
    assert "| plain | 0.750 | 1 | 1 |" in table(told, options(tmp_path, seeds=(TUNING,)))
    assert [[r["seed"] for r in runs["plain"]] for runs in seen] == [[0], [0], [TUNING]]


ENDS = {"same": 0, "other": rows.OTHER_LOSSES, "gone": 2, "broken": 1, "killed": -9}
STUB = f"""
import os, sys
code = {ENDS}[sys.argv[sys.argv.index("--only") + 1].partition(":")[0]]
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
CHECKED = Experiment(
    module="checked_stub", title="A stub", arms=lambda _: [replace(ARM, name=name) for name in ENDS], columns={}
)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the rows and of the shell; checks are processes of STUB, which end as ENDS says."""
    (tmp_path / "checked_stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "said", "unsaid"),
    [
        (ENDS, ["rows of other are of code that computed other losses", "gone, broken, killed"], "same"),
        (["same", "broken"], ["broken"], "other losses"),
        ([], ["no row"], "other losses"),
    ],
)
def test_other_losses_are_told_from_failures(out: Path, names: list[str], said: list[str], unsaid: str) -> None:
    for name in names:
        rows.append(out, row(0.5) | {"arm": name})
    with pytest.raises(ValueError) as error:
        arms_queue.check_all(CHECKED, Options(out=out))
    assert all(words in str(error.value) for words in said)
    assert unsaid not in str(error.value)
