"""Quickstart: figures that equal `kiloword eval`'s, a page that holds them, and a second call that trains nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kiloword import evaluation
from kiloword.api import load
from kiloword.apps.quickstart.scenes import draw_all, quickstart, recipe, within_groups
from kiloword.cli.main import main
from kiloword.config import settings
from kiloword.config.recipes import Recipe
from kiloword.data.scenes.world import TASKS
from kiloword.methods.defaults import default_recipe

N = 48


def small(steps: int = 4) -> Recipe:
    return replace(default_recipe("siglip", "debug", ("scenes?n=200",)), steps=steps, batch=16)


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
    assert set(metrics) == {"retrieval", "one fact", "one thing", "hard", *TASKS}
    html, card = (out / "report.html").read_text(), (out / "model" / "README.md").read_text()
    assert (html.count("<img"), "loss over the steps" in html) == (5 * 7, True)
    for name in TASKS:
        assert f"{metrics[name]['acc1']:.3f}" in html
    assert f"{metrics['hard']['image_retrieval_recall@1']:.3f}" in html
    (row,) = [line for line in card.splitlines() if "text\\_retrieval\\_recall@5 |" in line]
    assert row.startswith(f"| retrieval: scenes:test?n={N}, {N} images, at step ")
    assert f"| {metrics['retrieval']['text_retrieval_recall@5']:.4f} |" in row
    with Image.open(out / "example.png") as example:
        assert example.size == (32, 32)


def test_hard_set_ranks_inside_groups_alone() -> None:
    scores = torch.rand(24, 24, generator=torch.Generator().manual_seed(0))
    index = {"vec": torch.arange(24)}

    def told(scores: torch.Tensor) -> dict[str, float]:
        return within_groups(lambda images, texts: scores[images["vec"]][:, texts["vec"]], index, index)

    right = [scores[:, t][t // 8 * 8 : t // 8 * 8 + 8].argmax().item() == t % 8 for t in range(24)]
    assert told(scores)["image_retrieval_recall@1"] == pytest.approx(sum(right) / 24)
    right = [scores[i][i // 8 * 8 : i // 8 * 8 + 8].argmax().item() == i % 8 for i in range(24)]
    assert told(scores)["text_retrieval_recall@1"] == pytest.approx(sum(right) / 24)
    assert list(told(torch.zeros(24, 24)).values()) == [1 / 8, 1 / 8]  # ties get their expected value
    blocks = torch.block_diag(*[2 * torch.eye(8) for _ in range(3)])
    blocks[:, 0] += 9.0  # another group's caption that fits everything does no harm
    assert told(blocks)["image_retrieval_recall@1"] == 1
    scenes = draw_all("scenes:test?hard=shape&n=24", 32)  # which differ by shape alone, and captions tell
    truth = scenes.source.relevance(scenes.captions, range(24))
    for start in (0, 8, 16):
        assert (truth[start : start + 8, start : start + 8] == np.eye(8, dtype=bool)).all()


def test_a_second_call_trains_nothing_and_finds_the_same(out: Path) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.suffix in (".safetensors", ".json", ".jsonl")}
    (out / "results.json").write_text("{")
    quickstart(small(), out, N)
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ValueError, match="steps is 4 there, 5 here"):
        quickstart(small(5), out, N)


@pytest.mark.parametrize("words", ["photos", "--data x", "--steps 0", "--views 3", "photos --data x --steps 0"])
def test_what_is_refused(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["quickstart", *words.split(), "--out", str(tmp_path / "out")])
    assert (end.value.code, capsys.readouterr().out) == (2, "")
    assert not (tmp_path / "out").exists()


def test_recipe_is_a_run_of_minutes() -> None:
    chosen = recipe(3)
    assert (chosen.seed, chosen.size) == (3, "tiny")
    assert chosen.steps * chosen.batch <= 400_000
    assert replace(chosen, seed=0) == recipe()  # the seed is all that it changes
    assert settings.parse(json.loads(json.dumps(asdict(chosen))), Recipe) == chosen  # as config.json holds it


@pytest.mark.slow
@pytest.mark.timeout(2500)  # 24 minutes on a CPU without bf16 whose other core was busy
def test_quickstart_reaches_its_figures(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "kiloword", "quickstart", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2400, check=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]
    for side in ("text", "image"):
        assert metrics["retrieval"][f"{side}_retrieval_recall@1"] >= 0.70
        assert metrics["retrieval"][f"{side}_retrieval_recall@5"] >= 0.97
    assert metrics["colour"]["acc1"] >= 0.97
    # Goals of this recipe are count 0.75 and shape 0.60; another processor or number of threads rounds differently, and
    # the moment at which shape is found moves (research/bench.md has the spread). These are what no run may fall below.
    assert metrics["count"]["acc1"] >= 0.68
    assert metrics["shape"]["acc1"] >= 0.30
