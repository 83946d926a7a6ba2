"""How far every annotated pair stands out from random pairs of the same image, and of the same caption.

A score alone says little: general captions score alike with many images, and models differ in scale. Each pair is
compared with its row (the image with captions of other images) and its column (the caption with other images), as
standard scores; so is the cosine of the caption and the mean of the image's other captions. A linear discriminant
between annotated and random pairs (Fisher, 1936) weighs these into the `fit` of a pair.

Which pairs do not match follows from a threshold on the fit, with an estimate of its own precision.
A caption that belongs to another image is, for its image, a random pair. So the fits of annotated pairs are a mixture
of a share s that does not match, distributed like random pairs (F0, which is known), and of pairs that match (F1):
F = s F0 + (1 - s) F1. Pairs that match are taken to spread as far below the median as above it (M, the upper half
mirrored); then (F - M) / F0 estimates s at every fit, and its least value over the upper half of random pairs is taken
(Storey, 2002; in proteomics: target and decoy). Of the pairs below t, s F0(t) / F(t) then do not match: the precision,
which falls as t rises. The threshold is the largest t with the wanted precision; recall, of what does not match, is
F0(t). A model that was trained on the data has learned some of its wrong pairs, which then fit better than random ones:
the share and the precision are underestimated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kiloword.evaluation.metrics import check_scores
from kiloword.model.encoding import chunks, rows
from kiloword.randomness import some
from kiloword.terminal.progress import track
from kiloword.types import Features

RANDOM_IMAGES, RANDOM_TEXTS = 1024, 2048  # drawn: all their pairs are random pairs
LEAST = 8  # images, below which nothing stands out from the others
QUANTILES = np.linspace(0.5, 0.9, 17)  # of random pairs, where the share of pairs that do not match is estimated
USUAL = 0.25  # quantile of the scores of annotated pairs, from which a pair scores as pairs do
FEWEST = 5  # flagged pairs; fewer give no estimate of the precision

Floats = NDArray[np.float64]
Score = Callable[[Features, Features], Tensor]
"""Of images [I, ...] and texts [T, ...]: all scores [I, T], or those of pairs [N]."""


def cosines(images: Features, texts: Features) -> Tensor:
    """Of unit vectors: [I, T]."""
    return images["vec"] @ texts["vec"].T


def cosines_of_pairs(images: Features, texts: Features) -> Tensor:
    """Of unit vectors: [N]."""
    return (images["vec"] * texts["vec"]).sum(1)


@dataclass(frozen=True)
class OutlierRule:
    """Pairs whose fit is below the threshold do not match. Shares in [0, 1], estimated."""

    threshold: float | None  # None: no pair is flagged
    flagged: int
    share: float  # of pairs that do not match
    precision: float | None  # of the flagged pairs; None: none is
    recall: float

    def __str__(self) -> str:
        share = f"by estimate at least {self.share:.1%} of the pairs do not match"
        if self.threshold is None:
            return f"{share}; none is flagged at this precision"
        precision = f"estimated precision {self.precision:.2f}, recall {self.recall:.2f}"
        return f"{share}; {self.flagged:,} are flagged below a fit of {self.threshold:.2f}: {precision}"


def rule(annotated: Floats, random: Floats, precision: float) -> OutlierRule:
    """The rule of a wanted precision.

    Args: fits of annotated [T] and of random pairs [R], at least one each; precision in (0, 1]. Where fewer than FEWEST
    pairs reach it none is flagged.
    """
    ordered, chance = np.sort(annotated), np.sort(random)
    at = np.quantile(chance, QUANTILES)
    mirrored = 1 - np.searchsorted(ordered, 2 * np.median(ordered) - at, "left") / len(ordered)
    shares = (np.searchsorted(ordered, at, "right") / len(ordered) - mirrored) / QUANTILES
    share = float(np.clip(np.min(shares), 0, 1))
    below = np.arange(1, len(ordered) + 1) / len(ordered)
    expected = share * np.searchsorted(chance, ordered, "right") / len(chance)
    good = np.flatnonzero(expected / below >= precision)
    if not len(good) or good[-1] + 1 < FEWEST:
        return OutlierRule(None, 0, share, None, 0.0)
    threshold = float(np.nextafter(ordered[good[-1]], np.inf))
    recall, flagged = float(np.mean(chance < threshold)), int(np.sum(annotated < threshold))
    return OutlierRule(threshold, flagged, share, min(1.0, share * recall * len(annotated) / flagged), recall)


@dataclass(frozen=True)
class Fits:
    """How well pairs fit, all on one scale: in standard deviations of random pairs above their mean."""

    annotated: Floats  # [T]
    random: Floats  # [R], of pairs of an image and a caption of another
    fitting: NDArray[np.int64]  # [T] other images that score with the caption as high as its own, and as usual pairs
    rule: OutlierRule


def fits(
    images: Features,
    texts: Features,
    owner: Tensor,
    precision: float = 0.8,
    score: Score = cosines,
    pairs: Score = cosines_of_pairs,
    chunk: int = 1024,
) -> Fits:
    """The fit of every annotated pair and of random ones, computed in blocks; nothing [I, T] is kept.

    Args: images [I, ...]; texts [T, ...]; owner [T] int64, the image of each text, ascending; precision: of the rule;
    score, pairs: the model's, of all pairs and of given ones.
    Raises: ValueError for fewer than LEAST images, and scores that are NaN.
    """
    n = len(images["vec"])
    if n < LEAST:
        raise ValueError(f"there are {n} images with captions: expected at least {LEAST}, to tell what stands out.")
    owner = owner.to(images["vec"].device)
    paired = [pairs(rows(images, owner[part]), rows(texts, part)).double() for part in chunks(len(owner), chunk)]
    annotated, random, fitting = _standard_scores(score, torch.cat(paired), images, texts, owner, chunk)
    captions = torch.bincount(owner, minlength=n)
    if int(captions.max()) > 1:
        vectors = texts["vec"].float()
        total = vectors.new_zeros(n, vectors.shape[1]).index_add_(0, owner, vectors)
        others = total[owner] - vectors
        others[captions[owner] < 2] = 0  # the mean of no other caption: its cosines are 0
        near, means = (F.normalize(others) * vectors).sum(1).double(), {"vec": F.normalize(total)}
        more = _standard_scores(cosines, near, means, {"vec": vectors}, owner, chunk)
        annotated, random = torch.cat([annotated, more[0]], 1), torch.cat([random, more[1]], 1)
    weights = _discriminant(annotated, random)
    chance = random @ weights
    centre, spread = chance.mean(), chance.std().clamp(min=1e-12)
    ours, theirs = (((x - centre) / spread).cpu().numpy() for x in (annotated @ weights, chance))
    return Fits(ours, theirs, fitting.cpu().numpy(), rule(ours, theirs, precision))


def _standard_scores(
    score: Score, paired: Tensor, images: Features, texts: Features, owner: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard scores by row and by column of annotated pairs [T, 2], whose scores are `paired` [T], and of random ones
    [R, 2]; and the number [T] of other images that fit a caption, see `Fits`."""
    n, t, device = len(images["vec"]), len(owner), check_scores(paired).device
    by_row, by_column = (torch.zeros(3, size, dtype=torch.float64, device=device) for size in (n, t))
    fitting, level = torch.zeros_like(owner), paired.maximum(paired.quantile(USUAL))
    blocks = [(r, c) for r in chunks(n, chunk) for c in chunks(t, chunk)]
    for r, c in track(blocks, "pairs", "blocks of pairs", len(blocks)):
        block = check_scores(score(rows(images, r), rows(texts, c))).double()
        others = torch.arange(r.start, r.stop, device=device)[:, None] != owner[c]
        block = torch.where(others, block, 0.0)
        sums = torch.stack([others.double(), block, block.square()])
        by_row[:, r] += sums.sum(2)
        by_column[:, c] += sums.sum(1)
        fitting[c] += ((block >= level[c]) & others).sum(0)
    (row, row_std), (column, column_std) = _moments(by_row), _moments(by_column)
    annotated = torch.stack([(paired - row[owner]) / row_std[owner], (paired - column) / column_std], 1)
    drawn = ((n, RANDOM_IMAGES), (t, RANDOM_TEXTS))
    i, j = (torch.from_numpy(some(size, most, 0, "random pairs", size)) for size, most in drawn)
    block = score(rows(images, i), rows(texts, j)).double()
    random = torch.stack([((block.T - row[i]) / row_std[i]).T, (block - column[j]) / column_std[j]], 2)
    return annotated, random[i[:, None].to(device) != owner[j]], fitting


def _moments(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, 1 where it is 0, from count, sum and sum of squares [3, n]."""
    mean, squares = sums[1:] / sums[0].clamp(min=1)
    deviation = (squares - mean.square()).clamp(min=0).sqrt()
    return mean, torch.where(deviation > 1e-9, deviation, 1.0)


def _discriminant(annotated: Tensor, random: Tensor) -> Tensor:
    """Weights [K] of standard scores [N, K] that part annotated from random pairs best; none is negative."""
    difference = annotated.mean(0) - random.mean(0)
    within = annotated.T.cov() + random.T.cov()
    within = within + 1e-3 * within.diagonal().mean().clamp(min=1e-6) * torch.eye(len(difference)).to(within)
    chosen = torch.ones_like(difference, dtype=torch.bool)
    while bool(chosen.any()):
        weights = torch.zeros_like(difference)
        weights[chosen] = torch.linalg.solve(within[chosen][:, chosen], difference[chosen])
        if bool((weights >= 0).all()):
            return weights
        chosen[weights.argmin()] = False
    return torch.ones_like(difference)
