"""Metrics against enumeration of every order of ties; test_clip_benchmark.py compares with CLIP_benchmark."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, permutations
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_query_without_a_positive_is_a_miss_and_nan_is_refused() -> None:
    scores, nothing = torch.rand(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    assert metrics.recall_at(scores, nothing, 4).tolist() == [0, 0, 0]
    assert metrics.average_precision(scores, nothing).tolist() == [0, 0, 0]
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
