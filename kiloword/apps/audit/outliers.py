"""Which pairs do not match: a threshold on their fit with an estimate of its own precision.

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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTILES = np.linspace(0.5, 0.9, 17)  # of random pairs, where the share is estimated
FEWEST = 5  # flagged pairs, of which a precision is said

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OutlierRule:
    """Pairs whose fit is below the threshold do not match. Shares in [0, 1], estimated."""

    threshold: float | None  # None: no pair is flagged
    flagged: int
    share: float  # of pairs that do not match
    precision: float | None  # of the flagged pairs; None: none is
    recall: float

    def __str__(self) -> str:
        share = f"by estimate {self.share:.1%} of the pairs do not match"
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
    share = mismatched(ordered, chance)
    below = np.arange(1, len(ordered) + 1) / len(ordered)
    expected = share * np.searchsorted(chance, ordered, "right") / len(chance)
    good = np.flatnonzero(expected / below >= precision)
    if not len(good) or good[-1] + 1 < FEWEST:
        return OutlierRule(None, 0, share, None, 0.0)
    threshold = float(np.nextafter(ordered[good[-1]], np.inf))
    recall, flagged = float(np.mean(chance < threshold)), int(np.sum(annotated < threshold))
    return OutlierRule(threshold, flagged, share, min(1.0, share * recall * len(annotated) / flagged), recall)


def mismatched(ordered: Floats, chance: Floats) -> float:
    """The estimated share of annotated pairs that do not match. Args: fits, both ascending."""
    at, n = np.quantile(chance, QUANTILES), len(ordered)
    below = np.searchsorted(ordered, at, "right") / n
    mirrored = 1 - np.searchsorted(ordered, 2 * np.median(ordered) - at, "left") / n
    return float(np.clip(np.min((below - mirrored) / QUANTILES), 0, 1))
