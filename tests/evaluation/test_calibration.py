"""Bins of uncertainty and rank correlations: against literal ones, with ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kiloword.evaluation.metrics import binned, calibration, pearson, spearman


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
