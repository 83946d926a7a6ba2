"""Sweeps: which arms there are, that they are ordinary runs, what is resumed, what fails, and the figures."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword import evaluation
from kiloword.api import load
from kiloword.apps.sweep import summary
from kiloword.apps.sweep.arms import Arm, Varied, arms
from kiloword.apps.sweep.run import Results
from kiloword.cli import sweep as verb
from kiloword.cli.main import main
from kiloword.report import line_plot
from kiloword.training import command as train_verb
from kiloword.training.log import read_metrics
from kiloword.training.signals import Stopped

SMALL = ["--data", "scenes?n=32", "--size", "debug", "--batch", "8", "--vocab", "300", "--steps", "2"]
EVAL = ["retrieval=scenes:test?n=8", "zeroshot=scenes:test?n=8&task=colour"]
RECALL, ACC = "scenes:test?n=8/text_retrieval_recall@5", "scenes:test?n=8&task=colour/acc1"


def sweep(out: Path, *words: str, seeds: int = 2) -> list[str]:
    return ["sweep", "llip", *SMALL, "--vary", "settings.k=1,16", "--seeds", str(seeds), "--out", str(out), *words]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms over two seeds."""
    out = tmp_path_factory.mktemp("sweep")
    main(sweep(out, "--eval", *EVAL))
    return out


def read(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def test_every_value_and_seed_is_a_run_with_figures_of_eval(swept: Path) -> None:
    rows = read(swept)["arms"]
    assert [row["name"] for row in rows] == [f"k={k},seed={seed}" for seed in (0, 1) for k in (1, 16)]
    for row in rows:
        recipe = json.loads((swept / row["name"] / "config.json").read_text())["recipe"]
        assert (str(recipe["settings"]["k"]), recipe["seed"]) == (row["values"]["settings.k"], row["seed"])
        assert recipe["steps"] == 2
    row = rows[3]
    matcher = load(swept / row["name"] / "model")
    for word, metric in zip(EVAL, (RECALL, ACC), strict=True):
        task, _, src = word.partition("=")
        assert row["metrics"][metric] == evaluation.evaluate(matcher, task, src)[metric.rpartition("/")[2]]
    losses = [r["loss"] for r in read_metrics(swept / row["name"] / "metrics.jsonl") if "loss" in r]
    assert row["metrics"]["loss"] == losses[-1]
    assert len({row["metrics"]["loss"] for row in rows}) == 4


def test_mean_and_deviation_over_seeds(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against numpy, in JSON and CSV; and in the table that the same command prints again without a run."""
    found = read(swept)
    lines = list(csv.DictReader((swept / "sweep.csv").read_text().splitlines()))
    for row in found["table"]:
        runs = [one["metrics"] for one in found["arms"] if one["values"] == row["values"]]
        for metric, cell in row["metrics"].items():
            values = [run[metric] for run in runs]
            assert cell["n"] == 2
            assert cell["mean"] == pytest.approx(np.mean(values), abs=1e-15)
            assert cell["std"] == pytest.approx(np.std(values, ddof=1), abs=1e-15)
            (line,) = (x for x in lines if x["metric"] == metric and x["settings.k"] == row["values"]["settings.k"])
            assert (float(line["mean"]), float(line["std"]), line["n"]) == (cell["mean"], cell["std"], "2")
    before = (swept / "sweep.json").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_verb, "main", lambda words: pytest.fail("trained again"))
        main(sweep(swept, "--eval", *EVAL, "--metric", "loss"))
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "4 of 4 arms are finished, 0 to do"
    assert output[1].split() == ["settings.k", "loss", "n"]
    loss = [row["metrics"]["loss"] for row in found["table"]]
    assert output[3].split() == ["16", f"{loss[1]['mean']:.4g}", "±", f"{loss[1]['std']:.2g}", "2"]
    assert (swept / "sweep.json").read_bytes() == before
    html = (swept / "sweep.html").read_text()
    assert "loss over settings.k" in html
    assert "kiloword sweep llip" in html


def test_a_sweep_resumes_with_another_seed_and_not_with_other_settings(
    swept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Sequence[str]] = []

    def stop(words: Sequence[str]) -> None:
        trained.append(words)
        if len(trained) == 1:
            raise Stopped("stopped after step 1; the state is saved.", 143)

    monkeypatch.setattr(train_verb, "main", stop)
    with pytest.raises(SystemExit) as ended:
        main(sweep(swept, "--eval", *EVAL, seeds=3))
    assert ended.value.code == 143
    output = capsys.readouterr()
    assert "4 of 6 arms are finished, 2 to do" in output.out
    assert "arm 1 of 2: k=1,seed=2" in output.out
    assert trained[0][-4:] == ("--seed", "2", "--out", str(swept / "k=1,seed=2"))
    before = read(swept)["arms"]
    words = [(Arm(one["values"], one["seed"], tuple(one["command"])), one["eval"]) for one in before]
    for arm, evaluated in words[:2]:
        changed = replace(arm, words=(arm.words[0], "--optim.lr", "1e-4", *arm.words[1:]))
        for sets in (evaluated, ["scenes"]):
            results = Results(swept, [arm], sets)
            results.read()
            assert len(results.metrics) == 4 * (sets == evaluated)
            with pytest.raises(ValueError, match=r"--optim.lr not given there, 1e-4 here"):
                Results(swept, [changed], sets).read()


@pytest.mark.slow
def test_an_arm_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train_verb.main

    def train(words: Sequence[str]) -> None:
        if "64" in words:
            real(words)  # refused: more than there are images
        out = Path(words[-1])
        out.mkdir(parents=True)
        (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')

    monkeypatch.setattr(train_verb, "main", train)
    words = ["sweep", "siglip", *SMALL, "--vary", "batch=64,8", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    output = capsys.readouterr()
    assert "arm batch=64,seed=0 failed: " in output.err
    assert "1 of 2 arms failed: batch=64,seed=0" in output.out
    rows = read(tmp_path / "out")["arms"]
    assert [("metrics" in row, "error" in row) for row in rows] == [(False, True), (True, False)]
    assert "batch=64,seed=0: " in (tmp_path / "out" / "sweep.html").read_text()
    assert read(tmp_path / "out")["table"][0]["metrics"]["loss"] == {"mean": 1.0, "std": None, "n": 1}


def test_a_dry_run_lists_the_arms_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["--data", "a b", "--vary", "settings.k=1,2", "--vary=optim.lr=1e-3", "--seed", "4", "--seeds=2"]
    main(["sweep", "llip", *words, "--out", str(out), "--dry-run"])
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "4 arms:"
    assert output[4] == (
        "k=2,lr=1e-3,seed=5: kiloword train llip --data 'a b' --seed 4 --settings.k 2 --optim.lr 1e-3 --seed 5 --out "
        f"{out}/k=2,lr=1e-3,seed=5"
    )
    assert not out.exists()


REFUSED = [
    (["--vary", "settings.kk=1,2"], "--vary settings.kk: there is no such setting. Did you mean settings.k?"),
    (["--vary", "optim.learning=1"], "--vary optim.learning: there is no such setting."),
    (["--vary", "settings.k=1,x"], "--vary settings.k: 'x' does not fit: input should be a valid integer"),
    (["--vary", "settings.k=0,1"], "--settings.k is 0: expected"),
    (["--vary", "optim.lr=1e-3,-1"], "--optim.lr is -1.0: expected 0 to 100"),
    (["--vary", "settings.pool=first,last"], "--vary settings.pool: 'last' does not fit: input should be 'contextual'"),
    (["--vary", "settings.k"], "--vary settings.k: expected SETTING=VALUE,VALUE,..."),
    (["--vary", "settings.k=1,,2"], "expected SETTING=VALUE,VALUE,..."),
    (["--vary", "settings.k=1,1"], "--vary settings.k=1,1 names a value twice"),
    (["--vary", "settings.k=1", "--vary", "settings.k=2"], "--vary names settings.k twice: give all its"),
    (["--vary", "rows=1,2", "data.rows=3,4"], "--vary names data.rows twice: give all its"),
    (["--vary", "method=clip,llip"], "--vary method: there is no such setting"),
    (["--vary", "seed=1,2"], "--vary seed: it is set by the sweep"),
    (["--vary", "settings.k=1,2", "--seeds", "501"], "the sweep has 1,002 arms: expected at most 1,000"),
    (["--vary", "data=a/b,a:b"], "two arms would share the folder data=a_b,seed=0"),
    ([], "sweep needs a setting to vary: --vary SETTING=VALUE,VALUE"),
    (["--vary", "settings.k=1", "--seeds", "0"], "--seeds is 0: expected 1 to 1000"),
    (["--vary", "settings.k=1", "--seed", "x"], "--seed is 'x': expected a whole number"),
    (["--vary", "settings.k=1", "--eval", "zeroshoot=scenes"], "unknown task 'zeroshoot'"),
    (["--vary", "settings.k=1", "--eval", "zeroshot=scenes:test"], "has no class names"),
    (["--vary", "settings.k=1", "--eval", "no/such"], "no/such: no such file or folder"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words)[:30] for words, _ in REFUSED])
def test_what_is_refused_before_the_first_run(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "llip", "--out", str(tmp_path / "out"), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep.json").write_text("[]")
    refused = (("WORLD_SIZE", "2", "start each arm with torchrun"), ("X", "", "is no sweep of kiloword"))
    for name, value, message in refused:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=message):
                verb.main(["llip", "--out", str(tmp_path), "--vary", "settings.k=1"])
    with pytest.raises(SystemExit):
        main(["sweep", "--vary", "settings.k=1", "--out", str(tmp_path)])
    assert "sweep needs a method first" in capsys.readouterr().err


def test_an_unknown_metric_is_named_when_all_is_written(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(sweep(swept, "--eval", *EVAL, "--metric", "los"))
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert "Did you mean loss?" in output.err
    assert "page: " in output.out


def test_words_of_the_sweep_and_of_train() -> None:
    words = ["llip", "--vary", "a=1", "b=2", "--steps", "3", "--vary=c=3", "--dry_run", "--eval", "x", "--k=1"]
    own, rest = verb.split(words)
    assert own == ["--vary", "a=1", "b=2", "c=3", "--dry-run", "--eval", "x"]
    assert rest == ["llip", "--steps", "3", "--k=1"]


def test_settings_that_are_switches_or_take_several_values() -> None:
    from kiloword.methods.defaults import default_recipe
    from kiloword.methods.registry import find
    from kiloword.training.command import Train

    run = Train(recipe=default_recipe("", "tiny"), out=Path("x"))
    kind: Any = find("llip")[1]
    words = ["settings.per_token_projections=1,false", "data=a,b", "data.augment.crop=0.5", "init=x"]
    made = verb.varied(words, run, kind())
    assert [[one.words(value) for value in one.values] for one in made] == [
        [["--settings.per-token-projections"], ["--settings.no-per-token-projections"]],
        [["--data", "a"], ["--data", "b"]],
        [["--augment.crop", "0.5"]],
        [["--init", "x"]],
    ]
    folders = arms([Varied("a.k", "--a.k", ("1",)), Varied("b.k", "--b.k", ("x/y",))], [0], [], Path("out"))
    assert [arm.name for arm in folders] == ["a.k=1,b.k=x_y,seed=0"]


@pytest.mark.parametrize(
    ("values", "log"),
    [([1, 16, 32, 64], True), ([2, 4, 8], True), ([0.1, 1, 3], True), ([0.15, 0.3, 0.5, 1], False), ([0, 1, 64], False),
     ([0.26, 0.27, 0.3], False), ([1, 2], False), ([4], False), ([-8, 8], False)],
)  # fmt: skip
def test_which_axes_are_logarithmic(values: list[float], log: bool) -> None:
    assert summary.is_log(values) == log


def results(settings: dict[str, list[str]], values: dict[tuple[str, ...], list[float]]) -> Results:
    every = [
        Arm(dict(zip(settings, chosen, strict=True)), seed, ())
        for chosen, found in values.items()
        for seed in range(len(found))
    ]
    made = Results(Path("x"), every, ())
    numbers = [value for found in values.values() for value in found]
    made.metrics = {arm.name: {"m/acc1": value, "skipped": 0.0} for arm, value in zip(every, numbers, strict=True)}
    return made


def test_a_line_for_each_value_of_the_second_setting() -> None:
    pairs = {(k, pool): [0.5, 0.75] for k in ("16", "1") for pool in ("a", "b")}
    two = results({"s.k": ["1", "2"], "pool": ["a", "b"]}, pairs)
    table = summary.rows(two)
    assert summary.chosen(table, ()) == ["m/acc1"]
    html = summary.page(two, ["m/acc1"])
    assert "m/acc1 over s.k: pool=a from 0.625 to 0.625; pool=b from" in html
    assert "0.625 ± 0.18" in html
    assert summary.lines(table, ["m/acc1", "none"])[1].split() == ["16", "a", "0.625", "±", "0.18", "-", "2"]
    words = results({"pool": ["a", "b"]}, {("a",): [0.5], ("b",): [math.nan]})
    assert "<figure" not in summary.page(words, ["m/acc1"])
    assert summary.lines(summary.rows(words), ["m/acc1"])[1].split() == ["a", "0.5", "1"]
    many = results({"x": [], "y": []}, {(x, y): [1.0] for x in "12" for y in "abcdefgh"})
    assert summary.page(many, ["m/acc1"]).count("<figure") == 2


def test_bars_of_a_line_plot() -> None:
    """From mean - deviation to mean + deviation, inside the axis; none where it is 0; a dot at each mean."""
    html = line_plot({"a": [(0, 1.0), (1, 3.0)]}, "x", "y", spread={"a": [1.0, 0.0]})
    low, high = 1000.0, 1000 - 1000 * 2 / 3
    assert f'd="M0.0 {low:.1f}V{high:.1f}"' in html
    assert html.count("V") == 1
    dots = re.search(r'class="line dot"[^>]* d="([^"]*)"', html)
    assert dots
    assert dots[1].count("h0") == 2
    assert "dot" not in line_plot({"a": [(0, 1.0), (1, 3.0)]}, "x", "y")
