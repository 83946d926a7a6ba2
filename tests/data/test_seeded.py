"""What a seed draws, number by number: published runs are repeated, and runs of earlier versions resumed, by these."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kiloword.config.recipes import AugmentConfig, DataConfig, TextConfig, sizes
from kiloword.data.edits import MixtureSource
from kiloword.data.images import augmentation
from kiloword.data.loader import BatchReader, Loader
from kiloword.data.sampler import Order, choose_captions
from kiloword.data.text.eda import drop_words, eda
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.data.transforms.mix import Compose, Cutmix, Mixup, Stylistic, another, cycle
from kiloword.data.transforms.settings import ComposeSettings, CutmixSettings, MixupSettings, StylisticSettings
from kiloword.randomness import Draw, key, uniform
from kiloword.types import BadSample, Record
from tars import noise

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
    texts = [str(n) for n in range(6)]
    long = [str(n) for n in range(22)]
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
    return [levels(augmentation.TrainTransform(8, strong)(noise(12, 12, row), Draw(4, 1, row))) for row in range(6)]


def levels(image: torch.Tensor) -> list[float]:
    """Mean red, green and blue of the left, the right, the upper and the lower half."""
    middle = image.shape[1] // 2
    parts = image[:, :, :middle], image[:, :, middle:], image[:, :middle], image[:, middle:]
    return [round(float(level)) for part in parts for level in part.float().mean((1, 2))]


def edits() -> Any:
    synonyms = {"man": ["guy", "fellow"], "small": ["little"], "jumping": ["leaping", "hopping"]}
    said = "A young Man, is jumping over the small fence"
    return [eda(said, synonyms, 0.3, np.random.default_rng(seed)) for seed in range(9)]


def partners() -> Any:
    rng = np.random.Generator(np.random.Philox(5))
    return cycle(7, 9).tolist(), [another(row, 4, rng) for row in (0, 1, 2, 3, 0, 1, 2, 3)]


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
    return [
        levels(e.image)
        for transform in TRANSFORMS
        for e in loader(Plain(4), 4, transforms=[transform]).examples(2)[0][:2]
    ]


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
    "edits": "ece7c4b3",
    "partners": "c2f95208",
    "composed": "ad9c34eb",
    "replaced": "1d0edc8a",
}
LEVELS = {
    "colours": [
        [86, 86, 86, 114, 114, 114, 116, 116, 116, 84, 84, 84],
        [128, 128, 128, 149, 149, 149, 141, 141, 141, 136, 136, 136],
        [110, 55, 93, 122, 87, 85, 129, 57, 73, 103, 85, 105],
        [74, 74, 74, 65, 65, 65, 86, 86, 86, 54, 54, 54],
        [137, 132, 192, 193, 159, 156, 150, 176, 204, 180, 115, 143],
        [110, 107, 127, 38, 93, 149, 78, 146, 157, 70, 54, 119],
    ],
    "shown": [
        [172, 156, 129, 162, 116, 111, 198, 139, 99, 136, 134, 140],
        [145, 153, 140, 111, 166, 133, 138, 143, 177, 117, 176, 96],
        [156, 123, 113, 95, 93, 119, 141, 103, 131, 110, 113, 101],
        [108, 152, 111, 155, 118, 114, 151, 135, 119, 113, 136, 105],
        [157, 157, 134, 184, 133, 126, 187, 151, 116, 153, 139, 145],
        [151, 160, 134, 129, 157, 115, 147, 147, 140, 133, 171, 110],
        [167, 165, 123, 178, 114, 117, 199, 132, 105, 146, 147, 136],
        [160, 167, 138, 130, 152, 117, 148, 144, 138, 142, 175, 117],
        [162, 116, 111, 152, 91, 110, 195, 84, 80, 120, 123, 141],
        [99, 149, 114, 117, 147, 89, 122, 154, 114, 95, 142, 90],
    ],
}


@pytest.mark.parametrize("what", [orders, mixtures, chosen, tokens, boxes, edits, partners, composed, replaced])
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
