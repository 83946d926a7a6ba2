"""Model cards: they show evaluations of the run alone, and say of changed models what is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from folders import model_folder
from kiloword.cli.main import main
from kiloword.models.card import model_card, record_retrieval


def written(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    written(tmp_path / "run" / "config.json", {"format": "kiloword-run-1"})
    return model_folder(tmp_path / "run" / "model")


def test_files_beside_a_model_of_no_run_stay_out_of_its_card(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "mydocs" / "model")
    for place in (folder, folder.parent):
        written(place / "zeroshot.json", {"acc1": 0.5, "skipped": 0.0})
        (place / "metrics.jsonl").write_text('{"step": 1, "val/rsum": 2.0}')
    assert "No evaluation is recorded" in model_card(folder)


@pytest.mark.parametrize(
    "value",
    [
        {"query": "a dog", "photos": 55, "results": [{"score": 0.5}]},  # search --json
        {"anna": 51000},
        {"pages": 51000, "skipped": []},
        {"a": {"acc1": 0.5, "skipped": 0.0}},  # of several models
        {"data": "d", "images": 5, "step": 1, "metrics": {"a": 1.0}, "owner": 3},
    ],
)
def test_other_json_in_the_folder_of_a_run_stays_out_of_the_card(model: Path, value: Any) -> None:
    written(model.parent / "other.json", value)
    (model.parent / "latin.json").write_bytes(b'{"skipped": "caf\xe9"}')
    (model.parent / "folder.json").mkdir()
    assert "No evaluation is recorded" in model_card(model)


def test_what_eval_writes_stands_in_the_card(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["eval", "retrieval", str(model), "--data", "scenes:test?n=4", "--json", str(model.parent / "mine.json")])
    metrics = json.loads((model.parent / "mine.json").read_text())
    rows = [line for line in model_card(model).splitlines() if line.startswith("| mine |")]
    assert len(rows) == sum(isinstance(value, float) for value in metrics.values())
    record_retrieval(model, "scenes", 4, 1, {"recall@1": 0.25})
    monkeypatch.chdir(model)
    assert "| retrieval: scenes, 4 images, at step 1 | recall@1 | 0.2500 |" in model_card(Path())
