"""Which captions of a picture come when."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kiloword.data.captions import choose
from kiloword.draw import Draw


@given(st.integers(1, 30), st.integers(1, 31), st.integers(0, 99), st.integers(0, 3))
def test_captions_of_a_picture_come_equally_often(n: int, wanted: int, row: int, seed: int) -> None:
    captions = [str(i) for i in range(n)]
    epochs = [choose(captions, wanted, Draw(seed, epoch, row)) for epoch in range(n)]
    assert all(len(set(e)) == len(e) == min(n, wanted) for e in epochs)
    assert set(Counter(c for e in epochs for c in e).values()) == {min(n, wanted)}


def test_one_caption_is_redrawn_each_epoch_and_differs_between_rows() -> None:
    captions = list("abcde")
    one = {tuple(choose(captions, "one", Draw(0, e, row))[0] for e in range(5)) for row in range(200)}
    assert all(sorted(o) == captions for o in one)
    assert len(one) > 50
    assert choose(captions, "all", Draw(0, 3, 4)) == captions
    assert choose([], "one", Draw(0, 0, 0)) == []
