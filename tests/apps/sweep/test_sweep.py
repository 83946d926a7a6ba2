"""Sweeps: which arms there are, that they are ordinary runs, what is resumed, what fails, and the figures."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import held_by_another, refused
from kiloword import evaluation
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.training.log import read_metrics
from pages import sections
from runs import at_step

SMALL = ["--data", "scenes?n=32", "--size", "debug", "--batch", "8", "--vocab", "300"]
EVAL = ["retrieval=scenes:test?n=8", "zeroshot=scenes:test?n=8&task=colour"]
RECALL, ACC = "scenes:test?n=8/text_retrieval_recall@5", "scenes:test?n=8&task=colour/acc1"


def sweep(out: Path, vary: str, *words: str, method: str = "llip", steps: int = 2) -> None:
    main(["sweep", method, *SMALL, "--steps", str(steps), "--vary", *vary.split(), "--out", str(out), *words])


def read(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def test_every_value_and_seed_is_a_run_with_figures_of_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two arms over two seeds; then the same again, without a run."""
    words = ["settings.k=1,16", "--seeds", "2", "--eval", *EVAL]
    sweep(tmp_path, *words)
    found = read(tmp_path)
    arms, group = found["arms"], found["table"][1]
    assert [arm["name"] for arm in arms] == [f"k={k},seed={seed}" for seed in (0, 1) for k in (1, 16)]
    for arm in arms:
        recipe = json.loads((tmp_path / arm["name"] / "config.json").read_text())["recipe"]
        assert (str(recipe["settings"]["k"]), recipe["seed"]) == (arm["values"]["settings.k"], arm["seed"])
        assert recipe["steps"] == 2
    arm = arms[3]
    matcher = load(tmp_path / arm["name"] / "model")
    for word, metric in zip(EVAL, (RECALL, ACC), strict=True):
        task, _, src = word.partition("=")
        assert arm["metrics"][metric] == evaluation.evaluate(matcher, task, src)[metric.rpartition("/")[2]]
    logged = [r["loss"] for r in read_metrics(tmp_path / arm["name"] / "metrics.jsonl") if "loss" in r]
    assert arm["metrics"]["loss"] == logged[-1]
    assert len({arm["metrics"]["loss"] for arm in arms}) == 4
    assert [one["values"] for one in found["table"]] == [{"settings.k": "1"}, {"settings.k": "16"}]
    for metric, cell in group["metrics"].items():
        values = [arms[1]["metrics"][metric], arms[3]["metrics"][metric]]
        assert cell == pytest.approx({"mean": np.mean(values), "std": np.std(values, ddof=1), "n": 2}, abs=1e-15)
    before = (tmp_path / "sweep.json").read_bytes()
    capsys.readouterr()
    sweep(tmp_path, *words, "--metric", "loss")
    said, loss = capsys.readouterr().out, group["metrics"]["loss"]
    assert said.startswith("4 of 4 arms are finished, 0 to do")
    row = ["k=16", "2", f"{loss['mean']:.4g} ± {loss['std']:.2g}"]
    assert " ".join(row).split() in [line.split() for line in said.splitlines()]
    assert (tmp_path / "sweep.json").read_bytes() == before
    html = (tmp_path / "sweep.html").read_text()
    assert sections(html)["Figures"].tables[0][::2] == [["", "n", "loss"], row]
    assert "loss by setting" in html


def test_further_values_and_another_evaluation_train_only_what_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with at_step(3, lambda _: signal.raise_signal(signal.SIGTERM)), pytest.raises(SystemExit):
        sweep(tmp_path, "settings.k=1,2")
    sweep(tmp_path, "settings.k=1,2")
    assert "1 of 2 arms are finished" in capsys.readouterr().out
    (first, _), rows = read(tmp_path)["table"], (tmp_path / "k=1,seed=0" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    sweep(tmp_path, "settings.k=2,4")
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith("arm ")] == ["arm k=4,seed=0"]
    assert [(one["values"]["settings.k"], one["metrics"]["loss"]["n"]) for one in read(tmp_path)["table"]] == [
        ("1", 1), ("2", 1), ("4", 1),
    ]  # fmt: skip
    assert read(tmp_path)["table"][0] == first
    sweep(tmp_path, "settings.k=1", "--eval", "retrieval=scenes:test?n=8")
    assert "omitted: 2 arms" in capsys.readouterr().out
    (evaluated,) = read(tmp_path)["table"]  # arms of another evaluation are omitted
    assert evaluated["metrics"]["loss"] == first["metrics"]["loss"]
    assert "text_retrieval_recall@1" in evaluated["metrics"]
    assert (tmp_path / "k=1,seed=0" / "metrics.jsonl").read_bytes() == rows
    with held_by_another(tmp_path), pytest.raises(SystemExit) as ended:
        sweep(tmp_path, "settings.k=8")
    assert (ended.value.code, (tmp_path / "k=8,seed=0").exists()) == (2, False)


def test_an_arm_that_fails_is_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sweep(tmp_path, f"val=scenes:val?n=8,{EVAL[1]} batch=64,8", method="siglip", steps=1)
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "arm val=scenes_val_n=8,batch=64,seed=0 failed: " in said.err
    assert "2 of 4 arms failed: val=scenes_val_n=8,batch=64,seed=0, " in said.out
    assert [("error" in arm, "metrics" in arm) for arm in read(tmp_path)["arms"]] == [(True, False), (False, True)] * 2


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
    ("words", "word"),
    [
        (["--vary", "settings.kk=1,2"], "--settings.kk"),
        (["--vary", "settings.k=0,1"], "--settings.k is 0"),
        (["--vary", "settings.k"], "settings.k=1,16"),
        (["--vary", "seed=1,2"], "--seeds"),
        (["--vary", "settings.k=1", "settings.k=2"], "twice"),
        (["--vary", "settings.k=1,1"], "twice"),
        (["--vary", "optim.ep=1,2"], "optim.eps"),
        ([], "--vary settings.k"),
        (["--vary", "settings.k=1", "--seeds", "0"], "--seeds is 0"),
        (["--vary", "settings.k=1", "--eval", "zeroshoot=scenes"], "zeroshoot"),
        (["--vary", "settings.k=1", "--worker", "2"], "--worker"),
    ],
)  # fmt: skip
def test_refusals_write_nothing(
    words: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word in refused(capsys, "sweep", "llip", "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()
