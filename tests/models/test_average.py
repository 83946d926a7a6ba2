"""Averages of models: exactly the ends, the mean between, and what cannot be averaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from folders import model_folder
from kiloword.cli.main import main
from kiloword.models.card import model_card
from kiloword.models.model_folder import load_model

MODEL = ("config.json", "model.safetensors", "tokenizer.json")


def other(folder: Path, seed: int) -> Path:
    """The model in `folder`, with other weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    moved = {name: value + torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    save_file(moved, folder / "model.safetensors")
    return folder


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [other(model_folder(tmp_path / name), seed) for seed, name in enumerate("abc")]


def average(*words: object) -> None:
    main(["average", *map(str, words)])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        average(*words)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("alpha", "end"), [(0, 0), (1, 1)])
def test_the_ends_are_the_models(models: list[Path], tmp_path: Path, alpha: int, end: int) -> None:
    average(*models[:2], "--alpha", alpha, "--out", tmp_path / "m")
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == (models[end] / "tokenizer.json").read_bytes()
    expected, weights = load_file(models[end] / "model.safetensors"), load_file(tmp_path / "m" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], x) for name, x in expected.items())


@pytest.mark.parametrize(
    ("count", "words", "shares"), [(2, ["--alpha", "0.3"], [0.7, 0.3]), (2, [], [0.5, 0.5]), (3, [], [1 / 3] * 3)]
)
def test_the_mean(
    models: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    count: int,
    words: list[str],
    shares: list[float],
) -> None:
    average(*models[:count], *words, "--out", tmp_path / "m")
    parts = [load_file(folder / "model.safetensors") for folder in models[:count]]
    weights = {name: x.data for name, x in load_model(tmp_path / "m")[0].state_dict().items()}
    for name in parts[0]:
        expected = sum(share * part[name].double() for share, part in zip(shares, parts, strict=True))
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(weights[name], expected.float()), name
    count_all = sum(x.numel() for x in parts[0].values())
    assert f"{count_all:,} parameters: {shares[0]:.4g} of {models[0]}, " in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"README.md", *MODEL}


def test_the_mean_of_two_states_of_a_run(tmp_path: Path) -> None:
    run = "train siglip --data scenes?n=32 --size debug --batch 8 --save-every 1 --keep-states 2 --quiet --steps 2"
    main([*run.split(), "--out", str(tmp_path / "run")])
    states = [tmp_path / "run" / "state" / f"step-{step:09d}" for step in (1, 2)]
    average(*states, "--alpha", 0.25, "--out", tmp_path / "m")
    a, b = (load_model(state)[0].state_dict() for state in states)
    assert not torch.equal(a["head.log_scale"], b["head.log_scale"])
    for name, value in load_file(tmp_path / "m" / "model.safetensors").items():
        assert torch.equal(value, (0.75 * a[name].double() + 0.25 * b[name].double()).float()), name
    assert "0.75 of" in (tmp_path / "m" / "README.md").read_text()
    assert "(1 steps on scenes" in (tmp_path / "m" / "README.md").read_text().replace("\\", "")


def test_an_average_says_of_what(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its card, in its config.json, and in the cards of what is made of it."""
    monkeypatch.chdir(tmp_path)
    for n, folder in enumerate(models):
        changed(folder, steps=1000 * (n + 1), data=f"shards-{n}", size=f"size-{n}")
    average("a", "b", "--alpha", "0.25", "--out", "m")
    file = json.loads(Path("m/config.json").read_text())
    assert file["steps"] == 0
    assert file["data"] == "averaged: 0.75 of a (1,000 steps on shards-0), 0.25 of b (2,000 steps on shards-1)"
    text = Path("m/README.md").read_text()
    assert "The mean of the weights of several models, not trained further: 0.75 of a (1,000 steps on shards" in text
    assert "Trained for" not in text
    assert "Not trained by kiloword" not in text
    assert text == model_card(Path("m"))
    changed(models[2], steps=0, data="open_clip ViT-B-32")
    average("m", "c", "--out", "again")
    assert "0.5 of m (averaged: 0.75 of a (" in Path("again/README.md").read_text()
    assert "0.5 of c (open\\_clip ViT-B-32)" in Path("again/README.md").read_text()


def changed(folder: Path, **values: object) -> Path:
    """The folder with other values in its config.json."""
    file = json.loads((folder / "config.json").read_text())
    for name, value in values.items():
        part, at = file, name.split("__")
        for key in at[:-1]:
            part = part[key]
        part[at[-1]] = value
    (folder / "config.json").write_text(json.dumps(file))
    return folder


def test_what_models_share_keeps_its_bytes(models: list[Path], tmp_path: Path) -> None:
    """Stored tokens of a frozen trunk are known by a digest of its bytes, which tell -0 from 0."""
    weights = load_file(models[0] / "model.safetensors")
    zeros = {name: torch.zeros_like(value).neg() for name, value in weights.items()}
    for folder in models:
        save_file(zeros, folder / "model.safetensors")
    average(*models, "--out", tmp_path / "m")
    assert all(value.signbit().all() for value in load_file(tmp_path / "m" / "model.safetensors").values())


def test_models_that_do_not_fit(models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = models
    out = ("--out", tmp_path / "m")
    clip = model_folder(tmp_path / "clip", "clip")
    assert "method is 'siglip' and 'clip'" in refused(capsys, a, clip, *out)
    changed(c, settings={"scale": 5.0})
    assert "settings.scale is 10.0 and 5.0" in refused(capsys, a, b, c, *out)
    changed(c, settings={}, model__image__heads=4)
    assert "model.image.heads is 2 and 4" in refused(capsys, a, c, *out)
    whole = load_file(b / "model.safetensors")
    save_file({**whole, "head.bias": whole["head.bias"] * torch.nan}, b / "model.safetensors")
    assert "head.bias is NaN" in refused(capsys, a, b, *out)
    save_file({k: v for k, v in whole.items() if k != "head.bias"}, b / "model.safetensors")
    assert "head.bias" in refused(capsys, a, b, *out)
    words = json.loads((a / "tokenizer.json").read_text())
    words["added_tokens"][0]["content"] = "<other>"
    (a / "tokenizer.json").write_text(json.dumps(words))
    assert refused(capsys, a, b, *out)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a"], "two models or more"),
        (["a", "b", "c", "--alpha", "0.5"], "--alpha is for two models, not 3"),
        (["a", "b", "--alpha", "1.5"], "--alpha is 1.5"),
        (["a", "b", "--alpha", "nan"], "--alpha is nan"),
        (["a", "b", "--out", "a"], "a exists"),
        (["a", "x"], "x is not a folder"),
    ],
)
@pytest.mark.usefixtures("models")
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *words, *([] if "--out" in words else ["--out", "m"]))
