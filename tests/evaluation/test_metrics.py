"""Metrics against enumeration of every order of ties, and against CLIP_benchmark's own functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, permutations
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kiloword.evaluation import metrics
from kiloword.evaluation.zeroshot import figures

Ranking = tuple[int, ...]


def orders(scores: list[float]) -> list[Ranking]:
    """Every ranking that sorts the scores, best first: all orders of the tied items."""
    return [p for p in permutations(range(len(scores))) if all(scores[a] >= scores[b] for a, b in pairwise(p))]


def expected(scores: list[float], value: Callable[[Ranking], float]) -> float:
    return fmean(value(ranking) for ranking in orders(scores))


def slow_average_precision(ranking: Ranking, relevant: set[int]) -> float:
    hits, total = 0, 0.0
    for place, item in enumerate(ranking, start=1):
        if item in relevant:
            hits += 1
            total += hits / place
    return total / max(len(relevant), 1)


queries = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


@settings(max_examples=60, deadline=None)
@given(queries, st.integers(1, 7))
def test_ties_give_the_mean_over_all_their_orders(query: tuple[list[float], list[bool]], k: int) -> None:
    scores, flags = query
    relevant = {i for i, flag in enumerate(flags) if flag}
    s, r = torch.tensor([scores]), torch.tensor([flags])
    any_hit = expected(scores, lambda ranking: float(bool(relevant & set(ranking[:k]))))
    assert metrics.recall_at(s, r, k).item() == pytest.approx(any_hit)
    if relevant:
        r_precision = expected(scores, lambda p: len(relevant & set(p[: len(relevant)])) / len(relevant))
        assert metrics.r_precision(s, r).item() == pytest.approx(r_precision)
    ap = expected(scores, lambda ranking: slow_average_precision(ranking, relevant))
    assert metrics.average_precision(s, r).item() == pytest.approx(ap)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.floats(-2, 2, width=32))
def test_a_constant_score_gives_chance(items: int, k: int, value: float) -> None:
    positive = torch.eye(items, dtype=torch.bool)
    recall = metrics.recall_at(torch.full((items, items), value), positive, k)
    torch.testing.assert_close(recall, torch.full((items,), min(k / items, 1.0), dtype=torch.float64))


def test_rounding_makes_no_winner() -> None:
    score = torch.full((1, 3), 0.25)
    near = torch.nextafter(score[0, 1], torch.tensor(1.0))
    score[0, 1] = near
    assert metrics.recall_at(score, torch.tensor([[True, False, False]]), 1).item() == pytest.approx(1 / 3)
    score[0, 1] = 0.25001
    assert metrics.recall_at(score, torch.tensor([[True, False, False]]), 1).item() == 0


def test_a_query_without_a_positive_is_a_miss() -> None:
    scores, nothing = torch.rand(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    assert metrics.recall_at(scores, nothing, 4).tolist() == [0, 0, 0]
    assert metrics.average_precision(scores, nothing).tolist() == [0, 0, 0]


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        metrics.recall_at(torch.tensor([[1.0, torch.nan]]), torch.tensor([[True, False]]), 1)


def test_classification_by_hand() -> None:
    scores = torch.tensor([[3.0, 2, 1], [3, 2, 1], [3, 2, 1], [1, 1, 0]])
    labels = torch.tensor([0, 0, 1, 1])  # class 2 never occurs: it does not count
    values = dict(figures(scores, labels))
    assert values == {"acc1": (1 + 1 + 0 + 0.5) / 4, "mean_per_class_recall": (1 + 0.25) / 2}  # and no acc5
    assert "acc5" in dict(figures(torch.rand(2, 5), labels[:2]))
    targets = torch.tensor([[1, 0]] * 5)  # a class without positives counts 0
    assert dict(figures(torch.rand(5, 2), targets))["mean_average_precision"] == 0.5


@pytest.fixture(scope="module")
def clip_benchmark() -> None:
    pytest.importorskip("clip_benchmark", reason="needs the CLIP_benchmark package")
    pytest.importorskip("sklearn", reason="CLIP_benchmark's classification metrics need scikit-learn")


def random_pairs(seed: int, photos: int, captions: int) -> tuple[Tensor, Tensor]:
    """Scores [T, I] of random unit vectors, and the image of every text [T]; every image has a caption."""
    g = torch.Generator().manual_seed(seed)
    extra = torch.randint(photos, (captions - photos,), generator=g)
    image_of_text = torch.cat([torch.arange(photos), extra]).sort().values
    images, texts = torch.randn(photos, 32, generator=g), torch.randn(captions, 32, generator=g)
    texts = texts + 0.5 * images[image_of_text]
    normal = torch.nn.functional.normalize
    return normal(texts, dim=1) @ normal(images, dim=1).T, image_of_text


@pytest.mark.usefixtures("clip_benchmark")
@pytest.mark.parametrize("k", [1, 5, 10])
def test_retrieval_equals_clip_benchmark(k: int) -> None:
    from clip_benchmark.metrics.zeroshot_retrieval import recall_at_k

    scores, image_of_text = random_pairs(k, 60, 200)
    positive = image_of_text[:, None] == torch.arange(60)
    assert torch.equal(metrics.recall_at(scores, positive, k), (recall_at_k(scores, positive, k) > 0).double())
    ours = metrics.recall_at(scores.T, positive.T, k)
    assert torch.equal(ours, (recall_at_k(scores.T, positive.T, k) > 0).double())
    assert 0.02 < ours.mean() < 0.98  # the comparison says something


@pytest.mark.usefixtures("clip_benchmark")
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")  # scikit-learn's, and wanted here
def test_classification_equals_clip_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    from clip_benchmark.metrics import zeroshot_classification as theirs
    from sklearn.metrics import balanced_accuracy_score

    # Its accuracy() calls float() on an array of shape [1], which NumPy 2.4 refuses: shadow that one name.
    monkeypatch.setattr(theirs, "float", lambda number: number.item(), raising=False)
    g = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(500, 12, generator=g), torch.randint(12, (500,), generator=g) ** 2 // 12
    ours = dict(figures(scores, labels))
    accuracies = theirs.accuracy(scores, labels, topk=(1, 5))
    assert [ours["acc1"], ours["acc5"]] == pytest.approx(accuracies, abs=1e-12)
    balanced = balanced_accuracy_score(labels.numpy(), scores.argmax(1).numpy())
    assert ours["mean_per_class_recall"] == pytest.approx(balanced, abs=1e-12)


def test_precisions_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    g = torch.Generator().manual_seed(0)
    scores, relevant = torch.rand(4, 30, generator=g), torch.rand(4, 30, generator=g) < 0.4
    expected = [sklearn.average_precision_score(r, s) for s, r in zip(scores.numpy(), relevant.numpy(), strict=True)]
    assert metrics.average_precision(scores, relevant).tolist() == pytest.approx(expected)
