"""What a row is of: its recipe, what it was judged on, the commit and the processor time of its training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kiloword.config.recipes import Recipe
from kiloword.training.signals import Stopped
from research import arms_rows as rows
from research import arms_run
from research.arms import TUNING, Arm, Experiment
from research.arms_table import table
from research.classes import ClassOptions
from research.evidence import Claim, Runs

STEPS = 1000
ARM = Arm(name="plain", recipe=Recipe(method="siglip", steps=STEPS), judge=lambda matcher: {"top1": 0.5})
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


class Run:
    """A run of ARM by calls that end at a step: training, the model and the clock of the processor are made up."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options, self.folder, self.clock = options(out), rows.folder_of(out, ARM, 0), 1000.0
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(arms_run, "load", lambda *_, **__: None)
        monkeypatch.setattr(time, "process_time", lambda: self.clock)

    def call(self, commit: str, until: int, seconds: float, dirty: bool = False) -> None:
        def train(recipe: Recipe, folder: Path, **options: Any) -> None:
            (folder / "metrics.jsonl").touch()
            self.clock += seconds
            if until:
                (folder / "state").mkdir(exist_ok=True)
                (folder / "state" / f"step-{until:09d}.json").touch()
            if until < STEPS:
                raise Stopped("stopped", 143)

        self.monkeypatch.setattr(arms_run.loop, "train", train)
        self.monkeypatch.setattr(rows, "commit", lambda: (commit, dirty))
        arms_run.run_one(EXPERIMENT, self.options, ARM, 0)

    @property
    def row(self) -> rows.Row:
        (row,) = rows.read(self.options.out)
        return row


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_row_is_of_the_commit_that_began_it_and_of_the_processor_time_of_all_calls(training: Run) -> None:
    with pytest.raises(Stopped):
        training.call("first", 0, 7.0)  # no state: the next call begins anew
    with pytest.raises(Stopped):
        training.call("second", STEPS - 2, 100.0)
    training.call("third", STEPS, 3.0, dirty=True)
    row = training.row
    assert row["cpu_s"] == pytest.approx(103.0)
    assert (row["commit"], row["dirty"], row["judged_at"]) == ("second", False, "third+")
    assert row["judged"] == {"val": "tiny/dev", "level": 6}


def test_a_row_of_one_call_names_its_commit_once(training: Run) -> None:
    training.call("first", STEPS, 3.0, dirty=True)
    assert (training.row["commit"], training.row["dirty"]) == ("first", True)
    assert "judged_at" not in training.row


@pytest.mark.parametrize(
    ("file", "content", "cpu_s"),
    [("state/step-000000500.json", "", 3.0), ("spent.json", '{"train_s": 1.0, "cpu_s": 2.0}', 2.0)],
)
def test_a_folder_of_before_lacks_the_commit_that_began_it(
    training: Run, file: str, content: str, cpu_s: float
) -> None:
    """One that trains, and one whose model is trained."""
    path = training.folder / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    training.call("second", STEPS, 3.0)
    assert (training.row["commit"], training.row["cpu_s"]) == ("second", cpu_s)
    assert "judged_at" not in training.row
