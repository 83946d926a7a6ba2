"""Feature stores: what is embedded once is what a batch carries, whatever workers, interruptions and captions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contents import decoded, files_of
from kiloword.config.options import RunOptions
from kiloword.config.recipes import AugmentConfig, DataConfig, TextConfig
from kiloword.data.loader import Loader
from kiloword.data.open import open_source
from kiloword.data.sampler import Order
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.methods.defaults import default_recipe
from kiloword.randomness import key
from kiloword.stores.embed import embed
from kiloword.stores.features import FeatureStore
from kiloword.training.loop import train
from kiloword.types import Example, Source
from sources import Images

SIZE, DIM, ROWS, PART = 16, 6, 40, 16
WEIGHTS = torch.randn(3 * SIZE * SIZE, DIM, generator=torch.Generator().manual_seed(0))


class Fake:
    """A teacher whose features depend on pixels and texts alone, not on their batch; it counts what it is asked."""

    size = SIZE
    resize: Literal["shortest", "squash"] = "squash"

    def __init__(self, fingerprint: str = "fake", stop_after: int = -1) -> None:
        self.fingerprint, self.stop_after, self.images = fingerprint, stop_after, 0

    def encode_images(self, images: Tensor) -> Tensor:
        if self.images == self.stop_after:
            raise KeyboardInterrupt
        self.images += len(images)
        return F.normalize(images.flatten(1).double() @ WEIGHTS.double(), dim=-1).float()

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        rows = [torch.randn(DIM, generator=torch.Generator().manual_seed(key(text))) for text in texts]
        return F.normalize(torch.stack(rows), dim=-1) if rows else torch.empty(0, DIM)


# Row 5 is bad, rows 7 and 8 have odd keys, row 9 has no caption.
ODD = {7: "folder/ünï.cöde", 8: "no \udcff utf-8"}
images = partial(Images, bad={5: "sample", 9: "silent"}, side=SIZE, most=3, keys=ODD)


def rounded(features: Tensor) -> Tensor:
    return features.half().float()


def pixels(source: Source, row: int) -> Tensor:
    return torch.from_numpy(source.record(row).image).permute(2, 0, 1)[None]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """Three pieces: of 16, 16 and 8 rows."""
    return embed(Fake(), images(), tmp_path_factory.mktemp("features") / "t", batch=5, part=PART)


def test_round_trip(table: FeatureStore) -> None:
    source, teacher = images(), Fake()
    assert (table.name, table.dim) == ("teacher", DIM)
    good = [row for row in range(ROWS) if row != 5]
    assert table.keys == [source.key(row) for row in good]
    assert len(table) == len(good)
    captions = [source.record(row).captions for row in good]
    assert table.captions == list(chain(*captions))
    assert table.starts.tolist() == np.cumsum([0, *map(len, captions)]).tolist()
    assert table.places(source).tolist() == [-1 if row == 5 else row - (row > 5) for row in range(ROWS)]
    expected = torch.cat([teacher.encode_images(pixels(source, row)) for row in good])
    assert torch.equal(torch.tensor(table.images()).float(), rounded(expected))
    assert torch.equal(torch.tensor(table.texts()).float(), rounded(teacher.encode_texts(table.captions)))
    means = [rounded(teacher.encode_texts(c)).mean(0) if c else torch.zeros(DIM) for c in captions]
    assert torch.allclose(torch.from_numpy(table.text_means()), torch.stack(means), atol=1e-7)
    for row in (4, 5):  # a row that was bad has no features
        example = Example(source.key(row), row, torch.zeros(3, SIZE, SIZE), [])
        table.of(source)(example, source)
        assert bool(example.image_features["teacher"].any()) == (row != 5)


def test_files_are_those_of_the_format(table: FeatureStore) -> None:
    """What others may read: keys in parquet, a memory map for each column."""
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in table.path.glob("*.npy")}
    shapes = {name: array.shape for name, array in arrays.items() if name in ("images", "texts")}
    assert shapes == {"images": (ROWS - 1, 1, DIM), "texts": (len(table.captions), DIM)}
    assert all(arrays[name].dtype == np.float16 for name in shapes)
    rows = pq.read_table(table.path / "keys.parquet").to_pylist()
    assert [row["at"] for row in rows] == list(range(ROWS))
    assert [row["reason"] for row in rows if row["at"] in (4, 5)] == [None, "truncated image"]
    assert rows[2]["captions"] == [b"image 2 caption 0", b"image 2 caption 1", b"image 2 caption 2"]
    file = json.loads((table.path / "store.json").read_text())
    assert file["sources"] == [{"name": "images", "fingerprint": "f", "rows": ROWS}]


TOKENIZER = Tokenizer.train([f"image {i} caption {j}" for i in range(ROWS) for j in range(3)], 320)


def loader(table: FeatureStore, captions: int | Literal["one", "all"]) -> Loader:
    data = DataConfig(captions=captions, augment=AugmentConfig(crop=0.5, flip=0.5, drop_words=0.3))
    order, text, source = Order(ROWS, 8, seed=3), TextConfig(context=24, vocab=400), images()
    return Loader(source, order, data, text, SIZE, TOKENIZER, stores=[table.of(source)], seed=5)


@pytest.mark.parametrize("captions", ["one", 2, "all"])
def test_a_batch_carries_the_features_of_its_whole_captions(
    table: FeatureStore, captions: int | Literal["one", "all"]
) -> None:
    """Words are dropped from the texts, not from what the features are of."""
    teacher, dropped = Fake(), 0
    plain = loader(table, captions)
    whole = replace(plain, data=replace(plain.data, augment=AugmentConfig()))
    for step in range(6):
        batch, undropped = plain.batch(step), whole.batch(step)
        texts = decoded(TOKENIZER, undropped.texts)
        assert torch.equal(batch.text_features["teacher"], rounded(teacher.encode_texts(texts)))
        rows = [int(text.split()[1]) for text in texts]
        expected = torch.cat([rounded(teacher.encode_images(pixels(images(), row))) for row in rows])
        assert torch.equal(batch.image_features["teacher"][batch.image_of_text], expected)
        for n in range(len(batch)):
            own = batch.text_features["teacher"][batch.image_of_text == n]
            assert torch.allclose(batch.image_features["teacher.texts"][n], own.mean(0), atol=1e-7)
        dropped += len(undropped.texts.ids) - len(batch.texts.ids)
    assert dropped > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_goes_on_after_an_interruption(tmp_path: Path, workers: int) -> None:
    """Whole pieces are not made again, and the result is that of one run, byte for byte."""
    whole = embed(Fake(), images(), tmp_path / "whole", part=PART, batch=4).path
    with pytest.raises(KeyboardInterrupt):
        embed(Fake(stop_after=1 + 23), images(), tmp_path / "cut", part=PART, batch=4)  # within the second piece
    with pytest.raises(ValueError, match="not finished"):
        FeatureStore(tmp_path / "cut")
    with (tmp_path / "cut" / "images.npy").open("ab") as file:
        file.write(b"of a piece that was not finished")
    teacher = Fake()
    embed(teacher, images(), tmp_path / "cut", part=PART, batch=4, workers=workers)
    assert teacher.images == 1 + ROWS - PART  # and one to see how many numbers a feature has
    assert files_of(tmp_path / "cut") == files_of(whole)
    teacher, lines = Fake(), StringIO()
    embed(teacher, images(), tmp_path / "cut", lines, batch=3)
    assert teacher.images == 1, "a finished store is left alone"
    assert "1 of 40 rows are bad" in lines.getvalue()
    assert "truncated image: k005\n" in lines.getvalue()
    assert files_of(tmp_path / "cut") == files_of(whole)


class Wrong(Fake):
    """Texts get NaN, or one number fewer than images."""

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        found = super().encode_texts(texts)
        return found / 0 if self.fingerprint == "broken" else found[:, 1:]


def test_what_makes_no_store(tmp_path: Path, table: FeatureStore) -> None:
    """Another teacher, other data or options than what is there; values that cannot be stored; other folders."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    broken = images(bad=dict.fromkeys(range(ROWS), "sample"))
    given: dict[str, Any] = {"teacher": Fake(), "source": images(), "out": table.path}
    for n, (change, word) in enumerate((
        ({"teacher": Fake("new")}, "weights fake there, new here"),
        ({"source": images(fingerprint="q")}, "fingerprint f there, q here"),
        ({"name": "second"}, "name teacher there, second here"),
        ({"dtype": "fp32"}, "dtype fp16 there, fp32 here"),
        ({"out": tmp_path / "photos"}, "photos exists and holds no features"),
        ({"source": broken}, "none of its 40 rows is a usable image: .*truncated im"),
        ({"teacher": Wrong("broken")}, "texts are NaN or infinite, near row 0"),
        ({"teacher": Wrong()}, f"images {DIM} dimensions and texts {DIM - 1}"),
        ({"name": "a.b"}, r"'a\.b'"),
        ({"batch": 0}, "--batch"),
    )):  # fmt: skip
        out = {"out": tmp_path / str(n)} if n > 4 else {}
        with pytest.raises(ValueError, match=word):
            embed(**{**given, **out, **change})
    shutil.copytree(table.path, tmp_path / "cut")
    (tmp_path / "cut" / "texts.npy").write_bytes(b"")
    for name, word in (("photos", "holds no features"), ("cut", "damaged")):
        with pytest.raises(ValueError, match=word):
            FeatureStore(tmp_path / name)


def test_a_table_of_another_teacher_at_the_same_path_is_no_resumption(tmp_path: Path) -> None:
    """Made again by the same teacher, it is the same."""
    base = default_recipe("siglip+mined", "debug", ("scenes?n=16",))
    data = replace(base.data, tokenizer_vocab=300, features=(str(tmp_path / "t"),))
    recipe = replace(base, data=data, batch=8)

    def go_on(steps: int, teacher: Fake) -> None:
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        embed(teacher, open_source("scenes?n=16", SIZE), tmp_path / "t")
        train(replace(recipe, steps=steps), tmp_path / "run", options=RunOptions(extend=True, quiet=True))

    go_on(1, Fake())
    go_on(2, Fake())
    with pytest.raises(ValueError, match=r"of the model fake .* of the model other "):
        go_on(3, Fake("other"))
