"""Retrieval with more positives than the annotated ones, against ECCV Caption's evaluator transcribed list by list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kiloword
from folders import model_folder
from kiloword.api import Matcher
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.evaluation.metrics import average_precision_at_r
from kiloword.evaluation.retrieval import Positives, extra_positives

Ranked = dict[int, list[int]]


def literal(ranked: Ranked, truth: Ranked, k: int = 1) -> tuple[float, float, float]:
    """Recall@k, R-precision and mAP@R, a query at a time (eccv_caption/_metrics.py)."""
    recalls, precisions, maps = [], [], []
    for query, right in truth.items():
        items, matched = ranked[query], set(right)
        recalls.append(bool(set(items[:k]) & matched))
        at = []
        for r in range(1, len(matched) + 1):
            precision = len(set(items[:r]) & matched) / r
            at.append(precision if items[r - 1] in matched else 0)
        precisions.append(len(set(items[: len(matched)]) & matched) / len(matched))
        maps.append(np.mean(at))
    return float(np.mean(recalls)), float(np.mean(precisions)), float(np.mean(maps))


def ranked(scores: torch.Tensor) -> Ranked:
    return dict(enumerate(scores.argsort(dim=1, descending=True).tolist()))


def named(direction: str, k: int = 1) -> list[str]:
    return [f"{direction}_retrieval_extra_{name}" for name in (f"recall@{k}", "r_precision", "map_at_r")]


@pytest.mark.parametrize("chunk", [4, 100])
def test_metrics_are_eccv_captions(chunk: int) -> None:
    rng = np.random.default_rng(3)
    images, texts = (torch.tensor(rng.normal(size=(n, 8)), dtype=torch.float32) for n in (13, 31))

    def listed(queries: int, items: int) -> Ranked:
        asked = rng.permutation(queries)[: queries // 2].tolist()
        return {q: sorted(rng.permutation(items)[: rng.integers(1, 9)].tolist()) for q in asked}

    positives = Positives(listed(13, 31), listed(31, 13), 2)
    got = dict(
        extra_positives(lambda i, t: i["vec"] @ t["vec"].T, {"vec": images}, {"vec": texts}, positives, (1, 5), chunk)
    )
    scores = images @ texts.T
    for k in (1, 5):
        by_image, by_text = literal(ranked(scores), positives.texts, k), literal(ranked(scores.T), positives.images, k)
        assert [got[name] for name in named("text", k)] == pytest.approx(by_image)
        assert [got[name] for name in named("image", k)] == pytest.approx(by_text)
    assert got["extra_unmatched"] == 2


def test_map_at_r_of_ties_is_its_mean_over_their_orders() -> None:
    scores, relevant = torch.tensor([[3.0, 2, 2, 2, 1]]), torch.tensor([[False, True, False, True, True]])
    orders = [[0, *middle, 4] for middle in ((1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1))]
    mean = np.mean([literal({0: order}, {0: [1, 3, 4]})[2] for order in orders])
    assert float(average_precision_at_r(scores, relevant)) == pytest.approx(mean)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    return kiloword.load(model_folder(tmp_path_factory.mktemp("model") / "siglip"))


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images as COCO names them, each with two captions, COCO's annotations, and a table of extra positives."""
    folder, scenes = tmp_path_factory.mktemp("coco"), open_source("scenes:test?n=10", 32)
    (folder / "val2014").mkdir()
    annotations, table = [], ["image,caption"]
    for row in range(10):
        name = f"COCO_val2014_{100 + row:012d}"
        Image.fromarray(scenes.record(row).image).save(folder / "val2014" / f"{name}.png")
        captions = [f"thing {row} of {c}" for c in range(2)]
        (folder / "val2014" / f"{name}.txt").write_text("\n".join(captions))
        annotations += [{"id": 7 * row + c, "image_id": 100 + row, "caption": f"{captions[c]} "} for c in range(2)]
        table += [f"{name}.jpg,thing {(row + 3) % 10} of 1"]
    (folder / "captions.json").write_text(json.dumps({"annotations": annotations}))
    (folder / "extra.csv").write_text("\n".join(table))
    return folder


def scores_of(model: Matcher, coco: Path) -> torch.Tensor:
    """[10, 20]"""
    images = model.encode_image([Image.open(file) for file in sorted((coco / "val2014").glob("*.png"))])
    return model.score(images, [f"thing {row} of {c}" for row in range(10) for c in range(2)])


def test_eccv_caption_as_distributed(model: Matcher, coco: Path) -> None:
    """Only listed queries count, with the listed positives; ids that the data lacks are ignored, and counted."""
    of_images = {"100": [0, 1, 7], "103": [21, 8, 999], "555": [0], "104": [12345]}
    of_texts = {"0": [100, 101, 105], "8": [101], "63": [109, 777]}
    (coco / "eccv_image_to_caption.json").write_text(json.dumps(of_images))
    (coco / "eccv_caption_to_image.json").write_text(json.dumps(of_texts))
    for file in ("eccv_image_to_caption.json", "eccv_caption_to_image.json"):
        source = f"{coco / file}?captions={coco / 'captions.json'}"
        got = evaluate(model, "retrieval", str(coco / "val2014"), extra_positives=source)
        scores = scores_of(model, coco)
        by_image = literal(ranked(scores), {0: [0, 1, 2], 3: [6, 3]})
        by_text = literal(ranked(scores.T), {0: [0, 1, 5], 3: [1], 18: [9]})
        assert [got[name] for name in named("text")] == pytest.approx(by_image)
        assert [got[name] for name in named("image")] == pytest.approx(by_text)
        assert got["extra_unmatched"] == 2


def test_a_table_adds_to_the_annotated_pairs(model: Matcher, coco: Path) -> None:
    got = evaluate(model, "retrieval", str(coco / "val2014"), extra_positives=str(coco / "extra.csv"))
    scores = scores_of(model, coco)
    of_images = {i: sorted({2 * i, 2 * i + 1, 2 * ((i + 3) % 10) + 1}) for i in range(10)}
    of_texts = {t: [i for i, right in of_images.items() if t in right] for t in range(20)}
    assert [got[name] for name in named("text")] == pytest.approx(literal(ranked(scores), of_images))
    assert [got[name] for name in named("image")] == pytest.approx(literal(ranked(scores.T), of_texts))
    assert "extra_unmatched" not in got


def test_folds_are_equal_parts_of_the_images(model: Matcher, coco: Path) -> None:
    got = evaluate(model, "retrieval", str(coco / "val2014"), folds=3, ks=(1, 2))
    scores, recalls = scores_of(model, coco), []
    for first in (0, 3, 6):
        part = scores[first : first + 3, 2 * first : 2 * first + 6]
        images = literal(ranked(part.T), {t: [t // 2] for t in range(6)}, 2)[0]
        recalls.append((literal(ranked(part), {i: [2 * i, 2 * i + 1] for i in range(3)}, 2)[0], images))
    expected = np.mean(recalls, 0).tolist()
    assert [got[f"{name}_retrieval_recall@2_folds"] for name in ("text", "image")] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_positives": "x_image_to_caption.json"}, "names captions by COCO's ids: name the annotations"),
        ({"extra_positives": "x_image_to_caption.json?captions=captions.json"}, "caption_to_image.json"),
        ({"extra_positives": "z_image_to_caption.json?captions=y_image_to_caption.json"}, "has no list `annotations`"),
        ({"extra_positives": "z_image_to_caption.json?captions=z.json"}, "has no list `annotations`"),
        ({"extra_positives": "y_image_to_caption.json?captions=captions.json"}, "is no object of lists of ids"),
        ({"extra_positives": "y_image_to_caption.json?caption_file=a"}, "no option 'caption_file'"),
        ({"extra_positives": "other.csv"}, "lists no image and caption of the data"),
        ({"extra_positives": "extra.csv", "shortlist": 5}, "omit --shortlist"),
        ({"folds": 11}, "--folds is 11: expected 1 to 10"),
        ({"folds": 0}, "--folds is 0"),
    ],
)
def test_bad_positives(
    options: dict[str, Any], message: str, model: Matcher, coco: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(coco)
    for name, values in {
        "x_image_to_caption": {"100": [0]},
        "z_image_to_caption": {},
        "z_caption_to_image": {},
        "y_image_to_caption": [1],
        "y_caption_to_image": {},
        "z": {"annotations": [{"id": 1, "image_id": 2}]},
    }.items():
        Path(f"{name}.json").write_text(json.dumps(values))
    Path("other.csv").write_text("image,caption\nelsewhere.png,a thing\n")
    with pytest.raises((ValueError, OSError)) as error:
        evaluate(model, "retrieval", "val2014", **options)
    assert message in str(error.value)
