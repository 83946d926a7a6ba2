"""`--dim` of embed, audit and eval: what each computes is what the first numbers of the whole features give."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from folders import model_folder
from kiloword.api import load
from kiloword.cli.main import main
from kiloword.evaluation import evaluate
from kiloword.stores.features import FeatureStore
from photo_folders import refused

SCENES = "scenes?n=24&captions=2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "model", "siglip+matryoshka")


def run(*words: object) -> None:
    main([str(word) for word in (*words, "--device", "cpu")])


@pytest.fixture(scope="module")
def stores(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Feature stores of all 16 numbers and of 8."""
    found = {dim: tmp_path_factory.mktemp("stores") / str(dim) for dim in (16, 8)}
    for dim, out in found.items():
        run("embed", model, "--data", SCENES, "--dtype", "fp32", "--out", out, "--dim", dim)
    return found


def test_a_store_has_the_first_numbers_and_remembers_how_many(
    model: Path, stores: dict[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = (FeatureStore(stores[dim]) for dim in (16, 8))
    assert (whole.dim, part.dim) == (16, 8)
    for a, b in ((whole.images(), part.images()), (whole.texts(), part.texts())):
        torch.testing.assert_close(F.normalize(torch.tensor(a)[:, :8], dim=1), torch.tensor(b))
    same = ("embed", model, "--data", SCENES, "--dtype", "fp32", "--out", stores[8])
    assert "holds other features" in refused(capsys, *same)
    assert " dim 8 there, " in refused(capsys, *same, "--dim", 4)


def test_an_audit_follows_the_store(
    model: Path, stores: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("audit", SCENES, "--model", model)
    run(*words, "--out", tmp_path / "dim", "--dim", 8)
    run(*words, "--out", tmp_path / "store", "--features", stores[8])
    dim, store = (
        [row["score"] for row in pq.read_table(tmp_path / n / "keep.parquet").to_pylist()] for n in ("dim", "store")
    )
    assert dim == pytest.approx(store, abs=1e-4)
    said = refused(capsys, *words, "--out", tmp_path / "bad", "--features", stores[16], "--dim", 8)
    assert "has features of 16 numbers, and --dim asks for 8" in said


def test_an_evaluation_of_the_first_numbers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "values.json"
    run("eval", "retrieval", model, "--data", SCENES, "--dim", 5, "--json", out)
    assert "not on its first 5" in capsys.readouterr().err
    assert json.loads(out.read_text()) == pytest.approx(dict(evaluate(load(model, dim=5), "retrieval", SCENES)))


def test_what_has_no_first_numbers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ("--data", SCENES)
    embed = ("embed", model, *data, "--out", tmp_path / "t")
    llip = model_folder(tmp_path / "llip", "llip")
    for words, word in (
        ((*embed, "--dim", 0), "0 was asked for: expected 1 to 16"),
        (("eval", "retrieval", model, *data, "--dim", 17), "17 was asked for"),
        ((*embed, "--tokens", "--dim", 8), "--dim are for features"),
        (("embed", llip, *data, "--out", tmp_path / "t", "--dim", 8), "more than the cosine"),
        (("eval", "retrieval", llip, *data, "--dim", 8), "more than the cosine"),
    ):
        assert word in refused(capsys, *words)
