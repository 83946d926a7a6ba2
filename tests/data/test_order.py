"""The order of rows and captions, and what a seed draws, number by number: published runs are repeated by these."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kiloword.config.recipes import AugmentConfig, DataConfig, TextConfig, sizes
from kiloword.data.edits import MixtureSource
from kiloword.data.images import augmentation
from kiloword.data.loader import BatchReader, Loader
from kiloword.data.sampler import Order, choose_captions
from kiloword.data.text.eda import drop_words
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.transforms.mix import Compose, Cutmix, Mixup, Stylistic
from kiloword.data.transforms.settings import ComposeSettings, CutmixSettings, MixupSettings, StylisticSettings
from kiloword.randomness import Draw, key, uniform
from kiloword.types import BadSample, Record
from tars import noise


@st.composite
def any_orders(draw: st.DrawFn) -> Order:
    rows = draw(st.integers(1, 400))
    return Order(
        rows,
        draw(st.integers(1, rows)),
        seed=draw(st.integers(0, 9)),
        full=draw(st.sampled_from([0, 1000])),
        block=draw(st.integers(1, 40)),
        group=draw(st.integers(1, 5)),
    )


@given(any_orders(), st.integers(0, 5))
def test_every_row_at_most_once_an_epoch(order: Order, epoch: int) -> None:
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    batches = [order.batch_rows(step) for step in steps]
    rows = np.concatenate([rows for _, rows in batches])
    assert {e for e, _ in batches} == {epoch}
    assert len(np.unique(rows)) == len(rows) == order.steps_per_epoch * order.batch > order.rows - order.batch
    assert rows.min() >= 0
    assert rows.max() < order.rows


@given(any_orders(), st.lists(st.integers(0, 50), min_size=1, max_size=8))
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


def test_a_batch_of_more_rows_than_there_are() -> None:
    with pytest.raises(ValueError, match="3 usable rows"):
        Order(3, 4)


@given(st.integers(1, 30), st.integers(1, 31), st.integers(0, 99), st.integers(0, 3))
def test_captions_of_a_image_come_equally_often(n: int, wanted: int, row: int, seed: int) -> None:
    captions = [str(i) for i in range(n)]
    epochs = [choose_captions(captions, wanted, Draw(seed, epoch, row)) for epoch in range(n)]
    assert all(len(set(e)) == len(e) == min(n, wanted) for e in epochs)
    assert set(Counter(c for e in epochs for c in e).values()) == {min(n, wanted)}


def test_one_caption_is_redrawn_each_epoch_and_differs_between_rows() -> None:
    captions = list("abcde")
    one = {tuple(choose_captions(captions, "one", Draw(0, e, row))[0] for e in range(5)) for row in range(200)}
    assert len(one) > 50
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
    assert epochs[0] not in epochs[1:]
    assert 700 < max(epochs[0]) < 1000  # from the whole data set
    same = Order(30, 5, 0, full, 8, 2)
    places = [row for step in range(6) for row in same.batch_rows(step)[1].tolist()]
    assert places == [sorted(epochs[0]).index(row) for row in epochs[0]]


# What a seed draws


TRANSFORMS = (
    Compose(ComposeSettings(rho=0.7, image_order="follows_caption")),
    Compose(ComposeSettings(rho=0.9, partner="fixed", crop="squash")),
    Mixup(MixupSettings(rho=0.7, alpha=0.5)),
    Cutmix(CutmixSettings(rho=0.8)),
    Stylistic(StylisticSettings(rho=0.8, edits=0.3)),
)
WORDS = ["a", "young", "man", "is", "jumping", "over", "the", "small", "fence", "near", "a", "large", "dog"]


@dataclass
class Plain:
    """Images of 20 x 30 pixels with three captions each; some rows are bad."""

    rows: int
    bad: tuple[int, ...] = ()
    name: str = "plain"
    fingerprint: str = "plain"

    def __len__(self) -> int:
        return self.rows

    def key(self, row: int) -> str:
        return f"key {row}"

    def record(self, row: int) -> Record:
        if row in self.bad:
            raise BadSample("damaged")
        texts = [f"{' '.join(WORDS[: 5 + row % 7])} {row} {n}" for n in range(3)]
        return Record(self.key(row), noise(20, 30, row), texts)


def short(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=4).hexdigest()


def orders() -> Any:
    small, large = Order(1000, 5, seed=3), Order(1000, 5, seed=3, full=500, block=16, group=4)
    return [[order.batch_rows(step)[1].tolist() for step in (0, 12, 199, 200)] for order in (small, large)]


def mixtures() -> Any:
    mixture = MixtureSource([Plain(10), Plain(7, name="b", fingerprint="b")], [1.3, 0.5])
    return [[mixture.at(epoch).locate(row)[1] for row in range(len(mixture))] for epoch in (0, 1, 3, 5)]


def chosen() -> Any:
    texts, long = [str(n) for n in range(6)], [str(n) for n in range(22)]
    some = [choose_captions(texts, how, Draw(2, epoch, 5)) for how in ("one", 1, 4, "all", 9) for epoch in range(3)]
    return some, choose_captions(long, 3, Draw(2, 1, 5)), drop_words([" ".join(WORDS)] * 3, 0.4, Draw(1, 2, 3))


def tokens() -> Any:
    said = [f"{' '.join(WORDS[n : n + 6])} {n}" for n in range(8)] * 3 + ["once dodecahedron", "Ünïcode & 12 !"]
    own = Tokenizer.train(said, 310)
    text = TextConfig(context=12, vocab=310, extra_tokens=("unc",), pad_to_context=True)
    ids = own.encode(["a young man is jumping over", "Dodecahedron ÜNÏ <mask>"], text)
    return own.vocab, own.plain_vocab, own.roles.ids(), ids.ids.tolist(), ids.truncated


def boxes() -> Any:
    drawn = []
    for crop, ratio in ((0.1, 4 / 3), (0.9, 1.1), (0.99, 4.0)):
        config = AugmentConfig(crop=crop, ratio=ratio)
        drawn += [augmentation.random_box(320, 100 + 70 * row, config, Draw(1, 0, row)) for row in range(4)]
    return [[round(side * 1e4) for side in box] for box in drawn]


def colours() -> Any:
    strong = AugmentConfig(crop=0.5, flip=0.5, jitter=0.9, grayscale=0.3, blur=0.5)
    return [levels(augmentation.TrainTransform(8, strong)(noise(12, 12, row), Draw(4, 1, row))) for row in range(4)]


def levels(image: torch.Tensor) -> list[float]:
    """Mean red, green and blue of the left, the right, the upper and the lower half."""
    middle = image.shape[1] // 2
    parts = image[:, :, :middle], image[:, :, middle:], image[:, :middle], image[:, middle:]
    return [round(float(level)) for part in parts for level in part.float().mean((1, 2))]


def loader(source: Any, batch: int, **given: Any) -> Loader:
    settings = {"captions": "one", "augment": AugmentConfig(crop=0.6, flip=0.5)} | given.pop("data", {})
    tokenizer, text = Tokenizer.train([" ".join(WORDS)] * 9, 300), sizes()["debug"].text
    text = type(text)(**{**text.__dict__, "vocab": tokenizer.vocab, "special": tokenizer.roles.ids()})
    return Loader(source, Order(len(source), batch, 1), DataConfig(**settings), text, 8, tokenizer, seed=1, **given)


def composed() -> Any:
    made = [loader(Plain(9), 9, transforms=[transform]).examples(1) for transform in TRANSFORMS]
    said = [[(e.row, e.captions, seed) for e, seed in zip(*one[:2], strict=True)] for one in made]
    return [sum(e.composed for e in one[0]) for one in made], [short(one) for one in said]


def shown() -> Any:
    return [levels(loader(Plain(4), 4, transforms=[transform]).examples(2)[0][0].image) for transform in TRANSFORMS]


def replaced() -> Any:
    made = loader(Plain(40, bad=(3, 4, 5, 11, 12, 30)), 8)
    rows = [[e.row for e in made.examples(step)[0]] for step in range(5)]
    reader = BatchReader(made, made.source, np.arange(30))
    return rows, [reader.example(3, Draw(1, epoch, 3)).row for epoch in range(6)]


DRAWN = {  # digests of exact numbers and words
    "orders": "794ebf04",
    "mixtures": "12e59602",
    "chosen": "64c69536",
    "tokens": "5e5cda81",
    "boxes": "23b57ef4",
    "composed": "ad9c34eb",
    "replaced": "1d0edc8a",
}
LEVELS = {
    "colours": [
        [86, 86, 86, 114, 114, 114, 116, 116, 116, 84, 84, 84],
        [128, 128, 128, 149, 149, 149, 141, 141, 141, 136, 136, 136],
        [110, 55, 93, 122, 87, 85, 129, 57, 73, 103, 85, 105],
        [74, 74, 74, 65, 65, 65, 86, 86, 86, 54, 54, 54],
    ],
    "shown": [
        [172, 156, 129, 162, 116, 111, 198, 139, 99, 136, 134, 140],
        [156, 123, 113, 95, 93, 119, 141, 103, 131, 110, 113, 101],
        [157, 157, 134, 184, 133, 126, 187, 151, 116, 153, 139, 145],
        [167, 165, 123, 178, 114, 117, 199, 132, 105, 146, 147, 136],
        [162, 116, 111, 152, 91, 110, 195, 84, 80, 120, 123, 141],
    ],
}


@pytest.mark.parametrize("what", [orders, mixtures, chosen, tokens, boxes, composed, replaced])
def test_a_seed_draws_what_it_always_did(what: Any) -> None:
    drawn = what()
    assert short(drawn) == DRAWN[what.__name__], drawn


@pytest.mark.parametrize("what", [colours, shown])
def test_a_seed_shows_what_it_always_did(what: Any) -> None:
    """Up to what versions of the libraries differ by."""
    assert np.allclose(what(), LEVELS[what.__name__], rtol=0, atol=1.5)


def mixed(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), in whole numbers."""
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30 & 0x3FFFFFFFF)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_uniforms_are_those_of_splitmix() -> None:
    """Numbers of a row depend on its seed, the purpose and their place alone; 24 bits of each."""
    seeds = [0, 1, 12345678901234567, (1 << 63) - 1]
    drawn = uniform(torch.tensor(seeds), "mask", 5)
    for seed, row in zip(seeds, drawn.tolist(), strict=True):
        place = [mixed(n + (key("mask") & 0x7FFFFFFF)) for n in range(5)]
        assert row == [(mixed(mixed(seed ^ at)) >> 16 & 0xFFFFFF) / 2**24 for at in place]
    assert key("mask") == int.from_bytes(hashlib.blake2b(b"smask", digest_size=8).digest(), "little") & (2**63 - 1)
    assert key(3, "a") == int.from_bytes(hashlib.blake2b(b"i3\x1fsa", digest_size=8).digest(), "little") & (2**63 - 1)
    assert Draw(1, 2, 3).sample_seed == key(1, 2, 3, "sample")
    assert Draw(1, 2, 3).rng("flip").random() == np.random.Generator(np.random.Philox(key(1, 2, 3, "flip"))).random()
