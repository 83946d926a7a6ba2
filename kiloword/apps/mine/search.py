"""Thresholds of eq. 2 (arXiv:2405.10286) that fit a teacher, and the pairs of a data set that it accepts.

The paper's p1 starts at the mean S_it of annotated pairs; p2 and p3 accept only nearly identical samples (appendix B).
For a teacher that is not the paper's, `calibrate` takes:

p1   the mean S_it of the annotated pairs, but at least the value that only `false_rate` of random pairs exceed: a weak
     teacher scores many false pairs above that mean;
p2   the S_ii that only `false_rate` of random pairs exceed; at most NEARLY_SAME, as exact copies must match;
p3   the same for S_tt;
p1'  the S_it that nine of ten annotated pairs exceed, at most p1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kiloword.apps.mine.corpus import Corpus, Floats, Ints, Truth
from kiloword.distributed.sharing import in_turns
from kiloword.methods.fff import Mined, matches
from kiloword.model.encoding import chunks
from kiloword.randomness import some
from kiloword.terminal.progress import track

TERMS = ("it", "ii", "tt")  # of eq. 2, by the similarity that each one asks for
NEARLY_SAME = 0.999  # largest p2 and p3: identical features can round below 1
FLOOR = 0.1  # share of annotated pairs that p1' rejects
DIGITS = 4  # decimal digits of a threshold
LOWEST = 10.0**-DIGITS


def random_pairs(corpus: Corpus, seed: int, truth: Truth | None = None) -> tuple[Tensor, Tensor | None]:
    """S_it, S_ii and S_tt [3, n] of all pairs of some images with some captions, without annotated pairs.

    Also which of them are true [n], with ground truth.
    """
    rows = some(len(corpus.keys), 2048, seed, "random pairs", "pictures")
    columns = some(len(corpus.captions), 4096, seed, "random pairs", "captions")
    others = torch.from_numpy(rows[:, None] != corpus.owner[columns])
    true = None if truth is None else truth(columns, rows).T[others]
    return corpus.similarities(rows, columns).cpu()[:, others], true


def calibrate(annotated: Floats, sample: Tensor, settings: Mined, false_rate: float = 1e-4) -> Mined:
    """The settings with thresholds that fit the teacher.

    Args: annotated: S_it of the annotated pairs; sample: similarities of `random_pairs`.
    Errors: ValueError when the teacher does not score annotated pairs above 0.
    """
    mean = round(float(np.mean(annotated)), DIGITS)
    floor = round(float(np.quantile(annotated, FLOOR)), DIGITS)
    if mean <= 0:
        raise ValueError(
            f"the teacher gives its annotated pairs a mean similarity of {mean:.4f}; expected above 0. "
            "It cannot distinguish matching captions: train it longer, or use another."
        )
    lows = zip((mean, LOWEST, LOWEST), sample, strict=True)
    p1, p2, p3 = (max(low, min(exceeded_by(values, false_rate), NEARLY_SAME)) for low, values in lows)
    return replace(settings, p1=p1, p2=p2, p3=p3, p1_text=max(min(floor, p1), LOWEST))


def exceeded_by(values: Tensor, share: float) -> float:
    """A value, rounded to DIGITS digits, that at most this share of the values exceeds."""
    value = float(values.kthvalue(len(values) - int(share * len(values))).values)
    return math.ceil(round(value * 10.0**DIGITS, 3)) / 10.0**DIGITS


@dataclass
class MinedPairs:
    """P pairs of N images: matches that are not annotated, image by image, the best by S_it first."""

    image: Ints  # [P]
    caption: Ints  # [P]
    scores: Tensor  # [3, P] float32: S_it, S_ii, S_tt
    true: NDArray[np.bool_]  # [P]; False without ground truth
    per_image: Tensor  # [N] int64 mined pairs, also those beyond the best
    counts: Tensor  # [2, 5] by eq. 2, by each term, all that are not annotated: pairs, and true ones of these


def search(
    corpus: Corpus, settings: Mined, *, most: int = 20, chunk: int = 2048, truth: Truth | None = None
) -> MinedPairs:
    """The pairs of a data set that eq. 2 accepts; ranks that share the work search blocks of images in turns.

    Args: most: number of mined pairs per image to return, best S_it first, equal ones as the captions stand (all are
    counted); chunk: images and captions per block; truth: ground truth, if known.
    """

    def mined_of(r: slice) -> tuple[Floats, Tensor, Tensor]:
        """Of some images the pairs [6, P] (image, caption, true, S_it, S_ii, S_tt), `per_image` and `counts`."""
        images = np.arange(r.start, r.stop)
        best, counts = np.zeros((6, 0)), torch.zeros(2, 5, dtype=torch.int64)
        per_image = torch.zeros(len(images), dtype=torch.int64)
        for c in chunks(len(corpus.captions), chunk):
            values, captions = corpus.similarities(r, c), np.arange(c.start, c.stop)
            accepted, others = matches(settings, *values), torch.from_numpy(corpus.owner[c] != images[:, None])
            true = torch.zeros_like(others) if truth is None else truth(captions, images).T
            others, true = others.to(values.device), true.to(values.device)  # [i, t]
            mined = torch.stack([accepted.any(0), *accepted, torch.ones_like(others)]) & others  # [5, i, t]
            counts += torch.stack([mined.sum((1, 2)), (mined & true).sum((1, 2))]).cpu()
            per_image += mined[0].sum(1).cpu()
            i, t = mined[0].nonzero(as_tuple=True)
            found = torch.cat([torch.stack([i + r.start, t + c.start, true[i, t]]), values[:, i, t].double()])
            best = np.concatenate([best, found.cpu().numpy()], 1)
            best = best[:, np.lexsort((best[1], -best[3], best[0]))]
            best = best[:, np.arange(best.shape[1]) - np.searchsorted(best[0], best[0]) < most]
        return best, per_image, counts

    results = in_turns(list(chunks(len(corpus.keys), chunk)), mined_of)
    shown = track(results, "images", "images", len(corpus.keys), lambda result: len(result[1]))
    parts, per_image, counts = zip(*shown, strict=True)
    pairs = np.concatenate(parts, 1)
    image, caption = pairs[:2].astype(np.int64)
    scores = torch.from_numpy(pairs[3:].astype(np.float32))
    return MinedPairs(image, caption, scores, pairs[2] > 0, torch.cat(per_image), sum(counts))
