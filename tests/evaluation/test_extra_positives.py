"""ECCV Caption's metrics against a literal transcription of its code, and its files as they are distributed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kiloword.api import Matcher
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate
from kiloword.evaluation.retrieval import Positives, extra_recalls

Ranked = dict[int, list[int]]


def literal(ranked: Ranked, truth: Ranked, k: int = 1) -> list[float]:
    """R-precision, mAP@R and recall@k, a query at a time (arXiv:2204.03359, section 5)."""
    recalls, precisions, maps = [], [], []
    for query, right in truth.items():
        items, matched = ranked[query], set(right)
        recalls.append(bool(set(items[:k]) & matched))
        shares = [len(set(items[:r]) & matched) / r for r in range(1, len(matched) + 1)]
        maps.append(np.mean([share * (item in matched) for share, item in zip(shares, items, strict=False)]))
        precisions.append(shares[-1])
    return [float(np.mean(values)) for values in (precisions, maps, recalls)]


def ranked(scores: torch.Tensor) -> Ranked:
    return dict(enumerate(scores.argsort(dim=1, descending=True).tolist()))


def named(direction: str, k: int = 1) -> list[str]:
    return [f"{direction}_retrieval_extra_{name}" for name in ("r_precision", "map_at_r", f"recall@{k}")]


@pytest.mark.parametrize("chunk", [4, 100])
def test_metrics_are_eccv_captions(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiloword.evaluation.retrieval.CHUNK", chunk)
    rng = np.random.default_rng(3)
    images, texts = (torch.tensor(rng.normal(size=(n, 8)), dtype=torch.float32) for n in (13, 31))

    def listed(queries: int, items: int) -> Ranked:
        asked = rng.permutation(queries)[: queries // 2].tolist()
        return {q: sorted(rng.permutation(items)[: rng.integers(1, 9)].tolist()) for q in asked}

    positives, vec = Positives(listed(13, 31), listed(31, 13), 2), lambda i, t: i["vec"] @ t["vec"].T
    got = dict(extra_recalls(vec, {"vec": images}, {"vec": texts}, positives, (1, 5)))
    scores = images @ texts.T
    for k in (1, 5):
        assert [got[name] for name in named("text", k)] == pytest.approx(literal(ranked(scores), positives.texts, k))
        assert [got[name] for name in named("image", k)] == pytest.approx(
            literal(ranked(scores.T), positives.images, k)
        )
    assert got["extra_unmatched"] == 2


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten images as COCO names them, each with two captions, and COCO's annotations."""
    folder, scenes = tmp_path_factory.mktemp("coco"), open_source("scenes:test?n=10", 32)
    (folder / "val2014").mkdir()
    annotations = []
    for row in range(10):
        name = f"COCO_val2014_{100 + row:012d}"
        Image.fromarray(scenes.record(row).image).save(folder / "val2014" / f"{name}.png")
        captions = [f"thing {row} of {c}" for c in range(2)]
        (folder / "val2014" / f"{name}.txt").write_text("\n".join(captions))
        annotations += [{"id": 7 * row + c, "image_id": 100 + row, "caption": f"{captions[c]} "} for c in range(2)]
    (folder / "captions.json").write_text(json.dumps({"annotations": annotations}))
    return folder


def test_files_as_distributed(coco: Path, matcher: Matcher) -> None:
    """Only listed queries count, with the listed positives; ids that the data lacks are ignored, and counted."""
    of_images = {"100": [0, 1, 7], "103": [21, 8, 999], "555": [0], "104": [12345], "cover": [1]}
    of_texts = {"0": [100, 101, 105], "8": [101], "63": [109, 777]}
    (coco / "eccv_image_to_caption.json").write_text(json.dumps(of_images))
    (coco / "eccv_caption_to_image.json").write_text(json.dumps(of_texts))
    images = matcher.encode_image([Image.open(file) for file in sorted((coco / "val2014").glob("*.png"))])
    scores = matcher.score(images, [f"thing {row} of {c}" for row in range(10) for c in range(2)])
    for file in ("eccv_image_to_caption.json", "eccv_caption_to_image.json"):
        source = f"{coco / file}?captions={coco / 'captions.json'}"
        got = evaluate(matcher, "retrieval", str(coco / "val2014"), extra_positives=source)
        by_image = literal(ranked(scores), {0: [0, 1, 2], 3: [6, 3]})
        by_text = literal(ranked(scores.T), {0: [0, 1, 5], 3: [1], 18: [9]})
        assert [got[name] for name in named("text")] == pytest.approx(by_image)
        assert [got[name] for name in named("image")] == pytest.approx(by_text)
        assert got["extra_unmatched"] == 3


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ("x_image_to_caption.json", "captions_val2014"),
        ("x_image_to_caption.json?captions=captions.json", "caption_to_image"),
        ("z_image_to_caption.json?captions=z_caption_to_image.json", "annotations"),
        ("y_image_to_caption.json?captions=captions.json", "lists of ids"),
        ("z_image_to_caption.json?captions=captions.json", "no image and caption"),
        ("other.csv", "ECCV Caption"),
    ],
)
def test_refusals(extra: str, word: str, coco: Path, matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(coco)
    files = {"x_image_to_caption": {"100": [0]}, "z_image_to_caption": {}, "z_caption_to_image": {}}
    files |= {"y_image_to_caption": [1], "y_caption_to_image": 3}
    for name, values in files.items():
        Path(f"{name}.json").write_text(json.dumps(values))
    with pytest.raises((ValueError, FileNotFoundError), match=word):
        evaluate(matcher, "retrieval", "val2014", extra_positives=extra)
