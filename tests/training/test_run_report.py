"""OUT/report.html: what a run leaves for its reader, and that it costs the run nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from kiloword.cli.main import main
from kiloword.runs.rows import HISTORY, objects
from kiloword.training import report
from kiloword.training.loop import RunOptions, train
from kiloword.training.signals import Stopped
from pages import sections
from runs import at_step, recipe

WORDS = ["train", "siglip", "--data", "scenes?n=32", "--val", "scenes:test?n=8", "--size", "debug", "--steps", "4"]
WORDS += ["--batch", "8", "--log-every", "1", "--eval-every", "2", "--optim.lr", "2e-3", "--quiet"]
GIVEN = {"differs from its default", "--steps", "--batch", "--log-every", "--eval-every", "--optim.lr", "--quiet"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "run"
    main([*WORDS, "--out", str(out)])
    return out


@pytest.mark.plots
def test_the_page_shows_the_run(out: Path) -> None:
    html = (out / report.NAME).read_text()
    read = sections(html)
    assert {"Loss", "Evaluations", "Throughput", "Data", "Samples", "Settings", "Processes"} <= read.keys()
    assert html.count("<svg") == 2 * html.count('<svg class="wide"') > 10
    assert "4 of 4 steps" in read[""].text
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shown = {row[0]: row[1:] for row in read["Evaluations"].tables[0][1:]}
    values = [row["val/text_retrieval_recall@5"] for row in rows if "val/text_retrieval_recall@5" in row]
    assert len(values) == 2
    assert [float(x) for x in shown["text_retrieval_recall@5"]] == pytest.approx(
        [values[0], min(values), max(values), values[1], 2], rel=1e-3
    )
    assert {row[0]: row[1] for row in read["Data"].tables[0]}["images"] == "32"
    changed = {row[0]: row[1:] for row in read["Settings"].tables[0]}
    assert (changed["--optim.lr"], changed["--log-every"]) == (["0.002", "0.001"], ["1", "10"])
    assert changed.keys() == GIVEN
    assert html.count("<img") == report.SAMPLES
    assert "kiloword train siglip --data 'scenes?n=32'" in read["Processes"].text
    assert torch.__version__ in read["Processes"].tables[0][1]


@pytest.mark.plots
def test_a_finished_run_keeps_its_page_and_history(out: Path) -> None:
    """What a kill cut off, the card or the page, is written by the same command."""
    card = (out / "model" / "README.md").read_text()
    assert "Trained for 4 steps on: scenes" in card
    assert "| scenes:test?n=8, 8 images, at step 4 | text\\_retrieval" in card
    before = {name: (out / name).read_bytes() for name in (report.NAME, HISTORY)}
    for lost in (out / "model" / "README.md", out / report.NAME):
        lost.unlink()
        main([*WORDS, "--out", str(out)])
        assert {name: (out / name).read_bytes() for name in before} == before
        assert (out / "model" / "README.md").read_text() == card


def test_settings_of_a_run_from_another_model_are_compared_with_its_own_defaults(out: Path, tmp_path: Path) -> None:
    main([*WORDS, "--init", str(out / "model"), "--lora.rank", "2", "--out", str(tmp_path)])
    rows = sections((tmp_path / report.NAME).read_text())["Settings"].tables[0]
    assert {row[0] for row in rows} == GIVEN | {"--init", "--lora.rank"}


def test_a_stopped_run_is_reported_and_goes_on(tmp_path: Path) -> None:
    options = RunOptions(log_every=1, save_every=2, quiet=True)
    with at_step(2, lambda _: signal.raise_signal(signal.SIGTERM)), pytest.raises(Stopped):
        train(recipe(4), tmp_path, options=options)
    assert "2 of 4 steps. It is not finished" in sections((tmp_path / report.NAME).read_text())[""].text
    train(recipe(4), tmp_path, options=options)
    assert "4 of 4 steps. It is finished" in sections((tmp_path / report.NAME).read_text())[""].text
    assert [process["step"] for process in objects(tmp_path / HISTORY)] == [0, 2]
