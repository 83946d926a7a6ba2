"""Averages of models: exactly the ends, the mean between, and what cannot be averaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import refused
from folders import changed, model_folder
from kiloword.cli.main import main
from kiloword.models.card import model_card
from kiloword.models.model_folder import load_model

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
