"""Retrieval through a shortlist: against a literal re-ranking, and the same as without one where all are listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.api import Matcher
from kiloword.config.recipes import sizes
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.evaluation import evaluate
from kiloword.evaluation.retrieval import retrieval, shortlisted
from kiloword.methods.registry import preset
from kiloword.model.heads import Single
from kiloword.models.build import build
from kiloword.types import Features


def best_token(images: Features, texts: Features) -> Tensor:
    """A score that no single vector gives: the best of an image's tokens for each text."""
    return torch.einsum("ikd,td->itk", images["tokens"], texts["vec"]).amax(-1)


def best_token_pairs(images: Features, texts: Features) -> Tensor:
    return torch.einsum("nkd,nd->nk", images["tokens"], texts["vec"]).amax(-1)


def features(n: int, seed: int) -> Features:
    g = torch.Generator().manual_seed(seed)
    vec = torch.nn.functional.normalize(torch.randn(n, 8, generator=g, dtype=torch.float64), dim=1)
    return {"vec": vec, "tokens": 5 * torch.randn(n, 3, 8, generator=g, dtype=torch.float64)}


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


def test_what_the_list_lacks_is_not_found() -> None:
    images = {"vec": torch.eye(3), "tokens": torch.eye(3)[[1, 0, 2], None]}  # tokens say the opposite of "vec"
    texts = {"vec": torch.eye(3)}
    found = dict(shortlisted(best_token_pairs, images, texts, torch.tensor([1, 0, 2]), 1))
    assert found["image_retrieval_shortlist_recall@1"] == found["image_retrieval_recall@1"] == pytest.approx(1 / 3)
    full = dict(retrieval(best_token, images, texts, torch.tensor([1, 0, 2])))
    assert full["image_retrieval_recall@1"] == 1  # exact scoring finds all three


def matcher(method: str = "clip", **settings: Any) -> Matcher:
    tokenizer = Tokenizer.train(["a red dog", "a blue cat", "green"], vocab=300)
    return Matcher(build(sizes()["debug"], preset(method, settings)), tokenizer)


@pytest.mark.parametrize("pool", ["contextual", "first", "average", "learned_average"])
def test_score_pairs_of_mixture_tokens(pool: str) -> None:
    model = matcher("llip", k=3, heads=4, pool=pool, patch_keys=pool == "contextual")
    images = model.encode_image(torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8))
    texts = model.encode_text(["a red dog", "a cat", "green"])
    torch.testing.assert_close(model.score_pairs(images, texts), model.score(images, texts).diagonal())
    for n in (1, 13):
        found = evaluate(model, "retrieval", "scenes:test?n=13", shortlist=n)
    full = evaluate(model, "retrieval", "scenes:test?n=13")
    assert {name: found[name] for name in full} == pytest.approx(full)


def test_score_pairs_is_the_diagonal_of_score(monkeypatch: pytest.MonkeyPatch) -> None:
    model = matcher()
    images = model.encode_image(torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8))
    texts = model.encode_text(["a red dog", "a cat", "green"])
    diagonal = model.score(images, texts).diagonal()
    torch.testing.assert_close(model.score_pairs(images, texts), diagonal)
    monkeypatch.delattr(Single, "score_pairs")  # a pooling without one is asked pair by pair
    torch.testing.assert_close(model.score_pairs(images, texts), diagonal)
    with pytest.raises(ValueError, match="3 images and 1 texts"):
        model.score_pairs(images, model.encode_text(["green"]))


def test_task_with_a_shortlist() -> None:
    full = evaluate(matcher(), "retrieval", "scenes:test?n=13")
    short = evaluate(matcher(), "retrieval", "scenes:test?n=13", shortlist=13)
    assert {name: short[name] for name in full} == pytest.approx(full)
    assert "text_retrieval_shortlist_recall@4" in evaluate(matcher(), "retrieval", "scenes:test?n=13", shortlist=4)
    with pytest.raises(ValueError, match="--shortlist is 0"):
        evaluate(matcher(), "retrieval", "scenes:test?n=13", shortlist=0)
