"""Sweeps: which arms there are, that they are ordinary runs, what is resumed, what fails, and the figures."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword import evaluation
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.files import LOCK
from kiloword.training.log import read_metrics
from pages import sections

SMALL = ["--data", "scenes?n=32", "--size", "debug", "--batch", "8", "--vocab", "300"]
EVAL = ["retrieval=scenes:test?n=8", "zeroshot=scenes:test?n=8&task=colour"]
RECALL, ACC = "scenes:test?n=8/text_retrieval_recall@5", "scenes:test?n=8&task=colour/acc1"


def sweep(out: Path, vary: str, *words: str, method: str = "llip", steps: int = 2) -> None:
    varied = ["--vary", *vary.split()] if vary else []
    main(["sweep", method, *SMALL, "--steps", str(steps), *varied, "--out", str(out), *words])


def read(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def losses(out: Path) -> dict[str, float]:
    """Value of K -> mean loss."""
    return {one["values"].get("settings.k", "-"): one["metrics"]["loss"]["mean"] for one in read(out)["table"]}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms over two seeds."""
    out = tmp_path_factory.mktemp("sweep")
    sweep(out, "settings.k=1,16", "--seeds", "2", "--eval", *EVAL)
    return out


def test_every_value_and_seed_is_a_run_with_figures_of_eval(swept: Path) -> None:
    arms = read(swept)["arms"]
    assert [arm["name"] for arm in arms] == [f"k={k},seed={seed}" for seed in (0, 1) for k in (1, 16)]
    for arm in arms:
        recipe = json.loads((swept / arm["name"] / "config.json").read_text())["recipe"]
        assert (str(recipe["settings"]["k"]), recipe["seed"]) == (arm["values"]["settings.k"], arm["seed"])
        assert recipe["steps"] == 2
    arm = arms[3]
    matcher = load(swept / arm["name"] / "model")
    for word, metric in zip(EVAL, (RECALL, ACC), strict=True):
        task, _, src = word.partition("=")
        assert arm["metrics"][metric] == evaluation.evaluate(matcher, task, src)[metric.rpartition("/")[2]]
    logged = [r["loss"] for r in read_metrics(swept / arm["name"] / "metrics.jsonl") if "loss" in r]
    assert arm["metrics"]["loss"] == logged[-1]
    assert len({arm["metrics"]["loss"] for arm in arms}) == 4


def test_mean_and_deviation_over_seeds_are_shown_again_without_a_run(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read(swept)
    for group in found["table"]:
        runs = [arm["metrics"] for arm in found["arms"] if arm["values"] == group["values"]]
        for metric, cell in group["metrics"].items():
            values = [run[metric] for run in runs]
            assert cell["n"] == 2
            assert cell["mean"] == pytest.approx(np.mean(values), abs=1e-15)
            assert cell["std"] == pytest.approx(np.std(values, ddof=1), abs=1e-15)
    before = (swept / "sweep.json").read_bytes()
    capsys.readouterr()
    sweep(swept, "settings.k=1,16", "--seeds", "2", "--eval", *EVAL, "--metric", "loss")
    said = capsys.readouterr().out
    assert said.startswith("4 of 4 arms are finished, 0 to do")
    loss = found["table"][1]["metrics"]["loss"]
    shown = f"{loss['mean']:.4g} ± {loss['std']:.2g}"
    assert ["k", "16", *shown.split()] in [line.split() for line in said.splitlines()]
    assert (swept / "sweep.json").read_bytes() == before
    html = (swept / "sweep.html").read_text()
    assert [cells[0] for cells in sections(html)["Table"].tables[0]] == ["", "k 1", "k 16"]
    assert shown in html
    assert "loss over settings.k" in html


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over K 1 and 2 of a step each."""
    out = tmp_path_factory.mktemp("finished")
    sweep(out, "settings.k=1,2", steps=1)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "out")


def test_further_values_and_seeds_join_those_that_are_there(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also on another device, and with another setting varied."""
    before = losses(out)
    sweep(out, "settings.k=2,4", "--device", "cpu", "--quiet", steps=1)
    sweep(out, "settings.k=1", "--seed", "1", steps=1)
    sweep(out, "optim.lr=1e-4", steps=1)
    trained = [line for line in capsys.readouterr().out.splitlines() if line.startswith("arm ")]
    assert trained == ["arm k=4,seed=0", "arm k=1,seed=1", "arm lr=1e-4,seed=0"]
    table = losses(out)
    assert [*table] == ["1", "2", "4", "-"]
    assert (table["1"] != before["1"], table["2"] == before["2"]) == (True, True)
    assert [one["metrics"]["loss"]["n"] for one in read(out)["table"]] == [2, 1, 1, 1]


def test_an_arm_that_fails_is_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep(tmp_path, "batch=64,8", method="siglip", steps=1)
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "arm batch=64,seed=0 failed: " in said.err
    assert "1 of 2 arms failed: batch=64,seed=0" in said.out
    first, second = read(tmp_path)["arms"]
    assert ("error" in first, "metrics" in first, "error" in second, "metrics" in second) == (True, False, False, True)
    assert "batch=64,seed=0" in (tmp_path / "sweep.html").read_text()


@pytest.mark.slow
def test_a_signal_ends_the_sweep_and_keeps_what_is_finished(out: Path) -> None:
    flags = [
        *SMALL,
        "--steps",
        "100000",
        "--log-every",
        "1",
        "--vary",
        "settings.k=1",
        "--out",
        str(out.parent / "new"),
    ]
    rows = out.parent / "new" / "k=1,seed=0" / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "kiloword", "sweep", "llip", *flags], stderr=subprocess.DEVNULL
    ) as process:
        while not rows.is_file() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
    assert process.returncode == 143
    assert list((rows.parent / "state").glob("step-*.json"))


def test_another_evaluation_replaces_the_figures_and_trains_nothing(out: Path) -> None:
    before = (out / "k=1,seed=0" / "metrics.jsonl").read_bytes()
    sweep(out, "settings.k=1", "--eval", "retrieval=scenes:test?n=8", steps=1)
    first, second = read(out)["arms"]
    assert ("text_retrieval_recall@1" in first["metrics"], second["eval"]) == (True, [])
    assert [*losses(out)] == ["1"]  # those of another evaluation are omitted
    assert (out / "k=1,seed=0" / "metrics.jsonl").read_bytes() == before


def test_a_dry_run_lists_the_arms_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--vary", "settings.per_token_projections=True,false", "optim.lr=1e-3", "--seed", "4", "--seeds=2"]
    main(["sweep", "llip", "--data", "a b", *words, "--out", str(tmp_path / "out"), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 arms:"
    name = "per-token-projections=false,lr=1e-3,seed=5"
    assert lines[4] == (
        f"{name}: kiloword train llip --data 'a b' --seed 4 --settings.no-per-token-projections --optim.lr 1e-3 "
        f"--seed 5 --out {tmp_path}/out/{name}"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vary", "settings.kk=1,2"], "--settings.kk"),
        (["--vary", "settings.k=1,x"], "--settings.k"),
        (["--vary", "settings.k=0,1"], "--settings.k is 0"),
        (["--vary", "optim.lr=1e-3,-1"], "--optim.lr is -1.0"),
        (["--vary", "settings.k"], "settings.k=1,16"),
        (["--vary", "settings.k=1,1"], "twice"),
        (["--vary", "settings.k=1", "--vary", "settings.k=2"], "--vary is given twice"),
        (["--vary", "seed=1,2"], "seed=1,2"),
        ([], "--vary settings.k"),
        (["--vary", "settings.k=1", "--seeds", "0"], "--seeds is 0"),
        (["--vary", "settings.k=1", "--eval", "zeroshoot=scenes"], "zeroshoot"),
        (["--vary", "settings.k=1", "--worker", "2"], "--worker"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "llip", "--out", str(tmp_path / "out"), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("vary", "words", "said"),
    [
        ("settings.k=4", ["--optim.lr=1e-3"], "--optim.lr"),
        ("settings.k=1", ["--patience", "1", "--eval-every", "1"], "--patience"),
        ("settings.k=1", ["--metric", "los"], "Did you mean loss?"),
    ],
)
def test_what_does_not_fit_the_arms_that_are_there_is_refused(
    vary: str, words: list[str], said: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (out / "sweep.json").read_bytes()
    with pytest.raises(SystemExit) as ended:
        sweep(out, vary, *words, steps=1)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert (out / "sweep.json").read_bytes() == before


def test_one_process_sweeps_in_a_folder(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (out / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemExit):
            sweep(out, "settings.k=4", steps=1)
    assert "is sweeping in" in capsys.readouterr().err
    assert not (out / "k=4,seed=0").exists()
