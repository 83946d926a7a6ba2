"""Retrieval in blocks, through a shortlist and with extra positives, against dense and literal references."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch import Tensor

from kiloword.api import Matcher
from kiloword.data.open import open_source
from kiloword.evaluation import evaluate, metrics
from kiloword.evaluation.retrieval import Positives, extra_recalls, mean_recalls, retrieval, shortlisted
from kiloword.types import Features, Skipped
from sources import Images


def cosine(images: Features, texts: Features) -> Tensor:
    return images["vec"] @ texts["vec"].T


def best_token(images: Features, texts: Features) -> Tensor:
    """A score that no single vector gives: the best of an image's tokens for each text."""
    return torch.einsum("ikd,td->itk", images["tokens"], texts["vec"]).amax(-1)


def features(n: int, seed: int, decimals: int = 6) -> Features:
    g = torch.Generator().manual_seed(seed)
    vec = torch.nn.functional.normalize(torch.randn(n, 8, generator=g, dtype=torch.float64), dim=1)
    return {"vec": vec.round(decimals=decimals), "tokens": torch.randn(n, 3, 8, generator=g, dtype=torch.float64)}


def dense_retrieval(scores: Tensor, image_of_text: Tensor, k: int) -> tuple[float, float]:
    """Of all scores [I, T] at once: recall of texts, recall of images."""
    own = image_of_text == torch.arange(len(scores))[:, None]
    return metrics.recall_at(scores, own, k).mean().item(), metrics.recall_at(scores.T, own.T, k).mean().item()


@pytest.mark.parametrize("score", [cosine, best_token])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_retrieval_equals_all_scores_at_once(
    score: Callable[[Features, Features], Tensor], data: st.DataObject
) -> None:
    photos, captions = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 25))
    rows = st.lists(st.integers(0, photos - 1), min_size=captions, max_size=captions)
    image_of_text = torch.tensor(data.draw(rows))  # any order; some images have no caption
    seed, decimals = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0, 1, 6]))  # 0 and 1: many ties
    images, texts = features(photos, seed, decimals), features(captions, seed + 100, decimals)
    chunk = data.draw(st.integers(1, 30))
    with patch("kiloword.evaluation.retrieval.CHUNK", chunk):
        values = dict(retrieval(score, images, texts, image_of_text, (1, 2, 5)))
    for k in (1, 2, 5):
        expected = dense_retrieval(score(images, texts), image_of_text, k)
        got = values[f"text_retrieval_recall@{k}"], values[f"image_retrieval_recall@{k}"]
        assert got == pytest.approx(expected, abs=1e-12)


def test_blocks_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiloword.evaluation.retrieval.CHUNK", 32)
    sizes = []

    def score(images: Features, texts: Features) -> Tensor:
        sizes.append((len(images["vec"]), len(texts["vec"])))
        return cosine(images, texts)

    list(retrieval(score, features(100, 0), features(300, 1), torch.arange(300) // 3))
    assert max(min(size) for size in sizes) == 32
    assert sum(i * t for i, t in sizes) == 2 * 100 * 300  # every pair once in each direction


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 9), st.sampled_from([1, 6]))
def test_true_relevance_equals_all_scores_at_once(seed: int, photos: int, captions: int, decimals: int) -> None:
    images, texts = features(photos, seed, decimals), features(captions, seed + 1, decimals)
    if decimals == 1:  # eighths: their products are exact, so that ties are ties in blocks of any shape
        images, texts = ({k: (8 * v).round() / 8 for k, v in side.items()} for side in (images, texts))
    truth = torch.rand(captions, photos, generator=torch.Generator().manual_seed(seed)) < 0.3
    truth[0, 0] = True
    own = torch.zeros(captions, dtype=torch.int64)
    with patch("kiloword.evaluation.retrieval.CHUNK", 5):
        values = dict(retrieval(cosine, images, texts, own, (1, 3), lambda c: truth[c].numpy()))
    known = truth.any(1)
    scores, matched = cosine(images, texts).T[known], truth[known]
    expected = metrics.average_precision(scores, matched).mean().item()
    assert values["image_retrieval_true_map"] == pytest.approx(expected)
    for k in (1, 3):
        expected = metrics.recall_at(scores, matched, k).mean().item()
        assert values[f"image_retrieval_true_recall@{k}"] == pytest.approx(expected)
    assert values.get("image_retrieval_true_unmatched", 0) == (~known).sum().item()
    with pytest.raises(ValueError, match="nothing to retrieve"):
        list(retrieval(cosine, images, texts, own, (1,), lambda c: torch.zeros_like(truth)[c]))


def test_means_of_recalls() -> None:
    values = {f"{side}_retrieval_recall@{k}": k / 100 + (side == "text") for side in ("text", "image") for k in (1, 5)}
    assert dict(mean_recalls(values, (1, 5))) == {
        "mean_recall@1": pytest.approx((1.01 + 0.01) / 2),
        "text_retrieval_mean_recall": pytest.approx(1.03),
        "image_retrieval_mean_recall": pytest.approx(0.03),
        "rsum": pytest.approx(1.01 + 1.05 + 0.01 + 0.05),
    }
    assert "mean_recall@1" not in dict(mean_recalls(values, (5,)))


def best_token_pairs(images: Features, texts: Features) -> Tensor:
    return torch.einsum("nkd,nd->nk", images["tokens"], texts["vec"]).amax(-1)


def literal_ranking(near: Tensor, exact: Tensor, n: int) -> list[int]:
    """One query: the n nearest in the order of the exact score, then the rest in the order of nearness."""
    order = near.argsort(descending=True).tolist()
    return sorted(order[:n], key=lambda c: -float(exact[c])) + order[n:]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_equals_a_literal_reranking(data: st.DataObject) -> None:
    photos, captions = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 14))
    own = torch.tensor(data.draw(st.lists(st.integers(0, photos - 1), min_size=captions, max_size=captions)))
    seed, n = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 16))
    images, texts = features(photos, seed), features(captions, seed + 100)
    near, exact = images["vec"] @ texts["vec"].T, best_token(images, texts)
    found = dict(shortlisted(best_token_pairs, images, texts, own, n, ks=(1, 3)))
    for k in (1, 3):
        lists = [literal_ranking(near[:, t], exact[:, t], n)[:k] for t in range(captions)]
        assert found[f"image_retrieval_recall@{k}"] == pytest.approx(
            sum(int(own[t]) in lists[t] for t in range(captions)) / captions
        )
        ranked = [literal_ranking(near[i], exact[i], n)[:k] for i in range(photos)]
        hits = sum(any(int(own[t]) == i for t in ranked[i]) for i in range(photos))
        assert found[f"text_retrieval_recall@{k}"] == pytest.approx(hits / photos)
    in_lists = sum(int(own[t]) in near[:, t].argsort(descending=True)[:n].tolist() for t in range(captions))
    assert found[f"image_retrieval_shortlist_recall@{n}"] == pytest.approx(in_lists / captions)
    in_lists = sum(t in near[int(own[t])].argsort(descending=True)[:n].tolist() for t in range(captions))
    assert found[f"text_retrieval_shortlist_recall@{n}"] == pytest.approx(in_lists / captions)


def test_a_data_set_with_bad_rows(matcher: Matcher) -> None:
    source, bad = Images({3: "sample", 5: "silent"}, rows=12, side=32), list[Skipped]()
    values = evaluate(matcher, "retrieval", source, skipped=bad, batch=4)
    assert [(one.row, one.key) for one in bad] == [(3, "k003"), (5, "k005")]
    records = [source.record(row) for row in range(12) if row not in (3, 5)]
    captions = [record.captions for record in records]
    own = torch.arange(10).repeat_interleave(torch.tensor(list(map(len, captions))))
    scores = matcher.score([r.image for r in records], [text for of_image in captions for text in of_image])
    expected = {"skipped": 2.0}
    for k in (1, 5, 10):
        found = dense_retrieval(scores, own, k)
        expected |= {f"text_retrieval_recall@{k}": found[0], f"image_retrieval_recall@{k}": found[1]}
    assert values | expected | dict(mean_recalls(expected, (1, 5, 10))) == pytest.approx(values)


def test_folds_are_equal_parts_of_the_images(matcher: Matcher) -> None:
    source: Any = open_source("scenes:test?n=10&captions=2", 32)
    got = evaluate(matcher, "retrieval", source, folds=3, ks=(1, 2))
    recalls = []
    for first in (0, 3, 6):
        images = [source.record(row).image for row in range(first, first + 3)]
        texts = [text for row in range(first, first + 3) for text in source.captions(row)]
        recalls.append(dense_retrieval(matcher.score(images, texts), torch.arange(3).repeat_interleave(2), 2))
    expected = np.mean(recalls, 0).tolist()
    assert [got[f"{name}_retrieval_recall@2_folds"] for name in ("text", "image")] == pytest.approx(expected)


def test_scenes_bring_their_truth_also_to_a_shortlist(matcher: Matcher) -> None:
    full = evaluate(matcher, "retrieval", "scenes:test?n=40&levels=1")
    assert full["image_retrieval_true_recall@1"] >= full["image_retrieval_recall@1"]
    short = evaluate(matcher, "retrieval", "scenes:test?n=40&levels=1", shortlist=40)
    assert {name: short[name] for name in full} == pytest.approx(full)
    assert "text_retrieval_shortlist_recall@4" in evaluate(matcher, "retrieval", "scenes:test?n=13", shortlist=4)


@pytest.mark.parametrize(
    ("source", "options", "word"),
    [
        (Images(dict.fromkeys(range(4), "silent"), rows=4, side=32), {}, "zeroshot"),
        (Images(dict.fromkeys(range(4), "sample"), rows=4, side=32), {}, "truncated image"),
        *((Images(rows=1, side=32), o, "--folds") for o in ({"folds": 2}, {"folds": 0}, {"shortlist": 0})),
    ],
)
def test_refusals(matcher: Matcher, source: Images, options: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        evaluate(matcher, "retrieval", source, **options)


# ECCV Caption's positives: a literal transcription of its code, and its files as they are distributed


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
def test_refused_positives(
    extra: str, word: str, coco: Path, matcher: Matcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(coco)
    files = {"x_image_to_caption": {"100": [0]}, "z_image_to_caption": {}, "z_caption_to_image": {}}
    files |= {"y_image_to_caption": [1], "y_caption_to_image": 3}
    for name, values in files.items():
        Path(f"{name}.json").write_text(json.dumps(values))
    with pytest.raises((ValueError, FileNotFoundError), match=word):
        evaluate(matcher, "retrieval", "val2014", extra_positives=extra)
