"""Which of an image's captions stand in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from kiloword.randomness import Draw, key

_LEHMER = 20  # 20! < 2^63: one key holds a whole permutation


def drop_words(captions: Sequence[str], share: float, draw: Draw) -> list[str]:
    """Captions without a keyed choice of their words; where none would stay, the caption as it was.

    Against learning captions by heart: each epoch sees other words of them.
    """
    rng = draw.rng("words")
    out = []
    for caption in captions:
        words = caption.split()
        kept = [word for word, luck in zip(words, rng.random(len(words)), strict=True) if luck >= share]
        out.append(" ".join(kept) or caption)
    return out


def choose(captions: Sequence[str], how: int | Literal["one", "all"], draw: Draw) -> list[str]:
    """One, N distinct (fewer where there are fewer), or all captions of the row that `draw` names.

    Captions are visited in an order keyed by (seed, row), so that over the epochs all come equally often.
    """
    n = len(captions)
    wanted = 1 if how == "one" else n if how == "all" else how
    if wanted >= n:
        return list(captions)
    order = _permutation(key(draw.seed, draw.row, "captions"), n)
    start = draw.epoch * wanted
    return [captions[order[(start + j) % n]] for j in range(wanted)]


def _permutation(number: int, n: int) -> list[int]:
    if n > _LEHMER:
        return [int(i) for i in np.random.Generator(np.random.Philox(number)).permutation(n)]
    left, order = list(range(n)), []
    for size in range(n, 0, -1):
        number, digit = divmod(number, size)
        order.append(left.pop(digit))
    return order
