"""Draw a wrong caption for every image from the captions of other images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kiloword.randomness import key
from kiloword.types import Source

TRIES = 1000  # other images tried per image


def wrong_captions(source: Source, rows: Sequence[int], captions: Sequence[Sequence[str]]) -> dict[int, str]:
    """By row, the first caption of another image that is not among its captions and, with ground truth, false.

    The images are permuted, keyed by the data; each gets the caption of the next image in the circle whose caption is
    wrong for it, so that nearly every caption is used once. Rows without a wrong caption are omitted.

    Args: rows [n] of the source; captions: of each row, at least one.
    """
    n, truth = len(rows), getattr(source, "relevance", None)
    circle = np.random.Generator(np.random.Philox(key(source.fingerprint, "wrong captions"))).permutation(n).tolist()
    wrong: dict[int, str] = {}
    for place, i in enumerate(circle):
        for step in range(1, min(n, TRIES + 1)):
            other = captions[circle[(place + step) % n]][0]
            if other not in captions[i] and not (truth is not None and truth([other], [rows[i]])[0, 0]):
                wrong[rows[i]] = other
                break
    return wrong
