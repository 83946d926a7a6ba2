"""The loader piece by piece: which rows come in place of bad ones, what a batch is packed of, what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.config.recipes import AugmentConfig, DataConfig, TextConfig
from kiloword.data.loader import ATTEMPTS, BatchReader, Loader
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.randomness import Draw
from kiloword.types import BadSample, Example, Fetch, Record
from tars import noise

TOKENIZER = Tokenizer.train(["row caption"] * 9, 280)


@dataclass
class Rows:
    """Row n has n % 3 + 1 captions; what is read is noted."""

    n: int
    bad: tuple[int, ...] = ()
    size: int = 8
    name: str = "rows"
    fingerprint: str = "f"
    epochs: Any = None

    def __post_init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def record(self, row: int) -> Record:
        self.read.append(row)
        if row in self.bad:
            raise BadSample(f"bad {row % 2}")
        return Record(
            f"k{row}", noise(self.size, self.size, row), [f"row {row} caption {c}" for c in range(row % 3 + 1)]
        )


class Changing(Rows):
    """Another source in every epoch."""

    def at(self, epoch: int) -> Changing:
        self.epochs = [*(self.epochs or []), epoch]
        return Changing(self.n)

    def stored_row(self, row: int) -> int:
        return row + 100


def make(source: Any, batch: int = 4, augment: AugmentConfig | None = None, **more: Any) -> Loader:
    data = DataConfig(captions=more.pop("captions", "all"), augment=augment or AugmentConfig())
    text = TextConfig(context=30, vocab=280)
    order = more.pop("order", Order(len(source), batch, 1))
    return Loader(source, order, data, text, 8, TOKENIZER, seed=2, **more)


def drops(example: Example, fetch: Fetch, draw: Draw) -> Example:
    return replace(example, captions=[] if example.row == 3 else example.captions)


def test_a_batch_says_what_belongs_to_whom() -> None:
    whole = make(Rows(12)).batch(1)
    rows = make(Rows(12)).order.batch_rows(1)[1].tolist()
    counts = [row % 3 + 1 for row in rows]
    assert whole.image_of_text.tolist() == [n for n, count in enumerate(counts) for _ in range(count)]
    assert whole.seeds.tolist() == [Draw(2, 0, row).sample_seed for row in rows]
    assert (whole.position.tolist(), whole.composed.tolist()) == ([0, 1, 2, 3], [False] * 4)
    assert (whole.images.dtype, whole.questions, whole.image_features, whole.skipped) == (torch.uint8, None, {}, [])
    assert 0 < whole.made_s < 600
    second = make(Rows(12), rank=1, ranks=2).batch(1)
    assert (second.position.tolist(), second.seeds.tolist()) == ([2, 3], whole.seeds.tolist()[2:])
    assert torch.equal(second.images, whole.images[2:])
    for n, row in enumerate(rows):
        assert np.array_equal(whole.images[n].permute(1, 2, 0), noise(8, 8, row))
    endless = list(islice(make(Rows(12)).batches(), 7))
    assert [len(batch) for batch in endless] == [4] * 7
    assert torch.equal(endless[1].images, whole.images)
    three = list(make(Rows(12)).batches(1, 4))
    assert [batch.seeds.tolist() for batch in three] == [batch.seeds.tolist() for batch in endless[1:4]]


def test_what_replaces_a_bad_row_lies_outside_the_batch_where_it_can() -> None:
    """Of a batch of half the rows; a larger one leaves too few."""
    rows = np.arange(6)
    for n, outside in ((12, True), (11, False)):
        reader = BatchReader(make(Rows(n, bad=(0,))), Rows(n, bad=(0,)), rows)
        found = {reader.readable(0, Draw(2, epoch, 0))[0].row for epoch in range(60)}
        assert (min(found) >= 6) == outside
        assert len(found) > 4
        assert reader.skipped
        assert {one.row for one in reader.skipped} == {0}


def test_as_many_rows_are_tried_as_the_limit_says() -> None:
    source = Rows(500, bad=tuple(range(500)))
    reader = BatchReader(make(source), source, np.arange(4))
    with pytest.raises(ValueError, match=rf"{ATTEMPTS + 1} rows .* are bad: .*bad \d: row \d"):
        reader.example(3, Draw(2, 0, 3))
    assert (len(source.read), source.read[0], reader.skipped) == (ATTEMPTS + 1, 3, [])


def test_a_draw_moves_with_its_own_row_alone() -> None:
    reader = BatchReader(make(Rows(50, bad=(3,))), Rows(50, bad=(3,)), np.arange(4))
    own, drawn = reader.readable(3, Draw(2, 0, 3))
    assert (drawn.row, drawn.seed, drawn.epoch) == (own.row, 2, 0)
    partner, other = reader.readable(3, Draw(2, 0, 9))
    assert other.row == 9
    assert partner.row != 3
    assert reader.readable(5, Draw(2, 0, 5))[1] == Draw(2, 0, 5)
    assert len(reader) == 50


def test_rows_of_an_epoch_are_made_once() -> None:
    source = Changing(8)
    loader = make(source)
    for step in (0, 1, 2, 1, 3, 2, 4, 2, 0):
        loader.batch(step)
    assert source.epochs == [0, 1, 2, 0]  # two neighbours are kept


def test_images_that_need_no_change_are_not_touched() -> None:
    for augment, touched in ((AugmentConfig(drop_words=0.5), False), (AugmentConfig(flip=1.0), True)):
        loader, image = make(Rows(4), augment=augment), noise(8, 8)
        same = loader.image(image, Draw(1, 0, 0))
        image[0, 0] = 9
        assert (same[:, 0, 0].tolist() == [9, 9, 9]) != touched, "the same memory"
    for other in (noise(8, 9), noise(9, 8)):
        assert make(Rows(4)).image(other, Draw(1, 0, 0)).shape == (3, 8, 8)
    crops = make(Rows(4), augment=AugmentConfig(crop=0.5))
    assert BatchReader(crops, Rows(4), np.arange(4)).crops
    assert not BatchReader(replace(crops, train=False), Rows(4), np.arange(4)).crops


def test_words_are_dropped_in_training_alone() -> None:
    said = [len(make(Rows(12), augment=AugmentConfig(drop_words=share), train=train).batch(0).texts.ids)
            for share, train in ((0.0, True), (0.6, True), (0.6, False))]  # fmt: skip
    assert said[1] < said[0] == said[2]


def test_transforms_change_training_examples_alone_and_say_what_to_know() -> None:
    def marks(example: Example, fetch: Fetch, draw: Draw) -> Example:
        return replace(example, composed=True)

    marks.note = "marked"  # type: ignore[attr-defined]
    assert make(Rows(4), transforms=[marks, drops]).notes == ["marked"]
    assert make(Rows(4), transforms=[marks]).batch(0).composed.tolist() == [True] * 4
    assert make(Rows(4), transforms=[marks], train=False).batch(0).composed.tolist() == [False] * 4
    with pytest.raises(ValueError, match="k3"):
        make(Rows(4), transforms=[drops]).batch(0)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"ranks": 3}, "3 ranks"),
        ({"captions": 0}, "at least 1"),
        ({"truth": True}, "ground truth"),
        ({"questions": True}, "no questions"),
        ({"order": Order(9, 4)}, "8 rows, but the order is for 9"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make(Rows(8), **settings)


class Truthful(Rows):
    """Every text is true of every image."""

    def relevance(self, captions: list[str], rows: list[int]) -> np.ndarray:
        return np.ones((len(captions), len(rows)), bool)


def test_the_truth_of_a_row_in_place_of_another_is_not_made_up() -> None:
    assert make(Truthful(8), truth=True).batch(0).text_features["truth"].shape[1] == 4
    with pytest.raises(ValueError, match="ground truth need every row"):
        list(make(Truthful(8, bad=(3,)), truth=True).batches(0, 2))
    assert len(list(make(Truthful(8, bad=(3,))).batches(0, 2))) == 2
