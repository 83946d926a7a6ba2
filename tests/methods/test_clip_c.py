"""CLIP-C: what a batch of it holds, read off the pixels and words themselves; that it trains, logs and mixes."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kiloword.config.recipes import DataConfig
from kiloword.data.loader import Loader
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.training.loop import RunOptions, train
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


@cache
def epochs(n: int, **settings: Any) -> list[tuple[list[int], Batch]]:
    """Rows and batches."""
    steps = range(n * ROWS // BATCH)
    return [(ORDER.batch_rows(step)[1].tolist(), maps(**settings).batch(step)) for step in steps]


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


def test_a_composed_example_is_what_the_paper_says() -> None:
    orders, axes = Counter[bool](), Counter[bool]()
    for rows, batch in epochs(6):
        composed = batch.composed.tolist()
        for image, caption, mixed, own in zip(batch.images, captions_of(batch), composed, rows, strict=True):
            if not mixed:
                assert named(caption) == [own]
                assert (image[0] == own).all()
                continue
            first, second, side_by_side = seen(image)
            assert first == own != second
            assert sorted(named(caption)) == sorted((first, second))
            orders[named(caption)[0] == own] += 1
            axes[side_by_side] += 1
    assert all(
        abs(n - sum(c.values()) / 2) < 3 * math.sqrt(sum(c.values())) / 2 for c in (orders, axes) for n in c.values()
    )
    assert abs(sum(orders.values()) - 0.3 * 6 * ROWS) < 3 * math.sqrt(0.3 * 0.7 * 6 * ROWS)


def test_captions_and_images_may_change_places_together() -> None:
    for _, batch in epochs(1, rho=1.0, image_order="follows_caption"):
        for image, caption in zip(batch.images, captions_of(batch), strict=True):
            assert list(seen(image)[:2]) == named(caption)


@pytest.mark.slow
def test_partners_come_from_the_whole_data_set_and_change_every_epoch() -> None:
    n, inside = 30, 0
    pairs: dict[int, list[int]] = {row: [] for row in range(ROWS)}
    for rows, batch in epochs(n, rho=1.0):
        for own, image in zip(rows, batch.images, strict=True):
            pairs[own].append(int(image[0, -1, -1]))
            inside += pairs[own][-1] in rows
    met = Counter(other for others in pairs.values() for other in others)
    assert len(met) == ROWS
    assert sum((count - n) ** 2 / n for count in met.values()) < 267  # 0.1% point of 199 degrees of freedom
    share, expected = inside / (n * ROWS), (BATCH - 1) / (ROWS - 1)
    assert abs(share - expected) < 3 * math.sqrt(expected / (n * ROWS)), "as often in the batch as chance has it"
    assert all(len(set(others)) > n / 2 for others in pairs.values())


def test_a_subset_of_rows_has_partners_from_the_whole_data_set() -> None:
    order = Order(40, BATCH, 1, of=ROWS)
    part, visited, partners = maps(order, rho=1.0), set[int](), set[int]()
    for step in range(20 * order.steps_per_epoch):
        images = part.batch(step).images
        visited |= set(images[:, 0, 0, 0].tolist())
        partners |= set(images[:, 0, -1, -1].tolist())
    assert len(visited) == 40
    assert len(partners) > ROWS // 2  # of which 40 are visited


def test_examples_keep_their_number_of_captions() -> None:
    batch, rows = maps(captions="all", rho=1.0).batch(0), ORDER.batch_rows(0)[1].tolist()
    of = batch.image_of_text.tolist()
    assert of == [i for i, row in enumerate(rows) for _ in range(row % 3 + 1)]
    for text, c, i in zip(captions_of(batch), (c for row in rows for c in range(row % 3 + 1)), of, strict=True):
        other = int(batch.images[i, 0, -1, -1])
        output = {f"image {rows[i]} caption {c}", f"image {other} caption {c % (other % 3 + 1)}"}
        assert set(text.split(" and ")) == output


def rows_of(folder: Path, method: str, **settings: Any) -> list[dict[str, Any]]:
    """The log of a short run."""
    base = default_recipe(method, "debug", ("scenes?n=64",))
    recipe = replace(base, batch=16, steps=8, precision="fp64", settings=settings)
    train(recipe, folder, options=RunOptions(log_every=1, quiet=True))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_logs_plain_and_composed_examples_apart(tmp_path: Path) -> None:
    composed = [{"pair_composed", "score_composed"} <= row.keys() for row in rows_of(tmp_path / "c", "clip-c", rho=0.2)]
    assert any(composed)
    none, clip = rows_of(tmp_path / "none", "clip-c", rho=0.0), rows_of(tmp_path / "clip", "clip")
    assert [r["pair"] for r in none] == [r["pair"] for r in clip], "rho 0 is CLIP"
    assert all("pair_plain" in r and "pair_composed" not in r for r in none)
    assert not any("pair_plain" in r for r in clip)


@pytest.mark.parametrize("name", ["siglip+compose", "pcme+++compose", "pcme+++deterministic+compose", "fff+compose"])
def test_both_kinds_together_are_the_pair_loss(name: str) -> None:
    """Whatever the loss is divided by: images, pairs, or texts; and whether or not it says something of images."""
    some = fixed_batch(method=name)
    composed = float(some.composed.double().mean())
    assert 0 < composed < 1
    found = {k: float(v) for k, v in backward(learner(name), [some]).items()}
    both = composed * found["pair_composed"] + (1 - composed) * found["pair_plain"]
    assert both == pytest.approx(found["pair"], rel=1e-5)
