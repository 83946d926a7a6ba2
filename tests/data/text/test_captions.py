"""Which captions of an image come when."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kiloword.data.text.captions import choose, drop_words
from kiloword.randomness import Draw


@given(st.integers(1, 30), st.integers(1, 31), st.integers(0, 99), st.integers(0, 3))
def test_captions_of_a_image_come_equally_often(n: int, wanted: int, row: int, seed: int) -> None:
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


def test_dropped_words_are_keyed_and_never_all() -> None:
    captions = ["a dog runs over the wide green grass", "dog"]
    first = drop_words(captions, 0.5, Draw(0, 0, 0))
    assert first == drop_words(captions, 0.5, Draw(0, 0, 0))
    assert first != drop_words(captions, 0.5, Draw(0, 1, 0))
    assert drop_words(captions, 1.0, Draw(0, 0, 0)) == captions
    kept = [len(drop_words(captions, 0.25, Draw(0, epoch, 0))[0].split()) for epoch in range(400)]
    assert 5.7 < sum(kept) / 400 < 6.3  # three quarters of eight
