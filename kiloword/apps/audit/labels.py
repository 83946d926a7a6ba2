"""Wrong class labels, by confident learning (Northcutt et al., arXiv:1911.00068).

Probabilities of the classes come from the image's cosines with the mean features of each class's other images, so that
no class needs a name and the model need not know them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kiloword.model.encoding import chunks

TEMPERATURES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # of the softmax, of which the likeliest labels choose
LEAST = 3  # images of a class, below which it is not judged


@dataclass(frozen=True)
class WrongLabel:
    """An image whose label another class fits better."""

    image: int
    label: int
    suggested: int
    margin: float  # probability of the label minus that of the suggested class


def wrong_labels(vectors: Tensor, labels: Tensor, chunk: int = 4096) -> list[WrongLabel]:
    """Images of which the features say another class than the label, most certain first.

    A class is likely for an image when its probability is at least the mean of those that carry its label. An image is
    flagged when another class is likely, and the likeliest of these is likelier than its label.
    Args: vectors [I, D], unit norm; labels [I] int64, -1: none. Classes of fewer than LEAST images are omitted.
    """
    counts = torch.bincount(labels.clamp(min=0)[labels >= 0]) if bool((labels >= 0).any()) else labels.new_zeros(0)
    judged = torch.nonzero(counts >= LEAST)[:, 0]
    if len(judged) < 2:
        return []
    place = labels.new_full((len(counts) + 1,), -1)  # the last is that of -1
    place[judged] = torch.arange(len(judged))
    mine = place[labels]
    rows = torch.nonzero(mine >= 0)[:, 0]
    vectors, mine = vectors[rows].float(), mine[rows]
    sums = vectors.new_zeros(len(judged), vectors.shape[1]).index_add_(0, mine, vectors)
    temperature = min(TEMPERATURES, key=lambda t: _loss(vectors, mine, sums, t, chunk))
    parts = [_probabilities(vectors, mine, sums, part, temperature) for part in chunks(len(mine), chunk)]
    means = _means_by_class(parts, mine, len(judged), chunk)
    wrong = list[WrongLabel]()
    for part, chances in zip(chunks(len(mine), chunk), parts, strict=True):
        actual = chances.gather(1, mine[part][:, None])[:, 0]
        likely = chances.masked_fill(chances < means, 0).scatter(1, mine[part][:, None], 0)
        best, other = likely.max(1)
        for n in torch.nonzero(best > actual)[:, 0].tolist():
            image = int(rows[part.start + n])
            one = WrongLabel(image, int(labels[image]), int(judged[other[n]]), float(actual[n] - best[n]))
            wrong.append(one)
    return sorted(wrong, key=lambda one: (one.margin, one.image))


def _probabilities(vectors: Tensor, mine: Tensor, sums: Tensor, part: slice, temperature: float) -> Tensor:
    """[n, C] of some images, whose own features are omitted of the mean of their class. Args: sums [C, D] by class."""
    means = torch.nn.functional.normalize(sums, dim=1)
    cosines = vectors[part] @ means.T
    others = torch.nn.functional.normalize(sums[mine[part]] - vectors[part], dim=1)
    mean = (others * vectors[part]).sum(1, keepdim=True)
    return (cosines.scatter(1, mine[part][:, None], mean) / temperature).softmax(1)


def _loss(vectors: Tensor, mine: Tensor, sums: Tensor, temperature: float, chunk: int) -> float:
    """Negative log-likelihood of the labels."""
    total = 0.0
    for part in chunks(len(mine), chunk):
        chances = _probabilities(vectors, mine, sums, part, temperature).gather(1, mine[part][:, None])
        total -= float(chances.clamp(min=1e-12).log().sum())
    return total


def _means_by_class(parts: list[Tensor], mine: Tensor, classes: int, chunk: int) -> Tensor:
    """[C] mean probability of a class over the images with its label."""
    actual = torch.cat(
        [p.gather(1, mine[c][:, None])[:, 0] for c, p in zip(chunks(len(mine), chunk), parts, strict=True)]
    )
    total = actual.new_zeros(classes).index_add_(0, mine, actual)
    return total / torch.bincount(mine, minlength=classes)
