"""Metrics as pure functions of scores. Ties get their expected value over every order of the tied items.

So a constant score gives chance level, and without ties the values equal CLIP_benchmark's. Hits and accuracy treat
scores that differ only by rounding as tied: a matrix product can round equal rows differently in different blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CELLS = 2**22  # scores that are ranked at once


class Standing(NamedTuple):
    """Rank of the best positive of every query, with ties. All [N] int64."""

    higher: Tensor  # items scoring strictly higher
    tied: Tensor  # items with its score up to rounding, itself included
    positives: Tensor  # positives among the tied; 0: the query has none


def check_scores(scores: Tensor) -> Tensor:
    """Return the scores. Raises: ValueError for NaN, which cannot be ranked."""
    if bool(scores.isnan().any()):
        raise ValueError("scores are NaN: nothing can be ranked; the weights or the features hold NaN or infinity")
    return scores


def rounding(best: Tensor) -> Tensor:
    """Largest rounding difference of two equal scores: 4 units in the last place of a number of at least 1.

    Measured: cosines of unit vectors of up to 1152 dimensions differed by 1.5 units between block shapes.
    """
    return 4 * torch.finfo(torch.promote_types(best.dtype, torch.float32)).eps * best.abs().clamp(min=1)


def standing(scores: Tensor, positive: Tensor) -> Standing:
    """Count items above and tied with the best positive.

    Args: scores [N, C], higher = better; positive [N, C] bool.
    """
    best = check_scores(scores).masked_fill(~positive, -torch.inf).amax(1, keepdim=True)  # [N, 1]
    higher = scores > best + rounding(best)
    tied = (scores >= best - rounding(best)) & ~higher
    return Standing(higher.sum(1), tied.sum(1), (tied & positive).sum(1))


def hit(where: Standing, k: int) -> Tensor:
    """Probability that a positive is among the first k, over all orders of ties: [N] float64 in [0, 1].

    With m tied items, p of them positive, and s places left for them, it is 1 - C(m - p, s) / C(m, s).
    A query without a positive is a miss, as in CLIP_benchmark.
    """
    places = k - where.higher
    missed = torch.ones_like(places, dtype=torch.float64)
    for j in range(k):
        share = (where.tied - where.positives - j).clamp(min=0) / (where.tied - j).clamp(min=1).double()
        missed = torch.where(j < places, missed * share, missed)
    return torch.where(where.positives > 0, 1 - missed, 0)


def recall_at(scores: Tensor, positive: Tensor, k: int) -> Tensor:
    """Recall@k: whether any positive is among the first k.

    Args: scores [N, C]; positive [N, C] bool. Returns: [N] float64 in [0, 1].
    In image retrieval, queries are texts with one positive each; in text retrieval, images with all their captions.
    """
    return hit(standing(scores, positive), k)


def classification(where: Standing, labels: Tensor, classes: int) -> Iterator[tuple[str, float]]:
    """CLIP_benchmark's `acc1`, `acc5` (omitted below 5 classes, where it is undefined), and `mean_per_class_recall`:
    the mean of the accuracies of the classes that occur.

    Args: where: the standing of the true class, [N] each; labels [N] int64.
    """
    first, occurs = hit(where, 1), torch.bincount(labels)
    yield "acc1", first.mean().item()
    if classes >= 5:
        yield "acc5", hit(where, 5).mean().item()
    yield (
        "mean_per_class_recall",
        (torch.bincount(labels, weights=first)[occurs > 0] / occurs[occurs > 0]).mean().item(),
    )


class _Ranked(NamedTuple):
    """A ranking with its groups of ties. `place` is [C], all others [N, C]."""

    place: Tensor  # from 0
    before: Tensor  # relevant items ahead of this place's group
    relevant: Tensor  # relevant items in the group
    size: Tensor  # items in the group
    inside: Tensor  # place inside the group, from 0


def _ranked(scores: Tensor, relevant: Tensor) -> _Ranked:
    order = check_scores(scores).argsort(dim=1, descending=True)
    ordered = scores.gather(1, order)
    cumulative = relevant.gather(1, order).to(torch.float64).cumsum(1)
    cumulative = torch.nn.functional.pad(cumulative, (1, 0))  # [N, C + 1]: relevant items in the first n places
    place = torch.arange(scores.shape[1], device=scores.device)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = torch.where(new, place, 0).cummax(1).values
    last = torch.ones_like(new)
    last[:, :-1] = new[:, 1:]
    end = torch.where(last, place + 1, scores.shape[1]).flip(1).cummin(1).values.flip(1)
    before = cumulative.gather(1, start)
    return _Ranked(place, before, cumulative.gather(1, end) - before, end - start, place - start)


def in_parts(figure: Callable[[Tensor, Tensor], Tensor], scores: Tensor, relevant: Tensor) -> Tensor:
    """A figure [N] of each row of scores and relevant [N, C]; CELLS at a time, as ranking takes 126 bytes a cell."""
    rows = max(1, CELLS // scores.shape[1])
    return torch.cat([figure(scores[n : n + rows], relevant[n : n + rows]) for n in range(0, len(scores), rows)])


def average_precision(scores: Tensor, relevant: Tensor) -> Tensor:
    """Non-interpolated average precision: the precision at every relevant item, averaged.

    Args: scores [N, C]; relevant [N, C] bool. Returns: [N] float64 in [0, 1]; 0 where nothing is relevant.
    Ties: the expectation over their orders. A place of a group of n with r relevant, j places into it, is relevant
    with chance r / n, and then expects j (r - 1) / (n - 1) relevant ones ahead of it in the group.
    """
    every = torch.full((len(scores),), scores.shape[1], device=scores.device)
    return _expected_precisions(_ranked(scores, relevant), every) / relevant.sum(1).clamp(min=1)


def average_precision_at_r(scores: Tensor, relevant: Tensor) -> Tensor:
    """mAP@R's average: the precision at every relevant item among the first R, summed, over R relevant items.

    Args: scores [N, C]; relevant [N, C] bool. Returns: [N] float64 in [0, 1]; 0 where nothing is relevant.
    Ties: the expectation over their orders, as of `average_precision`. Source: arXiv:2204.03359, section 5.
    """
    total = relevant.sum(1)
    return _expected_precisions(_ranked(scores, relevant), total) / total.clamp(min=1)


def _expected_precisions(ranked: _Ranked, first: Tensor) -> Tensor:
    """Sum of the precisions at relevant items among the `first` [N] places, in expectation over ties: [N]."""
    ahead = ranked.inside * (ranked.relevant - 1) / (ranked.size - 1).clamp(min=1)
    precision = (ranked.before + ahead + 1) / (ranked.place + 1)
    expected = ranked.relevant / ranked.size * precision
    return expected.masked_fill(ranked.place >= first[:, None], 0).sum(1)


def precision_at(scores: Tensor, relevant: Tensor, k: Tensor) -> Tensor:
    """Share of relevant items among the first k, in expectation over ties.

    Args: scores [N, C]; relevant [N, C] bool; k [N] int64, at least 1 (the number of relevant items: R-precision).
    Returns: [N] float64 in [0, 1].
    """
    ranked = _ranked(scores, relevant)
    chance = (ranked.relevant / ranked.size).masked_fill(ranked.place >= k[:, None], 0)
    return chance.sum(1) / k


def interpolated_average_precision(scores: Tensor, relevant: Tensor) -> Tensor:
    """11-point average precision of PASCAL VOC until 2009: the mean over recalls r of 0, 0.1, ..., 1 of the largest
    precision at a recall of at least r. Recalls are compared exactly; MATLAB's development kit rounds 0.3 upwards.

    Args: scores [N, C]; relevant [N, C] bool. Returns: [N] float64 in [0, 1]; 0 where nothing is relevant.
    Tied items enter together, as in scikit-learn's `precision_recall_curve`.
    """
    ranked = _ranked(scores, relevant)
    hits, total = ranked.before + ranked.relevant, relevant.sum(1, keepdim=True)
    precision = hits / (ranked.place - ranked.inside + ranked.size)  # [N, C], at the end of each place's group
    levels = [precision.masked_fill(10 * hits < r * total, 0).amax(1) for r in range(11)]
    return torch.stack(levels).mean(0) * (total[:, 0] > 0)


def macro_f1(hits: Tensor, predicted: Tensor, actual: Tensor) -> float:
    """Mean over the classes that occur of F1 = 2 hits / (predicted + actual), as of WILDS' iWildCam.

    Args: of each class the number of images that are predicted as it and right, predicted as it, and of it: [C] each.
    """
    occurs = actual > 0
    return (2 * hits[occurs] / (predicted + actual)[occurs]).mean().item()
