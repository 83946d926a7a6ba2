"""Wrong class labels, by confident learning (Northcutt et al., arXiv:1911.00068).

Probabilities of the classes come from the image's cosines with the mean features of each class's other images, so that
no class needs a name and the model need not know them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kiloword.model.encoding import chunks

TEMPERATURES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # of the softmax; the one that makes the labels likeliest is taken
LEAST = 3  # images of a class, below which it is not judged


class WrongLabel(NamedTuple):
    """An image whose label another class fits better."""

    margin: float  # probability of the label minus probability of the suggested class
    image: int
    label: int
    suggested: int


def wrong_labels(vectors: Tensor, labels: Tensor, chunk: int = 4096) -> list[WrongLabel]:
    """Images whose features say another class than the label, most certain first.

    A class is likely for an image when its probability is at least the mean of those that carry its label. An image is
    flagged when another class is likely, and the likeliest of these is likelier than its label.
    Args: vectors [I, D], unit norm; labels [I] int64, -1: none. Classes of fewer than LEAST images are omitted.
    """
    judged, counts = torch.unique(labels[labels >= 0], return_counts=True)
    judged = judged[counts >= LEAST]
    if len(judged) < 2:
        return []
    images = torch.isin(labels, judged).nonzero()[:, 0]
    vectors, mine = vectors[images].float(), torch.searchsorted(judged, labels[images])
    sums = vectors.new_zeros(len(judged), vectors.shape[1]).index_add_(0, mine, vectors)
    means = F.normalize(sums, dim=1)
    parts = list(chunks(len(mine), chunk))

    def probabilities(part: slice, temperature: float) -> Tensor:
        """[n, C] of some images, whose own features are omitted of the mean of their class."""
        others = F.normalize(sums[mine[part]] - vectors[part], dim=1)
        of_label = (others * vectors[part]).sum(1, keepdim=True)
        cosines = (vectors[part] @ means.T).scatter(1, mine[part][:, None], of_label)
        return (cosines / temperature).softmax(1)

    def of_labels(temperature: float) -> Tensor:
        """[I] the probability of each image's label."""
        return torch.cat([probabilities(part, temperature).gather(1, mine[part][:, None])[:, 0] for part in parts])

    temperature = min(TEMPERATURES, key=lambda t: -float(of_labels(t).clamp(min=1e-12).log().sum()))
    actual = of_labels(temperature)
    least = actual.new_zeros(len(judged)).index_add_(0, mine, actual) / torch.bincount(mine, minlength=len(judged))
    wrong = list[WrongLabel]()
    for part in parts:
        chances = probabilities(part, temperature)
        best, other = chances.masked_fill(chances < least, 0).scatter(1, mine[part][:, None], 0).max(1)
        for n in (best > actual[part]).nonzero()[:, 0].tolist():
            image = int(images[part.start + n])
            margin = float(actual[part.start + n] - best[n])
            wrong.append(WrongLabel(margin, image, int(labels[image]), int(judged[other[n]])))
    return sorted(wrong)
