"""A second call of a sweep: a slip of the pen costs no result, further values join those that are there."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kiloword.apps.sweep.arms import Varied, arms
from kiloword.apps.sweep.run import Results
from kiloword.cli.main import main
from kiloword.training import command as train_verb

SMALL = ["--size", "debug", "--data", "scenes?n=64", "--batch", "8"]
TRAINED: list[str] = []


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished sweep over K 1 and 2, by a training that writes a loss alone."""
    TRAINED.clear()

    def train(words: Sequence[str]) -> None:
        folder = Path(words[-1])
        TRAINED.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text(f'{{"step": 2, "loss": {len(TRAINED)}.0}}\n')

    monkeypatch.setattr(train_verb, "main", train)
    sweep(tmp_path / "sw", "1,2")
    return tmp_path / "sw"


def sweep(out: Path, k: str, *words: str, steps: int = 2, method: str = "llip") -> None:
    varied = ["--vary", f"settings.k={k}"] if k else []
    main(["sweep", method, *varied, *SMALL, "--steps", str(steps), "--out", str(out), *words])


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in ("sweep.json", "sweep.csv", "sweep.html")}


def table(out: Path) -> dict[str, str]:
    rows: list[dict[str, Any]] = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    return {row["settings.k"]: row["mean"] for row in rows}


@pytest.mark.parametrize("more", [["--worker", "2"], ["--dry-run", "--worker", "2"], ["--micro", "-1"]])
def test_a_slip_of_the_pen_is_refused_before_anything_is_written(
    more: list[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(out)
    with pytest.raises(SystemExit) as end:
        sweep(out, "1,2", *more)
    assert end.value.code == 2
    assert more[-2].removesuffix("r") in capsys.readouterr().err
    assert contents(out) == before
    with pytest.raises(SystemExit):
        sweep(out.parent / "other", "1,2", *more)
    assert not (out.parent / "other").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"k": "1,2", "steps": 4}, "(--steps 2 there, 4 here)"),
        ({"k": "4", "steps": 4}, "(--steps 2 there, 4 here)"),
        ({"k": "1", "words": ("--optim.lr=1e-3",)}, "(--optim.lr not given there, 1e-3 here)"),
        (
            {"k": "1", "words": ("--patience", "1", "--eval-every", "1")},
            "(--patience not given there, 1 here, --eval-every not given there, 1 here)",
        ),
        ({"k": "", "words": ("--vary", "batch=8,16"), "method": "clip"}, "(METHOD llip there, clip here)"),
    ],
)
def test_a_call_with_other_settings_is_refused(
    words: dict[str, Any], message: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(out)
    with pytest.raises(SystemExit) as end:
        sweep(out, words["k"], *words.get("words", ()), **{n: words[n] for n in ("steps", "method") if n in words})
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"{out} holds a sweep of other settings {message}: choose another --out." in said
    assert contents(out) == before


def test_further_values_join_those_that_are_there(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also on another device, with more seeds, and with another setting varied."""
    sweep(out, "4", "--device", "cpu", "--quiet")
    assert table(out) == {"1": "1.0", "2": "2.0", "4": "3.0"}
    assert [row["name"] for row in json.loads((out / "sweep.json").read_text())["arms"]] == [
        f"k={k},seed=0" for k in (1, 2, 4)
    ]
    sweep(out, "1", "--seed", "1")
    assert table(out) == {"1": "2.5", "2": "2.0", "4": "3.0"}
    assert TRAINED == ["k=1,seed=0", "k=2,seed=0", "k=4,seed=0", "k=1,seed=1"]
    capsys.readouterr()
    sweep(out, "", "--vary", "optim.lr=1e-3")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["settings.k", "optim.lr", "loss", "n"] in lines
    assert ["-", "1e-3", "5", "1"] in lines
    assert ["4", "-", "3", "1"] in lines


def test_results_of_another_evaluation_stay_until_there_are_new_ones(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The models that the training did not write cannot be evaluated: both arms fail."""
    with pytest.raises(SystemExit) as end:
        sweep(out, "1,2", "--eval", "retrieval=scenes:test?n=8")
    assert end.value.code == 1
    rows = json.loads((out / "sweep.json").read_text())["arms"]
    assert [(row["metrics"]["loss"], row["eval"], "error" in row) for row in rows] == [(1, [], True), (2, [], True)]
    assert "2 arms in" in capsys.readouterr().err
    sweep(out, "1,2")
    assert table(out) == {"1": "1.0", "2": "2.0"}
    assert len(TRAINED) == 4


def test_two_settings_of_one_short_name(out: Path) -> None:
    made = arms([Varied("other.k", "--other.k", ("1",))], [0], ["llip", *SMALL, "--steps", "2"], out)
    with pytest.raises(ValueError, match=r"settings\.k 1 there, not given here, other\.k not given there, 1 here"):
        Results(out, made, ()).read()


@pytest.mark.parametrize("damage", ["[]", '{"arms": [{"metrics": {}}]}', '{"arms": [3]}', "{"])
def test_a_damaged_file_is_no_sweep(damage: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / "sweep.json").write_text(damage)
    with pytest.raises(SystemExit) as end:
        sweep(out, "1,2")
    assert end.value.code == 2
    assert "is no sweep of kiloword, or damaged" in capsys.readouterr().err


def test_an_unknown_metric_ends_the_sweep_after_its_first_arm(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sweep(out.parent / "new", "1,2,4", "--metric", "los")
    assert end.value.code == 2
    assert len(TRAINED) == 3
    output = capsys.readouterr()
    assert "Did you mean loss?" in output.err
    assert "page: " in output.out
    sweep(out.parent / "new", "1,2,4", "--metric", "loss")
    assert len(TRAINED) == 5
