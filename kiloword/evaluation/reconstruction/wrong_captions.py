"""For every image a caption that is wrong of it, drawn from the other images' captions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kiloword.randomness import key
from kiloword.types import Source

TRIES = 1000  # other images that are asked for a caption before an image is given up


def wrong_captions(source: Source, rows: Sequence[int], captions: Sequence[Sequence[str]]) -> dict[int, str]:
    """By row, the first caption of another image that is none of its own and, where the source knows, false.

    The images are put in a circle by a draw keyed by the data; each takes the caption of the next one whose caption
    is wrong of it. So nearly every caption is used once. Rows for which there is none are left out.

    Args: rows [n] of the source; captions: of each row its own, at least one.
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
