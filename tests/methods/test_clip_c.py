"""CLIP-C: what a batch of it holds, read off the pixels and words themselves, and what a step reports."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kiloword.config.recipes import DataConfig
from kiloword.data.loader import Loader
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.registry import preset
from kiloword.training.step import backward
from kiloword.types import Batch, Record
from kiloword.verify.batch import batch as fixed_batch
from parts import ids_of, learner, loader, size

ROWS, BATCH, SIZE = 200, 20, 34
TOKENIZER = Tokenizer.train([f"image {row} caption {c} and more" for row in range(ROWS) for c in range(3)], 500)
SHAPE = size(image__size=SIZE, text__context=40, text__vocab=600)


@dataclass
class Maps:
    """Row r is an image whose pixel (x, y) is (r, x, y), with r % 3 + 1 captions that name it."""

    name: str = "maps"
    fingerprint: str = "f"
    natural: bool = False

    def __len__(self) -> int:
        return ROWS

    def record(self, row: int) -> Record:
        y, x = np.mgrid[:SIZE, :SIZE]
        pixels = np.stack([np.full_like(x, row), x, y], 2).astype(np.uint8)
        return Record(f"k{row}", pixels, [f"image {row} caption {c}" for c in range(row % 3 + 1)])


ORDER = Order(ROWS, BATCH, 1)


def maps(order: Order = ORDER, captions: Any = "one", **settings: Any) -> Loader:
    given: dict[str, Any] = {"order": order, "tokenizer": TOKENIZER, "data": DataConfig(captions=captions), "seed": 4}
    return loader(Maps(), shape=SHAPE, transforms=preset("clip-c", settings).transforms, **given)


def epochs(n: int, **settings: Any) -> list[tuple[list[int], Batch]]:
    """Rows and batches."""
    steps, made = range(n * ROWS // BATCH), maps(**settings)
    return [(ORDER.batch_rows(step)[1].tolist(), made.batch(step)) for step in steps]


def captions_of(batch: Batch) -> list[str]:
    return [TOKENIZER.decode(ids) for ids in ids_of(batch.texts)]


def named(caption: str) -> list[int]:
    """The rows that a caption speaks of, in its order."""
    return [int(part.split()[1]) for part in caption.split(" and ")]


def seen(image: Tensor) -> tuple[int, int, bool]:
    """The row left or above, the other, and whether they stand side by side; every pixel is where the paper wants it.

    Literally: of resolution H x W, either H x W/2 or H/2 x W centre crops of both, concatenated.
    """
    row, x, y = image.to(torch.int64)
    grid_y, grid_x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    quarter, half = SIZE // 4, SIZE // 2
    first, second = int(row[0, 0]), int(row[-1, -1])
    side_by_side = bool(y[0, 0] == 0)
    along, across, position = (x, y, grid_x) if side_by_side else (y, x, grid_y)
    assert torch.equal(across, grid_y if side_by_side else grid_x)
    assert torch.equal(along, quarter + position % half)
    assert torch.equal(row, torch.where(position < half, first, second))
    return first, second, side_by_side


def near(count: int, draws: int, share: float) -> bool:
    """Within three standard deviations of as many draws."""
    return abs(count - share * draws) < 3 * math.sqrt(share * (1 - share) * draws)


def test_a_composed_example_is_what_the_paper_says() -> None:
    own_first, side_by_side, composed = 0, 0, 0
    for rows, batch in epochs(6):
        for image, caption, mixed, own in zip(batch.images, captions_of(batch), batch.composed, rows, strict=True):
            if not mixed:
                assert named(caption) == [own]
                assert (image[0] == own).all()
                continue
            first, second, beside = seen(image)
            assert first == own != second
            assert sorted(named(caption)) == sorted((first, second))
            own_first, side_by_side, composed = (
                own_first + (named(caption)[0] == own),
                side_by_side + beside,
                composed + 1,
            )
    assert near(own_first, composed, 0.5)
    assert near(side_by_side, composed, 0.5)
    assert near(composed, 6 * ROWS, 0.3)


def test_captions_and_images_may_change_places_together() -> None:
    for _, batch in epochs(1, rho=1.0, image_order="follows_caption"):
        for image, caption in zip(batch.images, captions_of(batch), strict=True):
            assert list(seen(image)[:2]) == named(caption)


def test_partners_come_from_the_whole_data_set_and_change_every_epoch() -> None:
    """Of a subset of rows too; as often from the own batch as chance has it."""
    order, epochs_seen = Order(40, BATCH, 1, of=ROWS), 30
    part, partners, inside = maps(order, rho=1.0), dict[int, list[int]](), 0
    for step in range(epochs_seen * order.steps_per_epoch):
        images = part.batch(step).images
        own, others = images[:, 0, 0, 0].tolist(), images[:, 0, -1, -1].tolist()
        for row, other in zip(own, others, strict=True):
            partners.setdefault(row, []).append(other)
        inside += sum(other in own for other in others)
    met, draws = Counter(other for others in partners.values() for other in others), 40 * epochs_seen
    assert len(partners) == 40
    assert sum((met[row] - draws / ROWS) ** 2 / (draws / ROWS) for row in range(ROWS)) < 267  # 0.1% point of 199
    assert near(inside, draws, (BATCH - 1) / (ROWS - 1))
    assert all(len(set(others)) > epochs_seen / 2 for others in partners.values())


def test_examples_keep_their_number_of_captions() -> None:
    batch, rows = maps(captions="all", rho=1.0).batch(0), ORDER.batch_rows(0)[1].tolist()
    of = batch.image_of_text.tolist()
    assert of == [i for i, row in enumerate(rows) for _ in range(row % 3 + 1)]
    for text, c, i in zip(captions_of(batch), (c for row in rows for c in range(row % 3 + 1)), of, strict=True):
        other = int(batch.images[i, 0, -1, -1])
        output = {f"image {rows[i]} caption {c}", f"image {other} caption {c % (other % 3 + 1)}"}
        assert set(text.split(" and ")) == output


@pytest.mark.parametrize("name", ["siglip+compose", "pcme+++compose", "pcme+++deterministic+compose", "fff+compose"])
def test_both_kinds_together_are_the_pair_loss(name: str) -> None:
    """Whatever the loss is divided by: images, pairs, or texts; and whether or not it says something of images."""
    some = fixed_batch(method=name)
    composed = float(some.composed.double().mean())
    assert 0 < composed < 1
    found = {k: float(v) for k, v in backward(learner(name), [some]).items()}
    both = composed * found["pair_composed"] + (1 - composed) * found["pair_plain"]
    assert both == pytest.approx(found["pair"], rel=1e-5)
    assert {"score_composed", "score_plain"} <= found.keys()


def test_without_composed_examples_it_is_clip() -> None:
    plain, none = maps(rho=0.0).batch(0), fixed_batch(method="clip")
    assert not plain.composed.any()
    assert [named(caption) for caption in captions_of(plain)] == [[row] for row in ORDER.batch_rows(0)[1].tolist()]
    of_clip, found = (backward(learner(name), [none]) for name in ("clip", "clip-c"))
    assert found["pair"] == of_clip["pair"]
    assert "pair_plain" not in of_clip
    assert float(found["pair_plain"]) == pytest.approx(float(found["pair"]), rel=1e-5)
