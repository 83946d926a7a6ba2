"""Retrieval in blocks, and through a shortlist, against dense and literal references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kiloword
from folders import model_folder
from kiloword.api import Matcher
from kiloword.config.recipes import TextConfig, sizes
from kiloword.data.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate, metrics
from kiloword.evaluation.retrieval import mean_recalls, retrieval, shortlisted
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
    values = dict(retrieval(cosine, images, texts, torch.arange(100) // 2, (1, 5), lambda c: relevance[c], chunk=16))
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
    values = dict(retrieval(cosine, images, texts, own, (1, 3), lambda c: truth[c].numpy(), chunk=5))
    known = truth.any(1)
    scores, matched = cosine(images, texts).T[known], truth[known]
    expected = metrics.average_precision(scores, matched).mean().item()
    assert values["image_retrieval_true_map"] == pytest.approx(expected)
    for k in (1, 3):
        expected = metrics.recall_at(scores, matched, k).mean().item()
        assert values[f"image_retrieval_true_recall@{k}"] == pytest.approx(expected)
    assert values.get("image_retrieval_true_unmatched", 0) == (~known).sum().item()


def test_a_text_that_is_true_of_nothing_cannot_be_ranked() -> None:
    nothing = torch.zeros(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="nothing to retrieve"):
        list(retrieval(cosine, features(2, 0), features(3, 0), torch.arange(3) % 2, (1,), lambda c: nothing[c]))


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
        self.config, self.unused = sizes()["debug"], torch.nn.Parameter(torch.zeros(1))

    @property
    def head(self) -> KnownModel:
        return self

    def encode_image(self, images: Tensor) -> tuple[None, Features]:
        return None, {"vec": torch.eye(26)[(images[:, 0, 0, 0] // 10).long()]}

    def encode_text(self, texts: Texts) -> tuple[None, Features]:
        return None, {"vec": torch.eye(26)[texts.ids]}

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
    ("task", "source", "word", "options"),
    [
        ("retrival", Greys([["1"]], [0]), "retrieval", {}),
        ("retrieval", Greys([[], []], [0, 1]), "zeroshot", {}),
        ("zeroshot", Greys([["1"]], [0]), "classnames.txt", {}),
        ("zeroshot", Greys([["1"]], [None], ["1", "2"]), "no class labels", {}),
        ("retrieval", Greys([["1"]] * 4, [0] * 4, bad=(0, 1, 2, 3)), "truncated image", {}),
        *(("retrieval", Greys([["1"]], [0]), "--folds", o) for o in ({"folds": 2}, {"folds": 0}, {"shortlist": 0})),
    ],
)
def test_wrong_questions_get_a_sentence(task: str, source: Greys, word: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error:
        evaluate(known(), task, source, **options)
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
    full = dict(retrieval(best_token, image_features, texts, own, relevance=lambda c: truth[c]))
    for n in (len(own), 10 * len(own)):
        short = dict(shortlisted(best_token_pairs, image_features, texts, own, n, relevance=lambda c: truth[c]))
        assert {name: short[name] for name in full} == pytest.approx(full)
        assert short[f"text_retrieval_shortlist_recall@{n}"] == short[f"image_retrieval_shortlist_recall@{n}"] == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    return kiloword.load(model_folder(tmp_path_factory.mktemp("model") / "siglip"))


def test_folds_are_equal_parts_of_the_images(model: Matcher) -> None:
    source: Any = open_source("scenes:test?n=10&captions=2", 32)
    got = evaluate(model, "retrieval", source, folds=3, ks=(1, 2))
    recalls = []
    for first in (0, 3, 6):
        images = [source.record(row).image for row in range(first, first + 3)]
        texts = [text for row in range(first, first + 3) for text in source.captions(row)]
        recalls.append(dense_retrieval(model.score(images, texts), torch.arange(3).repeat_interleave(2), 2))
    expected = np.mean(recalls, 0).tolist()
    assert [got[f"{name}_retrieval_recall@2_folds"] for name in ("text", "image")] == pytest.approx(expected)


def test_a_shortlist_of_all_is_full_scoring_and_scenes_bring_their_truth(model: Matcher) -> None:
    full = evaluate(model, "retrieval", "scenes:test?n=40&levels=1")
    assert 0 < full["image_retrieval_true_map"] < 1
    assert full["image_retrieval_true_recall@1"] >= full["image_retrieval_recall@1"]
    short = evaluate(model, "retrieval", "scenes:test?n=40&levels=1", shortlist=40)
    assert {name: short[name] for name in full} == pytest.approx(full)
    assert "text_retrieval_shortlist_recall@4" in evaluate(model, "retrieval", "scenes:test?n=13", shortlist=4)
