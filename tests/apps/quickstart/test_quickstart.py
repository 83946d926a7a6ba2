"""Quickstart: figures that equal `kiloword eval`'s, a page that holds them, and a second call that trains nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kiloword import evaluation
from kiloword.api import load
from kiloword.apps.quickstart.results import export, finished
from kiloword.apps.quickstart.scenes import quickstart, recipe, sized, worst
from kiloword.cli.main import main
from kiloword.config.recipes import Recipe
from kiloword.data.scenes.world import TASKS
from kiloword.interop.export.source import Exported
from kiloword.models.trust import Trust
from kiloword.report import Matrix

N = 48


def small(steps: int = 4) -> Recipe:
    chosen = recipe()
    return replace(
        chosen, data=replace(chosen.data, sources=("scenes?n=200",)), steps=steps, batch=16, precision="fp32"
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "quick start"
    quickstart(small(), folder, N)
    return folder


def test_figures_are_those_of_eval_and_stand_on_page_and_card(out: Path) -> None:
    metrics = json.loads((out / "results.json").read_text())["metrics"]
    matcher, retrieval = load(out / "model"), f"scenes:test?n={N}"
    assert metrics["retrieval"] == evaluation.evaluate(matcher, "retrieval", retrieval)
    assert metrics["one thing"] == evaluation.evaluate(matcher, "retrieval", f"{retrieval}&levels=2")
    assert metrics["shape"] == evaluation.evaluate(matcher, "zeroshot", f"scenes:test?task=shape&n={2 * N}")
    assert set(metrics) == {"retrieval", "one fact", "one thing", *TASKS}
    html, card = (out / "report.html").read_text(), (out / "model" / "README.md").read_text()
    assert (html.count("<img"), "loss over the steps" in html) == (5 * 7, True)
    assert html.index("<img") < html.index("<table")
    for name in TASKS:
        assert f"{metrics[name]['acc1']:.3f}" in html
    (row,) = [line for line in card.splitlines() if "text\\_retrieval\\_recall@5 |" in line]
    assert row.startswith(f"| retrieval: scenes:test?n={N}, {N} images, at step ")
    assert f"| {metrics['retrieval']['text_retrieval_recall@5']:.4f} |" in row
    with Image.open(out / "example.png") as example:
        assert example.size == (48, 48)


def test_a_second_call_trains_nothing_and_finds_the_same(out: Path) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.suffix in (".safetensors", ".json", ".jsonl")}
    (out / "results.json").write_text("{")
    quickstart(small(), out, N)
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ValueError, match="seed is 0 there, 1 here"):
        quickstart(replace(small(), seed=1), out, N)


def test_a_finished_run_is_told_and_nothing_is_written(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    results = json.loads((out / "results.json").read_text())
    main(["quickstart", "--out", str(out)])
    printed = capsys.readouterr().out
    assert f"{results['metrics']['retrieval']['image_retrieval_recall@1']:.3f}" in printed
    assert str(out / "report.html") in printed
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert finished(out, 0, 4) == finished(out, 0, None) == results
    assert finished(out, 1, None) == finished(out, 0, 5) == finished(out.parent, 0, None) == {}


def test_a_slow_machine_makes_fewer_steps(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sized(small(), tmp_path / "new") == small()
    assert capsys.readouterr().out == ""
    shorter = sized(small(10**8), tmp_path / "new")
    assert 4 < shorter.steps < 10**8
    assert f"{shorter.steps} of {10**8} steps" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
    assert sized(small(10**8), out) == small()  # a run keeps its length


def test_other_libraries_can_express_the_model(out: Path) -> None:
    Exported.of(str(out / "model"), Trust()).check_dual()
    words = shlex.split(export(out))
    assert (words[0] == "kiloword") == (shutil.which("kiloword") is not None)
    target = words[words.index("export") + 1]
    main(["export", *words[words.index("export") + 1 :]])
    assert list((out / target).glob("*.*"))
    shutil.rmtree(out / target)


def test_what_is_confused_is_counted() -> None:
    few = Matrix(np.array([[9, 1], [0, 5]]), "ab", "ab")
    many = Matrix(np.array([[90, 0, 0], [2, 4, 4], [0, 5, 95]]), "cde", "cde")
    assert worst({"few": few}) == {"task": "few", "true": "a", "named": "b", "count": 1, "of": 10}
    assert worst({"few": few, "many": many}) == {"task": "many", "true": "d", "named": "e", "count": 4, "of": 10}
    assert worst({"none": Matrix(np.array([[3, 0], [0, 0]]), "ab", "ab")}) == {}


@pytest.mark.parametrize("words", ["photos", "--data x", "--steps 0", "--views 3", "photos --data x --steps 0"])
def test_what_is_refused(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["quickstart", *words.split(), "--out", str(tmp_path / "out")])
    assert (end.value.code, capsys.readouterr().out) == (2, "")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quickstart_reaches_its_figures(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "kiloword", "quickstart", "--out", str(tmp_path / "run")]
    command += ["--steps", str(recipe().steps)]  # a machine that is busy would make fewer
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]
    for side in ("text", "image"):
        assert metrics["retrieval"][f"{side}_retrieval_recall@1"] >= 0.80
        assert metrics["retrieval"][f"{side}_retrieval_recall@5"] >= 0.95
    assert metrics["colour"]["acc1"] >= 0.95
