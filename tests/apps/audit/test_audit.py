"""Audit: statistics against a literal loop, the rule on mixtures with known answers, and the verb's whole loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor

from kiloword.apps.audit import AuditOptions
from kiloword.apps.audit.labels import wrong_labels
from kiloword.apps.audit.outliers import rule
from kiloword.apps.audit.pairs import fits
from kiloword.apps.audit.similar import groups, near_duplicates
from kiloword.cli.main import main
from kiloword.types import Features


def unit(values: Tensor) -> Tensor:
    return torch.nn.functional.normalize(values, dim=-1)


def data(images: int = 40, captions: int = 3, noise: float = 0.08, dim: int = 24) -> tuple[Features, Features, Tensor]:
    """Images and captions near each other; the last caption of every image is general."""
    torch.manual_seed(0)
    vectors = unit(torch.randn(images, dim))
    owner = torch.arange(images).repeat_interleave(captions)
    texts = vectors[owner] + noise * torch.randn(len(owner), dim)
    texts[captions - 1 :: captions] += 0.15 * torch.ones(dim)
    return {"vec": vectors}, {"vec": unit(texts)}, owner


def score(images: Features, texts: Features) -> Tensor:
    return images["vec"] @ texts["vec"].T


def pairs(images: Features, texts: Features) -> Tensor:
    return (images["vec"] * texts["vec"]).sum(1)


def test_fits_follow_from_standard_scores_of_rows_and_columns() -> None:
    images, texts, owner = data(captions=1)
    found = fits(score, pairs, images, texts, owner, chunk=7)
    scores = score(images, texts).double()
    others = ~torch.eye(len(owner), dtype=torch.bool)
    row, column = (
        torch.stack([(s[n] - s[n][others[n]].mean()) / s[n][others[n]].std(correction=0) for n in range(len(s))])
        for s in (scores, scores.T)
    )
    weights = np.array(list(found.weights.values()))
    assert len(weights) == 2
    assert (weights >= 0).all()
    own = torch.stack([row.diagonal(), column.diagonal()], 1).numpy() @ weights
    chance = torch.stack([row[others], column.T[others]], 1).numpy() @ weights
    np.testing.assert_allclose(found.annotated, own - chance.mean(), atol=1e-5)
    np.testing.assert_allclose(np.sort(found.random), np.sort(chance - chance.mean()), atol=1e-5)
    assert found.random.std() == pytest.approx(1, abs=0.01)
    assert found.fitting.tolist() == [int((scores[others[:, t], t] >= scores[t, t]).sum()) for t in range(len(owner))]


def test_blocks_and_scale_do_not_change_fits() -> None:
    images, texts, owner = data()
    whole = fits(score, pairs, images, texts, owner)
    other = fits(lambda i, t: 3 + 9 * score(i, t), lambda i, t: 3 + 9 * pairs(i, t), images, texts, owner, chunk=11)
    np.testing.assert_allclose(other.annotated, whole.annotated, atol=1e-5)


def test_swapped_captions_fit_least_and_general_ones_do_not() -> None:
    images, texts, owner = data(images=200, captions=5)
    swapped = torch.arange(0, 100, 10)  # of 1000, first captions
    texts["vec"][swapped] = texts["vec"][swapped.roll(1)]
    found = fits(score, pairs, images, texts, owner)
    lowest = set(np.argsort(found.annotated)[: len(swapped)].tolist())
    assert len(lowest & set(swapped.tolist())) >= 9
    assert not {n for n in lowest if n % 5 == 4}, "general captions are no mismatches"


def mixture(share: float, mean: float, n: int = 20000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    wrong = rng.random(n) < share
    return np.where(wrong, rng.normal(size=n), rng.normal(mean, 0.7, n)), rng.normal(size=50000), wrong


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("precision", [0.5, 0.8, 0.95])
def test_the_rule_knows_its_precision_and_recall(share: float, precision: float) -> None:
    annotated, chance, wrong = mixture(share, 3.2)
    found = rule(annotated, chance, precision)
    flagged = annotated < found.threshold
    assert found.share == pytest.approx(share, rel=0.15)
    assert found.flagged == flagged.sum()
    assert wrong[flagged].mean() == pytest.approx(precision, abs=0.08)
    assert found.precision == pytest.approx(precision, abs=0.02)
    assert flagged[wrong].mean() == pytest.approx(found.recall, abs=0.05)


@pytest.mark.parametrize("mean", [0.0, 0.5, 1.5, 4.0])
def test_clean_data_is_not_flagged_whatever_the_model(mean: float) -> None:
    """A model that tells nothing, little, or much apart."""
    annotated, chance, _ = mixture(0.0, mean)
    assert rule(annotated, chance, 0.8).flagged <= 20


def photo(seed: int, noise: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((64, 64))
    return np.clip(np.asarray(small).astype(int) + rng.integers(-noise, noise + 1, (64, 64, 3)), 0, 255).astype(
        np.uint8
    )


def test_near_duplicates_need_features_and_pixels() -> None:
    images = {n: photo(n) for n in range(8)}
    images |= {8: photo(2, noise=9), 9: np.ascontiguousarray(images[3][:, ::-1]), 10: images[2]}
    torch.manual_seed(0)
    vectors = torch.randn(11, 16)
    vectors[8], vectors[10], vectors[9] = vectors[2] + 0.01, vectors[2], vectors[3] + 0.01
    vectors[5] = vectors[4]  # alike to the model, but not in pixels
    same = near_duplicates(unit(vectors), images.get, chunk=4)
    assert groups(same) == [[2, 8, 10], [3, 9]]
    assert not near_duplicates(unit(vectors), lambda _: None)


def test_wrong_labels_are_those_that_were_changed() -> None:
    torch.manual_seed(0)
    centres, labels = unit(torch.randn(4, 16)), torch.arange(200) % 4
    vectors = unit(centres[labels] + 0.15 * torch.randn(200, 16))
    assert wrong_labels(vectors, labels) == []
    given = labels.clone()
    given[[5, 50, 101]] = (given[[5, 50, 101]] + 1) % 4
    found = wrong_labels(vectors, given)
    assert {one.image for one in found} == {5, 50, 101}
    assert all(one.suggested == labels[one.image] and one.margin < 0 for one in found)
    assert wrong_labels(vectors, torch.full((200,), -1)) == []


def test_options_are_checked() -> None:
    for bad in ({"target_precision": 0.0}, {"target_precision": 1.1}, {"gallery": -1}, {"chunk": 0}):
        with pytest.raises(ValueError, match="expected"):
            replace(AuditOptions(), **bad).check()


@pytest.mark.slow
def test_the_loop_closes_in_two_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: object) -> str:
        main([str(word) for word in words])
        return capsys.readouterr().out

    small = ["--size", "debug", "--batch", 16, "--vocab", 300, "--precision", "fp32"]
    folder = tmp_path / "photos"
    folder.mkdir()
    for n in range(24):
        Image.fromarray(photo(n)).save(folder / f"{n:02d}.png")
        (folder / f"{n:02d}.txt").write_text(f"image {n} <b>bold</b>\nanother of {n}\n", encoding="utf-8")
    (folder / "07.png").write_bytes(b"no image")
    Image.fromarray(photo(3)).save(folder / "20.png")
    (folder / "c\td.png").write_bytes(b"no image")
    (folder / "c\td.txt").write_text("a key that is no word", encoding="utf-8")
    (folder / "e.txt").write_text("", encoding="utf-8")
    Image.fromarray(photo(30)).save(folder / "e.png")
    run("train", "clip", "--data", folder, "--steps", 2, "--bad-share", 0.5, "--out", tmp_path / "run", *small)
    out = tmp_path / "audit"
    drop = ["--drop", "mismatch", "unreadable", "duplicate-image"]
    said = run("audit", folder, "--model", tmp_path / "run/model", "--out", out, *drop)
    assert "train without them" in said
    whole = run("audit", folder, "--model", tmp_path / "run/model", "--out", tmp_path / "whole", "--drop", "label")
    assert "omits 0 of 50" in whole
    assert "train without them" not in whole
    found = json.loads((out / "audit.json").read_text(encoding="utf-8"))["findings"]
    assert (found["unreadable"], found["duplicate-image"]) == (3, 1)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;bold" in page
    assert "<b>bold" not in page
    keep = pyarrow.parquet.read_table(out / "keep.parquet").to_pylist()
    assert len(keep) == 50
    assert {("c\td", 0), ("e", -1)} <= {(row["key"], row["index"]) for row in keep if not row["keep"]}
    assert {(row["key"], row["reason"]) for row in keep if not row["keep"]} >= {
        ("07", "unreadable"),
        ("20", "duplicate-image"),
    }
    listed = pyarrow.parquet.read_table(out / "findings.parquet")
    assert len(listed) == sum(found.values())
    run("embed", tmp_path / "run/model", "--data", folder, "--dtype", "fp32", "--out", tmp_path / "features")
    run(
        "audit",
        folder,
        "--model",
        tmp_path / "run/model",
        "--out",
        tmp_path / "b",
        *drop,
        "--features",
        tmp_path / "features",
    )
    stored = pyarrow.parquet.read_table(tmp_path / "b/keep.parquet").to_pylist()
    assert [(row["key"], row["caption"], row["reason"]) for row in stored] == [
        (row["key"], row["caption"], row["reason"]) for row in keep
    ]
    assert [row["score"] for row in stored] == pytest.approx([row["score"] for row in keep], abs=1e-4)
    again = ["train", "clip", "--data", folder, "--steps", 2, "--keep", out / "keep.parquet", *small]
    run(*again, "--out", tmp_path / "kept")
    config = json.loads((tmp_path / "kept/config.json").read_text(encoding="utf-8"))
    assert config["recipe"]["data"]["keep"] == [str(out / "keep.parquet")]
    rows = [json.loads(line) for line in (tmp_path / "kept/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert not any(row.get("skipped") for row in rows), "the unreadable row is omitted"
    with pytest.raises(SystemExit):
        run("train", "clip", "--data", folder, "--steps", 2, *small, "--out", tmp_path / "kept")
    assert "holds another run" in capsys.readouterr().err
