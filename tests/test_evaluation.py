"""Retrieval and zero-shot, chunked, against dense and literal references, and on a model with known answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.evaluation import metrics
from kiloword.evaluation.retrieval import retrieval, true_relevance
from kiloword.evaluation.zeroshot import prompts, zeroshot
from kiloword.types import Features


def cosine(images: Features, texts: Features) -> Tensor:
    return images["vec"] @ texts["vec"].T


def best_token(images: Features, texts: Features) -> Tensor:
    """A score that no single vector gives: the best of a picture's tokens for each text."""
    return torch.einsum("ikd,td->itk", images["tokens"], texts["vec"]).amax(-1)


def features(n: int, seed: int, decimals: int = 6) -> Features:
    g = torch.Generator().manual_seed(seed)
    vec = torch.nn.functional.normalize(torch.randn(n, 8, generator=g, dtype=torch.float64), dim=1)
    return {"vec": vec.round(decimals=decimals), "tokens": torch.randn(n, 3, 8, generator=g, dtype=torch.float64)}


def dense_retrieval(scores: Tensor, image_of_text: Tensor, k: int) -> tuple[float, float]:
    """Of all scores [I, T] at once: recall of texts, recall of pictures."""
    own = image_of_text == torch.arange(len(scores))[:, None]
    return metrics.recall_at(scores, own, k).mean().item(), metrics.recall_at(scores.T, own.T, k).mean().item()


@pytest.mark.parametrize("score", [cosine, best_token])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_retrieval_equals_all_scores_at_once(
    score: Callable[[Features, Features], Tensor], data: st.DataObject
) -> None:
    pictures, captions = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 25))
    rows = st.lists(st.integers(0, pictures - 1), min_size=captions, max_size=captions)
    image_of_text = torch.tensor(data.draw(rows))  # any order; some pictures have no caption
    seed, decimals = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0, 1, 6]))  # 0 and 1: many ties
    images, texts = features(pictures, seed, decimals), features(captions, seed + 100, decimals)
    chunk = data.draw(st.integers(1, 30))
    values = dict(retrieval(score, images, texts, image_of_text, (1, 2, 5), chunk=chunk))
    for k in (1, 2, 5):
        expected = dense_retrieval(score(images, texts), image_of_text, k)
        got = values[f"text_retrieval_recall@{k}"], values[f"image_retrieval_recall@{k}"]
        assert got == pytest.approx(expected, abs=1e-12)


def test_retrieval_equals_clip_benchmark() -> None:
    theirs = pytest.importorskip("clip_benchmark.metrics.zeroshot_retrieval", reason="needs CLIP_benchmark")
    images, texts = features(40, 0), features(120, 1)
    image_of_text = torch.arange(120) // 3
    texts["vec"] += 0.3 * images["vec"][image_of_text]
    own = image_of_text[:, None] == torch.arange(40)
    values = dict(retrieval(cosine, images, texts, image_of_text, (1, 5, 10), chunk=17))
    for k in (1, 5, 10):
        scores = texts["vec"] @ images["vec"].T
        assert values[f"image_retrieval_recall@{k}"] == (theirs.recall_at_k(scores, own, k) > 0).double().mean().item()
        text_recall = (theirs.recall_at_k(scores.T, own.T, k) > 0).double().mean().item()
        assert values[f"text_retrieval_recall@{k}"] == text_recall


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
def test_true_relevance_equals_all_scores_at_once(seed: int, pictures: int, captions: int, decimals: int) -> None:
    images, texts = features(pictures, seed, decimals), features(captions, seed + 1, decimals)
    truth = torch.rand(captions, pictures, generator=torch.Generator().manual_seed(seed)) < 0.3
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
    with pytest.raises(ValueError, match="0 pictures and 3 texts"):
        list(retrieval(cosine, features(0, 0), features(3, 0), torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(ValueError, match="image_of_text"):
        list(retrieval(cosine, features(2, 0), features(3, 0), torch.tensor([0, 1, 2])))
    broken = {"vec": torch.full((3, 8), torch.nan, dtype=torch.float64)}
    with pytest.raises(ValueError, match="NaN"):
        list(retrieval(cosine, features(3, 0), broken, torch.arange(3)))
    with pytest.raises(ValueError, match="nothing to retrieve"):
        list(true_relevance(cosine, features(2, 0), features(3, 0), torch.zeros(3, 2, dtype=torch.bool)))
    with pytest.raises(ValueError, match="relevance came as"):
        list(true_relevance(cosine, features(2, 0), features(3, 0), torch.ones(2, 2, dtype=torch.bool)))


def test_zeroshot_in_batches_equals_all_at_once() -> None:
    images, classes = features(70, 0), features(9, 1)
    labels = torch.randint(9, (70,), generator=torch.Generator().manual_seed(2))
    batches = [({"vec": images["vec"][s : s + 16]}, labels[s : s + 16]) for s in range(0, 70, 16)]
    values = dict(zeroshot(cosine, batches, classes))
    ranked = cosine(images, classes).argsort(1, descending=True)
    found = (ranked[:, :5] == labels[:, None]).double()
    recalls = [found[labels == c, 0].mean().item() for c in labels.unique()]
    assert values["acc1"] == pytest.approx(found[:, 0].mean().item())
    assert values["acc5"] == pytest.approx(found.sum(1).mean().item())
    assert values["mean_per_class_recall"] == pytest.approx(sum(recalls) / len(recalls))

    targets = torch.rand(70, 9, generator=torch.Generator().manual_seed(3)) < 0.3
    many = dict(zeroshot(cosine, [(images, targets)], classes))
    assert many == {"mean_average_precision": metrics.mean_average_precision(cosine(images, classes), targets)}


def test_labels_must_be_classes() -> None:
    with pytest.raises(ValueError, match="labels run from 0 to 4, but there are 4 classes"):
        list(zeroshot(cosine, [(features(2, 0), torch.tensor([0, 4]))], features(4, 1)))


def test_prompts() -> None:
    assert prompts(["cat", "dog"], ["a {c}", "{c}!"]) == (["a cat", "cat!", "a dog", "dog!"], [0, 0, 1, 1])
    own = {"cat": ["a feline"], "dog": ["a hound", "{c}"]}
    assert prompts(["dog", "cat"], own) == (["a hound", "{c}", "a feline"], [0, 0, 1])
    with pytest.raises(ValueError, match="no prompts for the class 'cow'"):
        prompts(["cat", "cow"], own)
    with pytest.raises(ValueError, match="class name"):
        prompts(["cat"], ["a photo"])
    with pytest.raises(ValueError, match="class name"):
        prompts(["cat"], "a {c}")
    with pytest.raises(ValueError, match="no class names"):
        prompts([], ["a {c}"])
