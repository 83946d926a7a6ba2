"""Model cards show evaluations of the run alone, and say of changed models what is true; averages of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kiloword
from commands import refused
from folders import changed, model_folder
from kiloword.cli.main import main
from kiloword.models.card import model_card, record_retrieval, write_card
from kiloword.models.model_folder import load_model


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
    monkeypatch.chdir(model)
    rows = [line for line in model_card(Path()).splitlines() if line.startswith("| mine |")]
    assert len(rows) == sum(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("siglip", ""),
        ("llip+my_losses.focal:my_loss", ', method="llip+my_losses.focal:my_loss"'),
        ('a:b"); import os; os.system("id', ""),
        ("a:b\n#", ""),
    ],
)
def test_the_code_of_a_card_names_a_method_that_is_code(method: str, named: str, tmp_path: Path) -> None:
    """And holds nothing else that a stranger's config.json says."""
    folder = changed(model_folder(tmp_path / "model"), "config.json", method=method)
    write_card(folder)
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    needs = ["# needs my_losses.focal, from the author of the model, in this folder or on PYTHONPATH"] if named else []
    load = f'matcher = kiloword.load("FOLDER"{named})'
    assert code.splitlines() == ["import kiloword", *needs, load, 'matcher.score(["photo.jpg"], ["a dog"])']


def test_a_card_tells_what_the_run_recorded_as_text(model: Path, tmp_path: Path) -> None:
    data = "<img src=x>|s3://u:secret@b\n# title"
    folder = changed(model, "config.json", steps=1200, data=data)
    (tmp_path / "run" / "zeroshot.json").write_text(json.dumps({"acc1": 0.5, "skipped": 0.0}))
    rows = [{"step": 1, "val/rsum": 1.0}, {"step": 2, "val/rsum": 2.0}, {"step": 3, "loss": 1.0}]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{broken")
    write_card(folder)
    text = (folder / "README.md").read_text()
    assert "\nlibrary_name: kiloword\n" in text
    assert "1,200 steps" in text
    assert "| zeroshot | acc1 | 0.5000 |" in text
    assert "| validation at step 2 | rsum | 2.0000 |" in text
    assert "<img" not in text.replace(r"\<img", "")
    assert "\n# title" not in text
    assert kiloword.load(folder).card == text
    (tmp_path / "run" / "history.jsonl").write_text('{"val": {"dev": ["s3://u:secret@b/dev", 8]}}\n[')
    record_retrieval(folder, "scenes:test", 500, 1200, {"recall@1": 0.25})
    text = (folder / "README.md").read_text()
    assert "8 images, at step 2 | rsum | 2.0000 |" in text
    assert "secret" not in text
    assert "| retrieval: scenes:test, 500 images, at step 1,200 | recall@1 | 0.2500 |" in text


# Averages: exactly the ends, the mean between, and what cannot be averaged


MODEL = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Three of other weights; a bias of -0, as digests of bytes tell it from 0."""
    folders = [model_folder(tmp_path / name) for name in "abc"]
    generator = torch.Generator().manual_seed(0)
    for folder in folders:
        weights = load_file(folder / "model.safetensors")
        moved = {name: value + torch.randn(value.shape, generator=generator) for name, value in weights.items()}
        save_file({**moved, "head.bias": torch.zeros_like(moved["head.bias"]).neg()}, folder / "model.safetensors")
    return folders


def average(*words: object) -> None:
    main(["average", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        (["--alpha", 0], [1, 0]),
        (["--alpha", 1], [0, 1]),
        (["--alpha", 0.3], [0.7, 0.3]),
        ([], [0.5, 0.5]),
        ([], [1 / 3] * 3),
    ],
)
def test_the_mean(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[object], shares: list[float]
) -> None:
    """Bit for bit."""
    parts = [load_file(folder / "model.safetensors") for folder in models[: len(shares)]]
    average(*models[: len(shares)], *words, "--out", tmp_path / "m")
    weights = load_model(tmp_path / "m")[0].state_dict()
    for name in parts[0]:
        expected = torch.stack([share * part[name].double() for share, part in zip(shares, parts, strict=True)]).sum(0)
        assert torch.equal(weights[name], expected.float()), name
    assert weights["head.bias"].signbit().all()
    assert f"{sum(x.numel() for x in parts[0].values()):,}" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"README.md", *MODEL}


def test_an_average_says_of_what(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its card, in its config.json, and in the cards of what is made of it."""
    monkeypatch.chdir(tmp_path)
    for n, folder in enumerate(models):
        changed(folder, "config.json", steps=1000 * (n + 1), data=f"shards-{n}", size=f"size-{n}")
    average("a", "b", "--alpha", "0.25", "--out", "m")
    file = json.loads(Path("m/config.json").read_text())
    assert file["steps"] == 0
    assert file["data"] == "averaged: 0.75 of a (1,000 steps on shards-0), 0.25 of b (2,000 steps on shards-1)"
    text = Path("m/README.md").read_text()
    assert file["data"] in text
    assert text == model_card(Path("m"))
    average("m", "c", "--out", "again")
    assert "0.5 of m (averaged: 0.75 of a (" in Path("again/README.md").read_text()


def test_what_is_refused(models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = models
    out = ("--out", tmp_path / "m")
    for words, says in (
        ((a, *out), "two models or more"),
        ((a, b, c, "--alpha", 0.5, *out), "--alpha is 0.5 for 3 models"),
        ((a, b, "--alpha", 1.5, *out), "--alpha is 1.5"),
        ((a, b, "--alpha", "nan", *out), "--alpha is nan"),
        ((a, b, "--out", a), "a exists"),
        ((a, tmp_path / "x", *out), "x is not a folder"),
        ((a, model_folder(tmp_path / "clip", "clip"), *out), "method is 'siglip' and 'clip'"),
    ):
        assert says in refused(capsys, "average", *words)
    changed(c, "config.json", settings={"scale": 5.0})
    assert "settings.scale is 10.0 and 5.0" in refused(capsys, "average", a, b, c, *out)
    changed(c, "config.json", settings={}, model__image__heads=4)
    assert "model.image.heads is 2 and 4" in refused(capsys, "average", a, c, *out)
    whole = load_file(b / "model.safetensors")
    for wrong in ({"head.bias": whole["head.bias"] * torch.nan}, {"head.scale": whole["head.bias"]}):
        save_file({k: v for k, v in whole.items() if k != "head.bias"} | wrong, b / "model.safetensors")
        assert "head.bias" in refused(capsys, "average", a, b, *out)
    added = json.loads((a / "tokenizer.json").read_text())["added_tokens"]
    changed(a, "tokenizer.json", added_tokens=[{**added[0], "content": "<other>"}, *added[1:]])
    assert refused(capsys, "average", a, b, *out)
    assert not (tmp_path / "m").exists()
