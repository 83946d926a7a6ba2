"""Retrieval of images with complete ground truth, and code shared by one-stage and two-stage retrieval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kiloword.distributed.sharing import in_turns
from kiloword.evaluation.metrics import average_precision, hit, precision_at, standing
from kiloword.model.encoding import chunks, rows
from kiloword.types import Features

Score = Callable[[Features, Features], Tensor]
"""Images [i, ...] and texts [t, ...] -> [i, t], higher = better match: a head's `score`."""

Relevance = Callable[[slice], "Tensor | np.ndarray"]
"""Rows of texts -> [t, I] bool: the images that each text is true of."""

PANEL = 1 << 22  # scores sorted at once


def check_pairs(images: Features, texts: Features, image_of_text: Tensor) -> None:
    """Raises: ValueError for no images, no texts, or indices out of range."""
    n, t = len(images["vec"]), len(texts["vec"])
    if n == 0 or t == 0:
        raise ValueError(f"retrieval got {n} images and {t} texts: it needs at least one of each")
    if image_of_text.shape != (t,) or not 0 <= int(image_of_text.min()) <= int(image_of_text.max()) < n:
        raise ValueError(f"image_of_text must hold, for each of the {t} texts, the row of one of the {n} images")


def true_relevance(
    score: Score,
    images: Features,
    texts: Features,
    relevance: Relevance | Tensor,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = 1024,
) -> Iterator[tuple[str, float]]:
    """Metrics of image retrieval with complete ground truth: every image that a text is true of is relevant.

    `image_retrieval_true_map` (average precision), `image_retrieval_true_r_precision` (hits among the first R over R,
    with R relevant images), `image_retrieval_true_recall@k` (any hit among the first k). Means over the texts that are
    true of some image; `image_retrieval_true_unmatched` is the number of others, if any.
    """
    n, t = len(images["vec"]), len(texts["vec"])

    def panel(c: slice) -> Tensor:
        return torch.cat([score(rows(images, r), rows(texts, c)) for r in chunks(n, chunk)]).T

    yield from true_means(panel, n, t, relevance, ks)


def true_means(
    panel: Callable[[slice], Tensor], n: int, t: int, relevance: Relevance | Tensor, ks: Sequence[int]
) -> Iterator[tuple[str, float]]:
    """The metrics of `true_relevance` for n images and t texts. Args: panel: scores [rows, I] of rows of texts."""

    def judged(c: slice) -> tuple[int, dict[str, float]]:
        scores = panel(c)
        truth = torch.as_tensor(relevance[c] if isinstance(relevance, Tensor) else relevance(c))
        if truth.shape != scores.shape:
            shape, expected = tuple(truth.shape), tuple(scores.shape)
            raise ValueError(f"relevance came as {shape}; {expected} (texts, images) expected")
        matched_texts = truth.any(1)
        sums = _panel_metrics(scores[matched_texts.to(scores.device)], truth[matched_texts].to(scores.device), ks)
        return int(matched_texts.sum()), dict(sums)

    totals: dict[str, float] = {}
    answerable = 0
    for count, panel_sums in in_turns(list(chunks(t, max(1, PANEL // n))), judged):
        answerable += count
        for name, value in panel_sums.items():
            totals[name] = totals.get(name, 0.0) + value
    if not answerable:
        raise ValueError("no text is true of any image: there is nothing to retrieve")
    for name, value in totals.items():
        yield name, value / answerable
    if answerable < t:
        yield "image_retrieval_true_unmatched", float(t - answerable)


def _panel_metrics(scores: Tensor, truth: Tensor, ks: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Sums over the texts of one panel: scores [t, I], truth [t, I] bool."""
    yield "image_retrieval_true_map", average_precision(scores, truth).sum().item()
    yield "image_retrieval_true_r_precision", precision_at(scores, truth, truth.sum(1)).sum().item()
    where = standing(scores, truth)
    for k in ks:
        yield f"image_retrieval_true_recall@{k}", hit(where, k).sum().item()
