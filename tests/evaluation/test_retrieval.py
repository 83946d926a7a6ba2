"""Retrieval in blocks, through a shortlist and with more positives, against dense and literal references."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import kiloword
from folders import model_folder
from kiloword.api import Matcher
from kiloword.config.recipes import TextConfig, sizes
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate, metrics
from kiloword.evaluation.retrieval import (
    Positives,
    extra_positives,
    mean_recalls,
    retrieval,
    shortlisted,
    true_relevance,
)
from kiloword.model.model import Model
from kiloword.types import BadSample, Features, Record, Skipped, Texts


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
    values = dict(retrieval(score, images, texts, image_of_text, (1, 2, 5), chunk=chunk))
    for k in (1, 2, 5):
        expected = dense_retrieval(score(images, texts), image_of_text, k)
        got = values[f"text_retrieval_recall@{k}"], values[f"image_retrieval_recall@{k}"]
        assert got == pytest.approx(expected, abs=1e-12)


def test_a_collapsed_model_gets_chance() -> None:
    one = torch.nn.functional.normalize(torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    images, texts = {"vec": one.repeat(50, 1)}, {"vec": one.repeat(100, 1)}
    relevance = torch.arange(50)[None, :] % 5 == torch.arange(100)[:, None] % 5  # a fifth is true of every text
    values = dict(retrieval(cosine, images, texts, torch.arange(100) // 2, (1, 5), relevance, chunk=16))
    assert values["image_retrieval_recall@5"] == pytest.approx(5 / 50)
    assert values["text_retrieval_recall@1"] == pytest.approx(2 / 100)
    assert values["image_retrieval_true_recall@1"] == pytest.approx(1 / 5)


def test_blocks_stay_small() -> None:
    sizes = []

    def score(images: Features, texts: Features) -> Tensor:
        sizes.append((len(images["vec"]), len(texts["vec"])))
        return cosine(images, texts)

    list(retrieval(score, features(100, 0), features(300, 1), torch.arange(300) // 3, chunk=32))
    assert max(max(size) for size in sizes) == 32
    assert len(sizes) <= 4 * 10 + 4 + 10  # every block once, and those of the pairs once more


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 9), st.sampled_from([1, 6]))
def test_true_relevance_equals_all_scores_at_once(seed: int, photos: int, captions: int, decimals: int) -> None:
    images, texts = features(photos, seed, decimals), features(captions, seed + 1, decimals)
    if decimals == 1:  # eighths: their products are exact, so that ties are ties in blocks of any shape
        images, texts = ({k: (8 * v).round() / 8 for k, v in side.items()} for side in (images, texts))
    truth = torch.rand(captions, photos, generator=torch.Generator().manual_seed(seed)) < 0.3
    truth[0, 0] = True
    values = dict(true_relevance(cosine, images, texts, lambda c: truth[c].numpy(), (1, 3), chunk=5))
    known = truth.any(1)
    scores, matched = cosine(images, texts).T[known], truth[known]
    expected = metrics.average_precision(scores, matched).mean().item()
    assert values["image_retrieval_true_map"] == pytest.approx(expected)
    for k in (1, 3):
        expected = metrics.recall_at(scores, matched, k).mean().item()
        assert values[f"image_retrieval_true_recall@{k}"] == pytest.approx(expected)
    assert values.get("image_retrieval_true_unmatched", 0) == (~known).sum().item()


def test_retrieval_refuses_what_it_cannot_rank() -> None:
    for images, image in ((0, [0, 0, 0]), (2, [0, 1, 2]), (2, [0, 1])):
        with pytest.raises(ValueError, match="image_of_text"):
            list(retrieval(cosine, features(images, 0), features(3, 0), torch.tensor(image)))
    broken = {"vec": torch.full((3, 8), torch.nan, dtype=torch.float64)}
    with pytest.raises(ValueError, match="NaN"):
        list(retrieval(cosine, features(3, 0), broken, torch.arange(3)))
    with pytest.raises(ValueError, match="nothing to retrieve"):
        list(true_relevance(cosine, features(2, 0), features(3, 0), torch.zeros(3, 2, dtype=torch.bool)))


def test_means_of_recalls() -> None:
    values = {f"{side}_retrieval_recall@{k}": k / 100 + (side == "text") for side in ("text", "image") for k in (1, 5)}
    assert dict(mean_recalls(values, (1, 5))) == {
        "mean_recall@1": pytest.approx((1.01 + 0.01) / 2),
        "text_retrieval_mean_recall": pytest.approx(1.03),
        "image_retrieval_mean_recall": pytest.approx(0.03),
        "rsum": pytest.approx(1.01 + 1.05 + 0.01 + 0.05),
    }
    assert "mean_recall@1" not in dict(mean_recalls(values, (5,)))


class KnownModel(torch.nn.Module):
    """Knows every image and text by number: grey level 10 n and the text "n" get the n-th unit vector."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.config = sizes()["debug"]
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.head = Known()
        self.score = self.head.score

    def encode_image(self, images: Tensor) -> tuple[None, Features]:
        return None, {"vec": torch.eye(26)[(images[:, 0, 0, 0] // 10).long()]}

    def encode_text(self, texts: Texts) -> tuple[None, Features]:
        return None, {"vec": torch.eye(26)[texts.ids]}


class Known(torch.nn.Module):
    def score(self, images: Features, texts: Features) -> Tensor:
        return cosine(images, texts)

    def ensemble(self, texts: Features, group: Tensor, n: int, weights: Tensor | None = None) -> Features:
        return {"vec": torch.zeros(n, 26).index_add_(0, group, texts["vec"])}


class Numbers:
    """A tokenizer whose captions are one number each."""

    def encode(self, captions: list[str], config: TextConfig) -> Texts:
        return Texts.pack([[int(caption)] for caption in captions])


@dataclass
class Greys:
    """Row n is grey 10 n; captions and labels as given; row 3 cannot be read."""

    captions: list[list[str]]
    labels: list[int | None]
    classnames: list[str] | None = None
    templates: list[str] | None = None
    bad: tuple[int, ...] = (3,)
    name: str = "greys"
    fingerprint: str = "greys-v1"

    def __len__(self) -> int:
        return len(self.captions)

    def record(self, row: int) -> Record:
        if row in self.bad:
            raise BadSample("truncated image")
        return Record(f"k{row}", np.full((32, 32, 3), 10 * row, np.uint8), self.captions[row], self.labels[row])


def known() -> Matcher:
    return Matcher(cast(Model, KnownModel()), cast(Tokenizer, Numbers()))


def test_a_model_that_knows_is_perfect_and_bad_rows_are_named() -> None:
    source = Greys([[str(n)] * 2 for n in range(12)], [None] * 12)
    source.captions[5] = []
    bad: list[Skipped] = []
    values = evaluate(known(), "retrieval", source, skipped=bad, batch=4)
    assert values.pop("skipped") == 2
    assert values.pop("rsum") == 6
    recalls = {f"{side}_retrieval_recall@{k}" for side in ("text", "image") for k in (1, 5, 10)}
    means = {"mean_recall@1", "text_retrieval_mean_recall", "image_retrieval_mean_recall"}
    assert set(values) == recalls | means
    assert set(values.values()) == {1.0}
    assert [(s.row, s.reason) for s in bad] == [(3, "truncated image"), (5, "no caption")]


def test_wrong_captions_cost_what_they_should() -> None:
    captions = [["1"], ["2"], ["3"], *([str(n)] for n in range(3, 10))]
    values = evaluate(known(), "retrieval", Greys(captions, [None] * 10, bad=()))
    assert values["image_retrieval_recall@1"] == pytest.approx(7 / 10)
    # Image 0 ties with all ten texts, 1 and 2 match another's, and the third text ties with the own one of image 3.
    assert values["text_retrieval_recall@1"] == pytest.approx((1 / 10 + 0 + 0 + 1 / 2 + 6) / 10)


def test_zeroshot_on_a_source() -> None:
    labels: list[int | None] = [n % 6 for n in range(12)]
    labels[7] = None
    source = Greys([[]] * 12, labels, [str(n) for n in range(6)], ["{c}"])
    bad: list[Skipped] = []
    values = evaluate(known(), "zeroshot", source, batch=5, skipped=bad)
    # Images 0, 1, 2, 4, 5 are known; 6 and 8 to 11 score 0 with every class: chance.
    assert values["acc1"] == pytest.approx((5 + 5 / 6) / 10)
    assert values["acc5"] == pytest.approx((5 + 5 * 5 / 6) / 10)
    assert values["skipped"] == 2
    assert [(s.row, s.reason) for s in bad] == [(3, "truncated image"), (7, "no class label")]


@pytest.mark.parametrize(
    ("task", "source", "word"),
    [
        ("retrival", Greys([["1"]], [0]), "retrieval"),
        ("retrieval", Greys([[], []], [0, 1]), "zeroshot"),
        ("zeroshot", Greys([["1"]], [0]), "classnames.txt"),
        ("zeroshot", Greys([["1"]], [None], ["1", "2"]), "no class labels"),
        ("retrieval", Greys([["1"]] * 4, [0] * 4, bad=(0, 1, 2, 3)), "truncated image"),
    ],
)
def test_wrong_questions_get_a_sentence(task: str, source: Greys, word: str) -> None:
    with pytest.raises(ValueError) as error:
        evaluate(known(), task, source)
    assert word in str(error.value)


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


@pytest.mark.parametrize("images", [1, 7])
def test_a_list_of_everything_is_full_scoring(images: int) -> None:
    image_features, texts = features(images, 0), features(2 * images + 1, 1)
    own = torch.arange(2 * images + 1) % images
    truth = torch.rand(len(own), images, generator=torch.Generator().manual_seed(3)) < 0.4
    truth[0, 0] = True
    full = dict(retrieval(best_token, image_features, texts, own, relevance=truth))
    for n in (len(own), 10 * len(own)):
        short = dict(shortlisted(best_token_pairs, image_features, texts, own, n, relevance=truth))
        assert {name: short[name] for name in full} == pytest.approx(full)
        assert short[f"text_retrieval_shortlist_recall@{n}"] == short[f"image_retrieval_shortlist_recall@{n}"] == 1


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
    assert float(metrics.average_precision_at_r(scores, relevant)) == pytest.approx(mean)


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
        ({"shortlist": 0}, "--shortlist is 0"),
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


def test_a_shortlist_of_all_is_full_scoring_and_scenes_bring_their_truth(model: Matcher) -> None:
    full = evaluate(model, "retrieval", "scenes:test?n=40&levels=1")
    assert 0 < full["image_retrieval_true_map"] < 1
    assert full["image_retrieval_true_recall@1"] >= full["image_retrieval_recall@1"]
    short = evaluate(model, "retrieval", "scenes:test?n=40&levels=1", shortlist=40)
    assert {name: short[name] for name in full} == pytest.approx(full)
    assert "text_retrieval_shortlist_recall@4" in evaluate(model, "retrieval", "scenes:test?n=13", shortlist=4)
