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
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from kiloword.apps.mine.corpus import Corpus, Floats, Ints, Truth, similarities
from kiloword.methods.fff.preset import Mined, matches
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


@dataclass(frozen=True)
class ThresholdChoice:
    """Effect of a value of p1, with the other thresholds unchanged. Shares in [0, 1]."""

    p1: float
    annotated_above: float  # share of annotated pairs with S_it > p1
    random_above: float  # share of random pairs with S_it > p1
    mined_per_image: float  # by the whole of eq. 2, expected from the random pairs
    precision: float | None = None  # of eq. 2; None: no ground truth, or nothing mined
    recall: float | None = None  # of all true pairs that are not annotated


def random_pairs(
    corpus: Corpus, seed: int, images: int = 2048, captions: int = 4096, truth: Truth | None = None
) -> RandomPairs:
    """All pairs of a random sample of images with one of captions, without annotated pairs.

    Errors: ValueError if the features give no such pair.
    """
    rows = some(corpus.known_images, images, key(seed, "random pairs", "pictures"))
    columns = some(corpus.paired, captions, key(seed, "random pairs", "captions"))
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
    rare = (min(exceeded_by(values, false_rate), NEARLY_SAME) for values in (sample.it, sample.ii, sample.tt))
    p1, p2, p3 = (max(low, value) for low, value in zip((mean, LOWEST, LOWEST), rare, strict=True))
    return replace(settings, p1=p1, p2=p2, p3=p3, p1_text=max(min(floor, p1), LOWEST))


def exceeded_by(values: Tensor, share: float) -> float:
    """A value, rounded to DIGITS digits, that at most this share of the values exceeds."""
    value = float(values.kthvalue(len(values) - int(share * len(values))).values)
    return math.ceil(round(value * 10.0**DIGITS, 3)) / 10.0**DIGITS


def candidates(annotated: Floats, sample: RandomPairs, p1: float) -> list[float]:
    """Values of p1 to compare, ascending: half deviations around the mean, values that few random pairs exceed, p1."""
    mean, deviation = float(np.mean(annotated)), float(np.std(annotated))
    around = [mean + step * deviation for step in (-1, -0.5, 0, 0.5, 1)]
    rare = [exceeded_by(sample.it, rate) for rate in (1e-2, 1e-3, 1e-4)]
    return sorted({v for v in (p1, *(round(v, DIGITS) for v in [*around, *rare])) if 0 < v < 1})


def compare(
    corpus: Corpus, annotated: Floats, sample: RandomPairs, settings: Mined, values: Sequence[float]
) -> list[ThresholdChoice]:
    """Effect of each value of p1."""
    captions = len(corpus.captions) * (1 - 1 / len(corpus.keys))  # of the other images
    choices = []
    for p1 in values:
        whole = matches(replace(settings, p1=p1), sample.it, sample.ii, sample.tt)
        above, random_above = float(np.mean(annotated > p1)), float((sample.it > p1).float().mean())
        choice = ThresholdChoice(p1, above, random_above, float(whole.float().mean()) * captions)
        if sample.true is not None:
            right, mined, true = (float(pairs.sum()) for pairs in (whole & sample.true, whole, sample.true))
            choice = replace(choice, precision=right / mined if mined else None, recall=right / true if true else None)
        choices.append(choice)
    return choices
