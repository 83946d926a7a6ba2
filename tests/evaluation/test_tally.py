"""Metrics by groups, F1, parts of class names, 11-point precision and means of recalls, against literal code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.evaluation import metrics
from kiloword.evaluation.retrieval.task import mean_recalls

PAIRS = ["ripe apple", "cut apple", "ripe pear", "old car", "cut pear", "new car"]


def scored(seed: int, images: int, classes: int) -> tuple[Tensor, Tensor]:
    """Scores [N, C] that are right more often than by chance, and labels [N] that miss the last class."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (images,), generator=g)
    right = torch.nn.functional.one_hot(labels, classes)
    return torch.randn(images, classes, generator=g) + right, labels


def points(relevant: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """11-point average precision, one threshold after the other."""
    best = [0.0] * 11
    for threshold in scores:
        chosen = scores >= threshold
        hits, all_relevant = int((chosen & relevant).sum()), int(relevant.sum())
        for r in range(11):
            if 10 * hits >= r * all_relevant:
                best[r] = max(best[r], hits / int(chosen.sum()))
    return sum(best) / 11


@pytest.mark.parametrize("decimals", [6, 1])
def test_interpolated_average_precision(decimals: int) -> None:
    g = torch.Generator().manual_seed(decimals)
    scores = (torch.rand(6, 50, generator=g) * 10**decimals).round()
    relevant = torch.rand(6, 50, generator=g) < torch.tensor([0.02, 0.1, 0.2, 0.5, 0.9, 1.0])[:, None]
    relevant[0, 0] = True
    computed = metrics.interpolated_average_precision(scores, relevant)
    expected = [points(r.numpy(), s.double().numpy()) for s, r in zip(scores, relevant, strict=True)]
    assert computed.tolist() == pytest.approx(expected)
    assert metrics.interpolated_average_precision(scores, torch.zeros_like(relevant)).tolist() == [0] * 6


def test_precisions_of_scikit_learn() -> None:
    """Per class, also with ties for the 11 points."""
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    g = torch.Generator().manual_seed(0)
    scores, relevant = torch.rand(4, 30, generator=g), torch.rand(4, 30, generator=g) < 0.4
    expected = [sklearn.average_precision_score(r, s) for s, r in zip(scores.numpy(), relevant.numpy(), strict=True)]
    assert metrics.average_precision(scores, relevant).tolist() == pytest.approx(expected)
    coarse = (4 * scores).round()
    for row, (s, r) in enumerate(zip(coarse.numpy(), relevant.numpy(), strict=True)):
        precision, recall, _ = sklearn.precision_recall_curve(r, s)
        points = [precision[:-1][recall[:-1] >= level / 10 - 1e-12].max() for level in range(11)]
        value = metrics.interpolated_average_precision(coarse, relevant)[row].item()
        assert value == pytest.approx(float(np.mean(points)))


def test_macro_f1_of_scikit_learn() -> None:
    """As WILDS calls it: over the classes that occur."""
    sklearn = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn")
    scores, labels = scored(0, 300, 12)
    chosen = scores.argmax(1)
    right = torch.bincount(labels[chosen == labels], minlength=12).double()
    value = metrics.macro_f1(right, torch.bincount(chosen, minlength=12), torch.bincount(labels, minlength=12))
    assert value == pytest.approx(sklearn.f1_score(labels, chosen, average="macro", labels=labels.unique()))


def test_means_of_recalls() -> None:
    values = {f"{side}_retrieval_recall@{k}": k / 100 + (side == "text") for side in ("text", "image") for k in (1, 5)}
    assert dict(mean_recalls(values, (1, 5))) == {
        "mean_recall@1": pytest.approx((1.01 + 0.01) / 2),
        "text_retrieval_mean_recall": pytest.approx(1.03),
        "image_retrieval_mean_recall": pytest.approx(0.03),
        "rsum": pytest.approx(1.01 + 1.05 + 0.01 + 0.05),
    }
    assert "mean_recall@1" not in dict(mean_recalls(values, (5,)))
