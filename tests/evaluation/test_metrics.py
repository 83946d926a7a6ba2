"""Ranking metrics against every order of ties, and calibration against literal bins and correlations."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, permutations
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kiloword.evaluation import metrics
from kiloword.evaluation.metrics import binned, calibration, pearson, spearman

Ranking = tuple[int, ...]


def orders(scores: list[float]) -> list[Ranking]:
    """Every ranking that sorts the scores, best first: all orders of the tied items."""
    return [p for p in permutations(range(len(scores))) if all(scores[a] >= scores[b] for a, b in pairwise(p))]


def expected(scores: list[float], value: Callable[[Ranking], float]) -> float:
    return fmean(value(ranking) for ranking in orders(scores))


def slow_average_precision(ranking: Ranking, relevant: set[int], depth: int = 100) -> float:
    hits, total = 0, 0.0
    for place, item in enumerate(ranking[:depth], start=1):
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
    map_at_r = expected(scores, lambda ranking: slow_average_precision(ranking, relevant, len(relevant)))
    assert metrics.average_precision(s, r, at_r=True).item() == pytest.approx(map_at_r)


def test_rounding_makes_no_winner() -> None:
    score = torch.full((1, 3), 0.25)
    score[0, 1] = torch.nextafter(score[0, 1], torch.tensor(1.0))
    assert metrics.recall_at(score, torch.tensor([[True, False, False]]), 1).item() == pytest.approx(1 / 3)
    score[0, 1] = 0.25001
    assert metrics.recall_at(score, torch.tensor([[True, False, False]]), 1).item() == 0


def test_a_query_without_a_positive_is_a_miss_and_nan_is_refused() -> None:
    scores, nothing = torch.rand(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    assert metrics.recall_at(scores, nothing, 4).tolist() == [0, 0, 0]
    assert metrics.average_precision(scores, nothing).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="NaN"):
        metrics.recall_at(torch.tensor([[1.0, torch.nan]]), torch.tensor([[True, False]]), 1)


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def literal_spearman(a: list[float], b: list[float]) -> float:
    """Ranks by counting: one more than what is below, plus half of what else is equal."""
    x, y = ([1 + sum(w < v for w in c) + (c.count(v) - 1) / 2 for v in c] for c in (a, b))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    top = sum((p - mx) * (q - my) for p, q in zip(x, y, strict=True))
    return top / math.sqrt(sum((p - mx) ** 2 for p in x) * sum((q - my) ** 2 for q in y))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=2, max_size=30))
def test_spearman_with_ties(points: list[tuple[int, int]]) -> None:
    a, b = ([float(p[side]) for p in points] for side in (0, 1))
    expected = math.nan if len(set(a)) == 1 or len(set(b)) == 1 else literal_spearman(a, b)
    assert spearman(doubles(a), doubles(b)) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_correlation_of_tiny_variances_does_not_underflow() -> None:
    a = doubles([1e-200, 2e-200, 4e-200])
    assert pearson(a, 1e10 * a) == pytest.approx(1, abs=1e-12)
    assert pearson(torch.tensor([1e-30, 2e-30, 3e-30]), torch.tensor([3.0, 2.0, 1.0])) == pytest.approx(-1, abs=1e-6)


def test_bins_are_those_of_sorting_and_few_items_make_few() -> None:
    rng = np.random.default_rng(1)
    uncertainty, right = rng.permutation(103) / 7.0, rng.integers(0, 2, 103).astype(float)
    of_bins, shares = binned(torch.tensor(uncertainty), torch.tensor(right))
    parts = np.array_split(np.argsort(uncertainty), 10)
    np.testing.assert_allclose(of_bins, [uncertainty[p].mean() for p in parts], rtol=1e-12)
    np.testing.assert_allclose(shares, [right[p].mean() for p in parts], rtol=1e-12)
    for n, bins in ((1, 1), (2, 2), (9, 9), (11, 10)):
        values = torch.arange(n, dtype=torch.float32)
        found = dict(calibration("text", values, values < n / 2))
        assert sum(name.startswith("text_right@") for name in found) == bins
        assert ("text_spearman" in found) == ("text_pearson" in found) == (bins >= 3)
        assert found.get("text_spearman", -1) < -0.8


def test_equal_uncertainties_do_not_depend_on_their_order() -> None:
    uncertainty = torch.tensor([1.0] * 20 + [2.0] * 20)
    right = torch.tensor([1.0, 0.0, 0.0, 0.0] * 5 + [1.0] * 5 + [0.0] * 15)
    found = dict(calibration("text", uncertainty, right))
    assert [found[f"text_right@{k}"] for k in range(1, 11)] == pytest.approx([0.25] * 10)
    assert [found[f"text_uncertainty@{k}"] for k in (1, 10)] == [1, 2]
    assert not {"text_pearson", "text_spearman"} & set(found)
    assert binned(torch.tensor([3.0] * 12), torch.arange(12) % 2)[1].tolist() == pytest.approx([0.5] * 10)
