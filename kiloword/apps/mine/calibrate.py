"""Thresholds of eq. 2 for a teacher that is not the paper's.

The paper's p1 starts at the mean S_it of annotated pairs; p2 and p3 accept only nearly identical samples
(arXiv:2405.10286, appendix B). Here:

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
from torch import Tensor

from kiloword.apps.mine.corpus import Corpus, Floats, Ints, Truth, similarities
from kiloword.methods.fff.preset import Mined
from kiloword.randomness import key

NEARLY_SAME = 0.999  # largest p2 and p3: identical features can round below 1
FLOOR = 0.1  # share of annotated pairs that p1' rejects
DIGITS = 4  # decimal digits of a threshold
LOWEST = 10.0**-DIGITS


@dataclass(frozen=True)
class RandomPairs:
    """Random pairs that are not annotated, [n] each."""

    it: Tensor
    ii: Tensor
    tt: Tensor
    true: Tensor | None  # bool, with ground truth


def random_pairs(corpus: Corpus, seed: int, truth: Truth | None = None) -> RandomPairs:
    """All pairs of a random sample of images with one of captions, without annotated pairs.

    Errors: ValueError if the features give no such pair.
    """
    rows = some(corpus.known_images, 2048, key(seed, "random pairs", "pictures"))
    columns = some(corpus.paired, 4096, key(seed, "random pairs", "captions"))
    owner = corpus.owner[columns]
    others = rows[:, None] != owner[None]
    if not others.any():
        raise ValueError("the feature store knows no two images with captions: there are no pairs to mine.")
    image_features, means = corpus.load(corpus.images, rows), corpus.load(corpus.means, rows)
    values = similarities(image_features, means, corpus.load(corpus.texts, columns), corpus.load(corpus.images, owner))
    it, ii, tt = (v.cpu()[others] for v in values)
    return RandomPairs(it, ii, tt, None if truth is None else truth(columns, rows).T[others])


def some(items: Ints, most: int, number: int) -> Ints:
    """At most `most` of the items, drawn without replacement, ascending."""
    if len(items) <= most:
        return items
    return np.sort(np.random.Generator(np.random.Philox(number)).choice(items, most, replace=False))


def calibrate(annotated: Floats, sample: RandomPairs, settings: Mined, false_rate: float = 1e-4) -> Mined:
    """The settings with thresholds that fit the teacher.

    Args: annotated, S_it of the annotated pairs. Errors: ValueError when the teacher does not score them above 0.
    """
    mean = round(float(np.mean(annotated)), DIGITS)
    floor = round(float(np.quantile(annotated, FLOOR)), DIGITS)
    if mean <= 0:
        raise ValueError(
            f"the teacher gives its annotated pairs a mean similarity of {mean:.4f}; expected above 0. "
            "It cannot distinguish matching captions: train it longer, or use another."
        )
    lows = ((mean, sample.it), (LOWEST, sample.ii), (LOWEST, sample.tt))
    p1, p2, p3 = (max(low, min(exceeded_by(values, false_rate), NEARLY_SAME)) for low, values in lows)
    return replace(settings, p1=p1, p2=p2, p3=p3, p1_text=max(min(floor, p1), LOWEST))


def exceeded_by(values: Tensor, share: float) -> float:
    """A value, rounded to DIGITS digits, that at most this share of the values exceeds."""
    value = float(values.kthvalue(len(values) - int(share * len(values))).values)
    return math.ceil(round(value * 10.0**DIGITS, 3)) / 10.0**DIGITS
