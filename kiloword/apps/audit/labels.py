"""Wrong class labels, by confident learning (Northcutt et al., arXiv:1911.00068).

Probabilities of the classes come from the image's cosines with the mean features of each class's other images, so that
no class needs a name and the model need not know them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # of the softmax; the one that makes the labels likeliest is taken
LEAST = 3  # images of a class, below which it is not judged


def wrong_labels(vectors: Tensor, labels: Tensor) -> list[tuple[float, int, int, int]]:
    """Images whose features say another class than the label, most certain first: margin, image, label, suggested.

    A class is likely for an image when its probability is at least the mean of those that carry its label. An image is
    flagged when another class is likely, and the likeliest of these is likelier than its label; the margin is by how
    much. Args: vectors [I, D], unit norm; labels [I] int64, -1: none. Classes of fewer than LEAST images are omitted.
    """
    judged, counts = torch.unique(labels[labels >= 0], return_counts=True)
    judged = judged[counts >= LEAST]
    if len(judged) < 2:
        return []
    images = torch.isin(labels, judged).nonzero()[:, 0]
    vectors, mine = vectors[images], torch.searchsorted(judged, labels[images])[:, None]
    sums = vectors.new_zeros(len(judged), vectors.shape[1]).index_add_(0, mine[:, 0], vectors)
    others = F.normalize(sums[mine[:, 0]] - vectors)  # of the own class without the image
    cosines = (vectors @ F.normalize(sums).T).scatter(1, mine, (others * vectors).sum(1, keepdim=True))

    def of_labels(temperature: float) -> Tensor:
        """[I, 1] the probability of each image's label."""
        return (cosines / temperature).softmax(1).gather(1, mine)

    temperature = min(TEMPERATURES, key=lambda t: -float(of_labels(t).clamp(min=1e-12).log().sum()))
    chances, actual = (cosines / temperature).softmax(1), of_labels(temperature)
    least = torch.zeros_like(sums[:, :1]).index_add_(0, mine[:, 0], actual) / counts[counts >= LEAST][:, None]
    best, other = chances.masked_fill(chances < least.T, 0).scatter(1, mine, 0).max(1)
    margins = actual[:, 0] - best
    found = (margins < 0).nonzero()[:, 0]
    columns = margins[found], images[found], labels[images[found]], judged[other[found]]
    return sorted(zip(*(column.tolist() for column in columns), strict=True))
