"""The order of rows and captions: once an epoch, resumable from any step, divided without rest."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiloword.data.sampler import Order, choose_captions, share
from kiloword.randomness import Draw


@st.composite
def orders(draw: st.DrawFn) -> Order:
    rows = draw(st.integers(1, 400))
    return Order(
        rows,
        draw(st.integers(1, rows)),
        seed=draw(st.integers(0, 9)),
        full=draw(st.sampled_from([0, 1000])),
        block=draw(st.integers(1, 40)),
        group=draw(st.integers(1, 5)),
    )


@given(orders(), st.integers(0, 5))
@settings(deadline=None)
def test_every_row_at_most_once_an_epoch(order: Order, epoch: int) -> None:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    batches = [order.batch_rows(step) for step in steps]
    rows = np.concatenate([rows for _, rows in batches])
    assert {e for e, _ in batches} == {epoch}
    assert len(np.unique(rows)) == len(rows) == order.steps_per_epoch * order.batch > order.rows - order.batch
    assert rows.min() >= 0
    assert rows.max() < order.rows


@given(orders(), st.lists(st.integers(0, 50), min_size=1, max_size=8))
@settings(deadline=None)
def test_a_step_does_not_depend_on_what_was_asked_before(order: Order, steps: list[int]) -> None:
    forward = {step: order.batch_rows(step)[1].tolist() for step in steps}
    again = Order(order.rows, order.batch, order.seed, order.full, order.block, order.group)
    assert {step: again.batch_rows(step)[1].tolist() for step in reversed(steps)} == forward


def test_large_data_is_read_in_few_blocks_yet_well_mixed() -> None:
    order = Order(1_000_000, 4096, full=0)
    rows = order.batch_rows(7)[1]
    assert len(np.unique(rows // order.block)) <= 2 * order.group
    assert np.median(np.abs(np.diff(rows))) > order.block
    assert len(np.unique(Order(200_000_000, 1024).batch_rows(123_456)[1])) == 1024, "without a permutation of all"


def test_batches_that_cannot_be() -> None:
    for call, word in (
        (lambda: Order(3, 4), "3 usable rows"),
        (lambda: Order(3, 0), "batch is 0"),
        (lambda: share(np.arange(10), 0, 4), "multiple of 4"),
    ):
        with pytest.raises(ValueError, match=word):
            call()


@given(st.integers(1, 30), st.integers(1, 31), st.integers(0, 99), st.integers(0, 3))
def test_captions_of_a_image_come_equally_often(n: int, wanted: int, row: int, seed: int) -> None:
    captions = [str(i) for i in range(n)]
    epochs = [choose_captions(captions, wanted, Draw(seed, epoch, row)) for epoch in range(n)]
    assert all(len(set(e)) == len(e) == min(n, wanted) for e in epochs)
    assert set(Counter(c for e in epochs for c in e).values()) == {min(n, wanted)}


def test_one_caption_is_redrawn_each_epoch_and_differs_between_rows() -> None:
    captions = list("abcde")
    one = {tuple(choose_captions(captions, "one", Draw(0, e, row))[0] for e in range(5)) for row in range(200)}
    assert all(sorted(o) == captions for o in one)
    assert len(one) > 50
    assert choose_captions(captions, "all", Draw(0, 3, 4)) == captions
    assert choose_captions([], "one", Draw(0, 0, 0)) == []
    for epoch, (how, first) in enumerate(((2, ["a", "b"]), ("one", ["a"]), (9, captions), ("all", captions))):
        assert choose_captions(captions, how, Draw(0, epoch, 5), first=True) == first  # type: ignore[arg-type]


@pytest.mark.parametrize("full", [0, 1000])
def test_a_fixed_subset_of_rows(full: int) -> None:
    """Each epoch visits all rows of the subset, in another order; other seeds visit the same rows."""
    orders = [Order(30, 5, seed, full, 8, 2, of=1000) for seed in (0, 0, 1)]
    epochs = [
        [row for step in range(first, first + 6) for row in order.batch_rows(step)[1].tolist()]
        for order, first in zip(orders, (0, 6, 0), strict=True)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len(set(epochs[0])) == 30
    assert epochs[0] != epochs[1]
    assert epochs[0] != epochs[2]
    assert max(epochs[0]) > 700  # from the whole data set
    assert max(epochs[0]) < 1000
    same = Order(30, 5, 0, full, 8, 2)
    assert [row for step in range(6) for row in same.batch_rows(step)[1].tolist()] == [
        sorted(epochs[0]).index(row) for row in epochs[0]
    ]
