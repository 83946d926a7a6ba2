"""Audit: statistics against a literal loop, the rule on mixtures with known answers, and the verb's whole loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from commands import held_by_another, refused, said
from folders import model_folder
from kiloword.apps.audit.labels import wrong_labels
from kiloword.apps.audit.pairs import fits, rule
from kiloword.apps.audit.similar import near_duplicates, repeated
from kiloword.types import BadSample, Features


def data(images: int = 40, captions: int = 3, noise: float = 0.08, dim: int = 24) -> tuple[Features, Features, Tensor]:
    """Images and captions near each other; the last caption of every image is general."""
    torch.manual_seed(0)
    vectors = F.normalize(torch.randn(images, dim))
    owner = torch.arange(images).repeat_interleave(captions)
    texts = vectors[owner] + noise * torch.randn(len(owner), dim)
    texts[captions - 1 :: captions] += 0.15 * torch.ones(dim)
    return {"vec": vectors}, {"vec": F.normalize(texts)}, owner


def standard_scores(own: np.ndarray, scores: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By row and by column: of annotated pairs [2, T], whose scores are `own` [T], and of all others [2, R]."""
    other = np.arange(len(scores))[:, None] != owner
    row, column = (np.array([(line[kept].mean(), line[kept].std()) for line, kept in zip(*of, strict=True)]).T
                   for of in ((scores, other), (scores.T, other.T)))  # fmt: skip
    by_row, by_column = (scores - row[0][:, None]) / row[1][:, None], (scores - column[0]) / column[1]
    annotated = np.stack([(own - row[0][owner]) / row[1][owner], (own - column[0]) / column[1]])
    return annotated, np.stack([by_row[other], by_column[other]])


@pytest.mark.parametrize("captions", [1, 3])
def test_fits_follow_from_standard_scores_of_rows_and_columns(captions: int) -> None:
    images, texts, owner = data(captions=captions)
    texts["vec"], owner = texts["vec"][captions - 1 :], owner[captions - 1 :]  # the first image has one caption
    found, of = fits(images, texts, owner, chunk=7), owner.numpy()
    i, t = images["vec"].double().numpy(), texts["vec"].double().numpy()
    own, chance = standard_scores((i[of] * t).sum(1), i @ t.T, of)
    if captions > 1:
        totals = np.stack([t[of == n].sum(0) for n in range(len(i))])
        others = totals[of] - t
        others = others / np.maximum(np.linalg.norm(others, axis=1, keepdims=True), 1e-12)
        others[0] = 0  # no other caption
        means = totals / np.linalg.norm(totals, axis=1, keepdims=True)
        more = standard_scores((others * t).sum(1), means @ t.T, of)
        own, chance = np.concatenate([own, more[0]]), np.concatenate([chance, more[1]])
    within = np.cov(own) + np.cov(chance)
    within += 1e-3 * np.trace(within) / len(own) * np.eye(len(own))
    kept, weights = list(range(len(own))), -np.ones(len(own))
    while (weights < 0).any():  # Fisher's discriminant, of the statistics that count for a pair
        weights[:] = 0
        weights[kept] = np.linalg.solve(within[np.ix_(kept, kept)], (own.mean(1) - chance.mean(1))[kept])
        kept = [n for n in kept if weights[n] > weights.min()]
    centre, spread = (weights @ chance).mean(), (weights @ chance).std(ddof=1)
    np.testing.assert_allclose(found.annotated, (weights @ own - centre) / spread, atol=1e-4)
    np.testing.assert_allclose(np.sort(found.random), np.sort((weights @ chance - centre) / spread), atol=1e-4)
    scaled = (lambda a, b: 3 + 9 * a["vec"] @ b["vec"].T), (lambda a, b: 3 + 9 * (a["vec"] * b["vec"]).sum(1))
    np.testing.assert_allclose(fits(images, texts, owner, 0.8, *scaled).annotated, found.annotated, atol=1e-5)
    with pytest.raises(ValueError, match="7 images"):
        fits({"vec": images["vec"][:7]}, texts, owner[owner < 7])
    eye = {"vec": torch.eye(8)[[0, 0, *range(2, 8)]]}  # two images and their captions are the same
    texts = {"vec": eye["vec"].clone()}
    texts["vec"][7] *= -1  # below all other images, which do not match it either
    assert fits(eye, texts, torch.arange(8)).fitting.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_swapped_captions_fit_least_and_general_ones_do_not() -> None:
    images, texts, owner = data(images=200, captions=5)
    swapped = torch.arange(0, 100, 10)  # of 1000, first captions
    texts["vec"][swapped] = texts["vec"][swapped.roll(1)]
    lowest = set(np.argsort(fits(images, texts, owner).annotated)[: len(swapped)].tolist())
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
    assert found.threshold is not None
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
    noisy = np.asarray(small).astype(int) + rng.integers(-noise, noise + 1, (64, 64, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def test_near_duplicates_need_features_and_pixels() -> None:
    images = {n: photo(n) for n in range(8)}
    images |= {8: photo(2, noise=9), 9: np.ascontiguousarray(images[3][:, ::-1]), 10: images[2]}
    torch.manual_seed(0)
    vectors = torch.randn(11, 16)
    vectors[8], vectors[10], vectors[9] = vectors[2] + 0.01, vectors[2], vectors[3] + 0.01
    vectors[5] = vectors[4]  # alike to the model, but not in pixels
    found = near_duplicates(F.normalize(vectors), images.__getitem__)
    assert [pair for *pair, _ in found] == [[2, 8], [2, 10], [3, 9]]
    assert 0.9 <= found[0][2] < found[1][2] == pytest.approx(found[2][2]) == 1.0

    def unreadable(image: int) -> np.ndarray:
        raise BadSample("gone")

    assert not near_duplicates(F.normalize(vectors), unreadable)
    assert repeated(["A dog.", "cat", "a  dog", "A DOG", "Cat.", "x"]) == [[0, 2, 3], [1, 4]]


@pytest.mark.parametrize("classes", [2, 4])
def test_wrong_labels_are_those_that_were_changed(classes: int) -> None:
    torch.manual_seed(0)
    centres, labels = F.normalize(torch.randn(classes, 16)), torch.arange(200) % classes
    noise = torch.randn(200, 16).index_fill(0, torch.tensor([5, 50, 101]), 0)  # these are typical of their classes
    vectors = F.normalize(centres[labels] + 0.15 * noise)
    assert wrong_labels(vectors, labels) == []
    given = labels.index_add(0, torch.tensor([5, 50, 101]), torch.ones_like(labels[:3])) % classes
    found = wrong_labels(vectors, given)
    assert {image for _, image, *_ in found} == {5, 50, 101}
    assert all(suggested == labels[image] and margin < 0 for margin, image, _, suggested in found)
    few = torch.where(torch.arange(200) < 2, 9, labels)  # a class of two images is not judged
    assert wrong_labels(vectors, few) == wrong_labels(vectors, torch.full((200,), -1)) == []


def test_what_is_found_in_a_folder_and_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model, out = tmp_path / "photos", model_folder(tmp_path / "model"), tmp_path / "two words"
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
    judge = ["audit", folder, "--model", model, "--drop", "mismatch", "unreadable", "duplicate-image"]
    said(capsys, *judge, "--out", out)
    found = json.loads((out / "audit.json").read_text(encoding="utf-8"))
    assert (found["findings"]["unreadable"], found["findings"]["duplicate-image"]) == (3, 1)
    keep = pyarrow.parquet.read_table(out / "keep.parquet").to_pylist()
    assert list(keep[0]) == ["key", "index", "caption", "keep", "reason", "score"]
    assert found["keep"]["rows"] == len(keep) == 50
    dropped = {(row["key"], row["index"], row["reason"]) for row in keep if not row["keep"]}
    assert dropped >= {("c\td", 0, "unreadable"), ("e", -1, "unreadable"), ("20", 0, "duplicate-image")}
    findings = pyarrow.parquet.read_table(out / "findings.parquet")
    assert findings.column_names == ["kind", "key", "row", "index", "caption", "score", "other", "detail"]
    assert len(findings) == sum(found["findings"].values())
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "duplicate-image" in page
    assert "another of 3" in page or "&lt;b&gt;bold" in page
    whole = said(capsys, "audit", folder, "--model", model, "--out", tmp_path / "whole", "--drop", "label")
    assert "omits 0 of 50" in whole
    said(capsys, "embed", model, "--data", folder, "--dtype", "fp32", "--out", tmp_path / "features")
    by_features = ["audit", folder, "--features", tmp_path / "features", *judge[4:]]
    said(capsys, *by_features, "--out", tmp_path / "b")
    stored = pyarrow.parquet.read_table(tmp_path / "b/keep.parquet").to_pylist()
    columns = ("key", "caption", "reason")
    assert [[row[c] for c in columns] for row in stored] == [[row[c] for c in columns] for row in keep]
    assert [row["score"] for row in stored] == pytest.approx([row["score"] for row in keep], abs=1e-4)
    with held_by_another(out):
        assert "two words" in refused(capsys, *judge, "--out", out)


@pytest.mark.parametrize("method", ["llip", "prolip"])
def test_scores_of_other_heads(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_folder(tmp_path / "model", method)
    judge = ["audit", "scenes:test?n=12", "--model", model, "--out", tmp_path / "out"]
    said(capsys, *judge)
    assert len(pyarrow.parquet.read_table(tmp_path / "out/keep.parquet")) == 12
    for words in ("--features x --image-features y", "--model=", "--target-precision 0", "--target-precision 1.5"):
        refused(capsys, *judge, *words.split())
