"""CLIP-C: what a batch of it holds, read off the pixels and words themselves; that it trains, logs and mixes."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kiloword.cli.main import main
from kiloword.config.recipes import DataConfig, TextConfig, sizes
from kiloword.data.loader import Loader
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.methods.registry import preset
from kiloword.models.build import build
from kiloword.training.accumulate import backward
from kiloword.training.learner import Learner
from kiloword.training.loop import RunOptions, train
from kiloword.types import Batch, PairBlocks, Positives, Record, Total
from kiloword.verify.batch import batch as fixed_batch
from kiloword.verify.loading import made_otherwise

ROWS, BATCH, SIZE = 200, 20, 34
WORDS = TextConfig(context=40, vocab=600)
TOKENIZER = Tokenizer.train([f"image {row} caption {c} and more" for row in range(ROWS) for c in range(3)], 500)


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


def loader(method: str, settings: dict[str, Any], **changes: Any) -> Loader:
    data = DataConfig(captions=changes.pop("captions", "one"))
    transforms = preset(method, settings).transforms
    return Loader(Maps(), Order(ROWS, BATCH, 1), data, WORDS, SIZE, TOKENIZER, transforms=transforms, seed=4, **changes)


@cache
def epochs(n: int, method: str = "clip-c", **settings: Any) -> list[Batch]:
    return list(loader(method, settings).batches(0, n * ROWS // BATCH))


def captions_of(batch: Batch) -> list[str]:
    return [TOKENIZER.decode(batch.texts.ids[a:b].tolist()) for a, b in pairwise(batch.texts.starts.tolist())]


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
    for batch, order in zip(epochs(6), (Order(ROWS, BATCH, 1).batch_rows(step)[1] for step in range(60)), strict=True):
        for image, caption, composed, own in zip(
            batch.images, captions_of(batch), batch.composed.tolist(), order.tolist(), strict=True
        ):
            if not composed:
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
    for batch in epochs(1, rho=1.0, image_order="follows_caption"):
        for image, caption in zip(batch.images, captions_of(batch), strict=True):
            assert list(seen(image)[:2]) == named(caption)


@pytest.mark.slow
def test_partners_come_from_the_whole_data_set_and_change_every_epoch() -> None:
    n = 30
    pairs: dict[int, list[int]] = {}
    inside, per_epoch = 0, ROWS // BATCH
    for step, batch in enumerate(epochs(n, rho=1.0)):
        rows = Order(ROWS, BATCH, 1).batch_rows(step)[1].tolist()
        for own, image in zip(rows, batch.images, strict=True):
            other = int(image[0, -1, -1])
            pairs.setdefault(own, []).append(other)
            inside += other in rows
    assert step + 1 == n * per_epoch
    met = Counter(other for others in pairs.values() for other in others)
    assert len(met) == ROWS
    assert sum((count - n) ** 2 / n for count in met.values()) < 267  # 0.1% point of 199 degrees of freedom
    share, expected = inside / (n * ROWS), (BATCH - 1) / (ROWS - 1)
    assert abs(share - expected) < 3 * math.sqrt(expected / (n * ROWS)), "as often in the batch as chance has it"
    assert all(len(set(others)) > n / 2 for others in pairs.values())
    fixed: dict[int, set[int]] = {}
    for step, batch in enumerate(epochs(3, rho=1.0, partner="fixed")):
        for own, image in zip(Order(ROWS, BATCH, 1).batch_rows(step)[1].tolist(), batch.images, strict=True):
            fixed.setdefault(own, set()).add(int(image[0, -1, -1]))
    assert all(len(others) == 1 for others in fixed.values())


def test_a_subset_of_rows_has_partners_from_the_whole_data_set() -> None:
    transforms = preset("clip-c", {"rho": 1.0}).transforms
    order = Order(40, BATCH, 1, of=ROWS)
    part = Loader(Maps(), order, DataConfig(), WORDS, SIZE, TOKENIZER, transforms=transforms, seed=4)
    visited: set[int] = set()
    partners: set[int] = set()
    for step in range(20 * order.steps_per_epoch):
        images = part.batch(step).images
        visited |= set(images[:, 0, 0, 0].tolist())
        partners |= set(images[:, 0, -1, -1].tolist())
    assert len(visited) == 40
    assert len(partners) > ROWS // 2  # of which 40 are visited


def test_examples_keep_their_number_of_captions() -> None:
    batch = loader("clip-c", {"rho": 1.0}, captions="all").batch(0)
    texts, rows = captions_of(batch), Order(ROWS, BATCH, 1).batch_rows(0)[1].tolist()
    assert batch.image_of_text.tolist() == [i for i, row in enumerate(rows) for _ in range(row % 3 + 1)]
    for i, own in enumerate(rows):
        other = int(batch.images[i, 0, -1, -1])
        mine = [text for text, of in zip(texts, batch.image_of_text.tolist(), strict=True) if of == i]
        for c, text in enumerate(mine):
            output = {f"image {own} caption {c}", f"image {other} caption {c % (other % 3 + 1)}"}
            assert set(text.split(" and ")) == output


@pytest.mark.parametrize("method", ["clip-c", "siglip+mixup", "siglip+cutmix", "siglip+stylistic"])
def test_ranks_and_workers_change_nothing(method: str) -> None:
    assert made_otherwise(method) == 0


def recipe(method: str, **settings: Any) -> Any:
    base = default_recipe(method, "debug", ("scenes?n=64",))
    return replace(base, batch=16, steps=8, precision="fp64", settings=settings)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_logs_plain_and_composed_examples_apart(tmp_path: Path) -> None:
    apart = {f"{what}_{kind}" for what in ("pair", "score") for kind in ("plain", "composed")}
    train(recipe("clip-c", rho=0.2), tmp_path / "c", options=RunOptions(log_every=1, quiet=True))
    rows = rows_of(tmp_path / "c")
    assert len(rows) == 8
    assert all(math.isfinite(v) for row in rows for v in row.values())
    assert all({"pair_plain", "score_plain"} <= row.keys() for row in rows)
    composed = [{"pair_composed", "score_composed"} <= row.keys() for row in rows]
    assert any(composed)
    for row in (r for r, has in zip(rows, composed, strict=True) if has):
        low, high = sorted((row["pair_plain"], row["pair_composed"]))
        assert low <= row["pair"] <= high
    train(recipe("clip-c", rho=0.0), tmp_path / "none", options=RunOptions(log_every=1, quiet=True))
    train(recipe("clip"), tmp_path / "clip", options=RunOptions(log_every=1, quiet=True))
    none, clip = rows_of(tmp_path / "none"), rows_of(tmp_path / "clip")
    assert [r["pair"] for r in none] == [r["pair"] for r in clip], "rho 0 is CLIP"
    assert all("pair_composed" not in r for r in none)
    assert not any(apart & r.keys() for r in clip)


def test_a_pair_loss_that_says_nothing_of_images_is_refused_too() -> None:
    method = preset("siglip+compose")

    def own(pairs: PairBlocks, positives: Positives) -> Total:
        return replace(method.pair_loss(pairs, positives), rows=None)

    found = [
        backward(Learner(build(sizes()["debug"], m, 0), m), [fixed_batch(method=method.name)])
        for m in (method, replace(method, pair_loss=own))
    ]
    assert found[0] == found[1]
    assert {"pair_plain", "pair_composed"} <= found[1].keys()


@pytest.mark.parametrize("name", ["siglip+compose", "pcme+++compose", "pcme+++deterministic+compose", "fff+compose"])
def test_both_kinds_together_are_the_pair_loss(name: str) -> None:
    """Whatever the loss is divided by: images, pairs, or texts."""
    method, some = preset(name), fixed_batch(method=name)
    found = {k: float(v) for k, v in backward(Learner(build(sizes()["debug"], method, 0), method), [some]).items()}
    composed = float(some.composed.double().mean())
    assert 0 < composed < 1
    both = composed * found["pair_composed"] + (1 - composed) * found["pair_plain"]
    assert both == pytest.approx(found["pair"], rel=1e-5)


@pytest.mark.slow
def test_a_fixed_scale_does_not_learn(tmp_path: Path) -> None:
    for method, settings in (("clip-c", {"rho": 0.5}), ("clip+mixup", {})):
        train(
            recipe(method, fixed_scale=True, scale=20.0, **settings), tmp_path / method, options=RunOptions(quiet=True)
        )
        assert rows_of(tmp_path / method)[-1]["scale"] == pytest.approx(20.0)
    for name, component in (("clip", ""), ("siglip+softmax", "softmax"), ("siglip+supcon", "supcon")):
        given = [{"fixed_scale": f, "scale": 5.0} for f in (False, True)]
        made = [
            build(sizes()["debug"], preset(name, {component: g} if component else g), 0).head.log_scale for g in given
        ]
        assert [scale.requires_grad for scale in made] == [True, False]
        assert [scale.exp().item() for scale in made] == pytest.approx([5.0, 5.0])


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [
        "--data",
        "scenes?n=64",
        "--size",
        "debug",
        "--batch",
        "8",
        "--steps",
        "2",
        "--out",
        str(tmp_path),
        "--dry-run",
    ]
    main(["train", "clip-c", *run, "--settings.rho", "0.25", "--settings.crop", "squash"])
    output = capsys.readouterr().out
    assert "rho=0.25" in output
    assert "crop=squash" in output
    main(["train", "siglip", "--transforms", "stylistic", *run, "--settings.stylistic.edits", "0.3"])
    assert "siglip+stylistic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("clip-c+mixup", {}, "clip-c has the transforms compose already: choose one way of mixing examples"),
        ("siglip+compose+mixup", {}, "compose and mixup both fill the slot 'transforms' of siglip"),
        ("clip-c", {"rho": 1.2}, r"settings of clip-c: rho is 1\.2: expected 0 to 1"),
        ("clip-c", {"partner": "nearest"}, "partner nearest needs partner_table"),
        ("clip-c", {"alpha": 1}, "alpha"),
    ],
)
def test_what_cannot_be_gets_a_sentence(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name, settings)
