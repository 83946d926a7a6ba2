"""How far every annotated pair stands out from random pairs of the same image, and of the same caption.

A score alone says little: general captions score alike with many images, and models differ in scale. Each pair is
compared with its row (the image with captions of other images) and its column (the caption with other images), as
standard scores. Where images have several captions the same is done with the cosine of the caption and the mean of the
image's other captions. A linear discriminant between annotated and random pairs (Fisher, 1936) weighs these; the
result, in standard deviations of random pairs above their mean, is the `fit` of a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.evaluation.metrics import check_scores
from kiloword.evaluation.retrieval import Score
from kiloword.model.encoding import chunks, rows
from kiloword.randomness import generator
from kiloword.terminal.progress import track
from kiloword.types import Features

RANDOM_IMAGES, RANDOM_TEXTS = 1024, 2048  # of which all pairs are random pairs
LEAST = 8  # images, below which nothing stands out from the others

Floats = NDArray[np.float64]
PairScore = Callable[[Features, Features], Tensor]
"""Images [N, ...] and texts [N, ...] -> [N]: the score of image n with text n."""


@dataclass(frozen=True)
class Fits:
    """How well pairs fit, all on one scale: in standard deviations of random pairs above their mean."""

    annotated: Floats  # [T]
    random: Floats  # [R], of pairs of an image and a caption of another
    fitting: NDArray[np.int64]  # [T] other images whose score with the caption is at least that of its own
    weights: dict[str, float]  # of the discriminant


@dataclass
class _Moments:
    """Sums over the unannotated pairs of every row or column."""

    count: Tensor
    total: Tensor
    squares: Tensor

    @staticmethod
    def zeros(n: int, device: torch.device) -> _Moments:
        return _Moments(*(torch.zeros(n, dtype=torch.float64, device=device) for _ in range(3)))

    def add(self, where: slice, block: Tensor, others: Tensor, dim: int) -> None:
        """Args: block [i, t] float64, 0 where not others [i, t] bool."""
        self.count[where] += others.sum(dim)
        self.total[where] += block.sum(dim)
        self.squares[where] += block.square().sum(dim)

    def standard(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation; a deviation of 0 is 1."""
        mean = self.total / self.count.clamp(min=1)
        deviation = (self.squares / self.count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()
        return mean, torch.where(deviation > 1e-9, deviation, 1.0)


@dataclass(frozen=True)
class _Standards:
    """Standard scores by row and by column: of annotated pairs [T, 2] and of random ones [R, 2]."""

    annotated: Tensor
    random: Tensor
    fitting: Tensor  # [T]


def fits(
    score: Score,
    pairs: PairScore,
    images: Features,
    texts: Features,
    image_of_text: Tensor,
    chunk: int = 1024,
    seed: int = 0,
) -> Fits:
    """The fit of every annotated pair and of random ones, computed in blocks; nothing [I, T] is kept.

    Args: score, pairs: the model's, of all pairs and of given ones; images [I, ...]; texts [T, ...]; image_of_text [T]
    int64, ascending. Raises: ValueError for fewer than LEAST images, and scores that are NaN.
    """
    n = len(images["vec"])
    if n < LEAST:
        raise ValueError(f"there are {n} images with captions: expected at least {LEAST}, to tell what stands out.")
    owner = image_of_text.to(images["vec"].device)
    paired = _paired(pairs, images, texts, owner, chunk)
    standards = [_standards(score, paired, images, texts, owner, chunk, seed)]
    names = ["caption against other captions", "image against other images"]
    if siblings := _siblings(texts["vec"], owner, n):
        means, others = siblings
        similar = {"vec": texts["vec"].float()}
        near = (others * similar["vec"]).sum(1).double()
        standards.append(_standards(_cosines, near, {"vec": means}, similar, owner, chunk, seed))
        names += ["the same by the image's other captions, row", "the same by the image's other captions, column"]
    annotated, random = (torch.cat([getattr(s, side) for s in standards], 1) for side in ("annotated", "random"))
    weights = _discriminant(annotated, random)
    fit, chance = annotated @ weights, random @ weights
    centre, spread = chance.mean(), chance.std().clamp(min=1e-12)
    return Fits(
        annotated=_array((fit - centre) / spread),
        random=_array((chance - centre) / spread),
        fitting=standards[0].fitting.cpu().numpy(),
        weights=dict(zip(names, (weights / spread).tolist(), strict=True)),
    )


def _array(values: Tensor) -> Floats:
    return values.double().cpu().numpy()


def _cosines(images: Features, texts: Features) -> Tensor:
    return images["vec"] @ texts["vec"].T


def _paired(pairs: PairScore, images: Features, texts: Features, owner: Tensor, chunk: int) -> Tensor:
    """Scores of annotated pairs [T] float64."""
    parts = []
    for part in chunks(len(owner), chunk):
        mine = {name: value[owner[part]] for name, value in images.items()}
        parts.append(pairs(mine, rows(texts, part)).double())
    return check_scores(torch.cat(parts))


def _siblings(vectors: Tensor, owner: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
    """The mean direction of each image's captions [I, D], and of the others of each caption's image [T, D].

    None where no image has two. The mean of no other caption is the zero vector, whose cosines are 0.
    """
    count = torch.bincount(owner, minlength=n)
    if int(count.max()) < 2:
        return None
    vectors = vectors.float()
    total = vectors.new_zeros(n, vectors.shape[1]).index_add_(0, owner, vectors)
    others = total[owner] - vectors
    others[count[owner] < 2] = 0
    unit = torch.nn.functional.normalize
    return unit(total, dim=1), unit(others, dim=1)


def _standards(
    score: Score, paired: Tensor, images: Features, texts: Features, owner: Tensor, chunk: int, seed: int
) -> _Standards:
    """Standard scores of annotated pairs, whose scores are `paired` [T], and of random ones."""
    n, t, device = len(images["vec"]), len(owner), owner.device
    by_row, by_column = _Moments.zeros(n, device), _Moments.zeros(t, device)
    fitting = torch.zeros(t, dtype=torch.int64, device=device)
    blocks = [(r, c) for r in chunks(n, chunk) for c in chunks(t, chunk)]
    for r, c in track(blocks, "pairs", "blocks of pairs", len(blocks)):
        block = check_scores(score(rows(images, r), rows(texts, c))).double()
        others = torch.arange(r.start, r.stop, device=device)[:, None] != owner[c]
        block = torch.where(others, block, 0.0)
        by_row.add(r, block, others, 1)
        by_column.add(c, block, others, 0)
        fitting[c] += ((block >= paired[c]) & others).sum(0)
    row, column = by_row.standard(), by_column.standard()
    annotated = torch.stack([_standard(paired, row, owner), _standard(paired, column, slice(None))], 1)
    i, j = (_some(size, most, seed, device) for size, most in ((n, RANDOM_IMAGES), (t, RANDOM_TEXTS)))
    block = score({k: v[i] for k, v in images.items()}, {k: v[j] for k, v in texts.items()}).double()
    random = torch.stack([((block.T - row[0][i]) / row[1][i]).T, (block - column[0][j]) / column[1][j]], 2)
    return _Standards(annotated, random[i[:, None] != owner[j]], fitting)


def _standard(values: Tensor, moments: tuple[Tensor, Tensor], at: Tensor | slice) -> Tensor:
    mean, deviation = moments
    return (values - mean[at]) / deviation[at]


def _some(size: int, most: int, seed: int, device: torch.device) -> Tensor:
    """At most `most` of `size` rows, ascending."""
    chosen = np.sort(generator(seed, "random pairs", size).choice(size, min(size, most), replace=False))
    return torch.from_numpy(chosen).to(device)


def _discriminant(annotated: Tensor, random: Tensor) -> Tensor:
    """Weights [K] of standard scores [N, K] that part annotated from random pairs best; none is negative."""
    difference = annotated.mean(0) - random.mean(0)
    within = annotated.T.cov() + random.T.cov()
    within = within + 1e-3 * within.diagonal().mean().clamp(min=1e-6) * torch.eye(len(difference)).to(within)
    chosen, weights = torch.ones_like(difference, dtype=torch.bool), torch.ones_like(difference)
    while bool(chosen.any()):
        weights = torch.zeros_like(difference)
        weights[chosen] = torch.linalg.solve(within[chosen][:, chosen], difference[chosen])
        if bool((weights >= 0).all()):
            return weights
        chosen[weights.argmin()] = False
    return torch.ones_like(difference)
