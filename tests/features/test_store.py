"""Feature stores: what is embedded once is what a batch carries, whatever workers, interruptions and captions."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holding import held_by_another
from kiloword.config.options import RunOptions
from kiloword.config.recipes import AugmentConfig, DataConfig, TextConfig
from kiloword.data.edits import MixtureSource, mix
from kiloword.data.feature_store import FeatureStore, StorePart
from kiloword.data.files import find_key, lookup_table
from kiloword.data.loader import Loader
from kiloword.data.parts import Part, checksum
from kiloword.data.sampler import Order
from kiloword.data.scenes import parse_scenes
from kiloword.data.sources.open import open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.features.extract import embed
from kiloword.features.tables import ProgressReport
from kiloword.methods.defaults import default_recipe
from kiloword.randomness import Draw, key
from kiloword.training.loop import train
from kiloword.types import BadSample, Batch, Example, Fetch, Record

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


@dataclass
class Images:
    """Row i holds noise and 1 + i % 3 captions; row 5 is bad, rows 7 and 8 have odd keys, row 9 has no caption."""

    rows: int = ROWS
    name: str = "images"
    fingerprint: str = "p"

    def __len__(self) -> int:
        return self.rows

    def key(self, row: int) -> str:
        return {7: "folder/ünï.cöde", 8: "no \udcff utf-8"}.get(row, f"k{row:03}")

    def record(self, row: int) -> Record:
        if row == 5:
            raise BadSample("truncated image")
        pixels = np.random.default_rng(row).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        captions = [f"image {row} caption {n}" for n in range(1 + row % 3)]
        return Record(self.key(row), pixels, [] if row == 9 else captions, label=0)


def example(source: Images, row: int, *captions: str) -> Example:
    return Example(source.key(row), row, torch.zeros(3, SIZE, SIZE, dtype=torch.uint8), list(captions))


def rounded(features: Tensor) -> Tensor:
    return features.half().float()


def pixels(source: Images, row: int) -> Tensor:
    return torch.from_numpy(source.record(row).image).permute(2, 0, 1)[None]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """Three parts: of 16, 16 and 8 rows."""
    return embed(Fake(), Images(), tmp_path_factory.mktemp("features") / "t", batch=5, part=PART)


def test_round_trip(table: FeatureStore) -> None:
    source, teacher = Images(), Fake()
    table.check(source)
    assert table.name == "teacher"
    assert table.dim == DIM
    good = [row for row in range(ROWS) if row != 5]
    assert table.keys == [source.key(row) for row in good]
    assert len(table) == len(good)
    captions = [source.record(row).captions for row in good]
    assert table.captions == list(chain(*captions))
    assert table.starts.tolist() == np.cumsum([0, *map(len, captions)]).tolist()
    expected = torch.cat([teacher.encode_images(pixels(source, row)) for row in good])
    assert torch.equal(torch.from_numpy(table.images()).float(), rounded(expected))
    assert torch.equal(torch.from_numpy(table.texts()).float(), rounded(teacher.encode_texts(table.captions)))
    means = [rounded(teacher.encode_texts(c)).mean(0) if c else torch.zeros(DIM) for c in captions]
    assert torch.allclose(torch.from_numpy(table.text_means()), torch.stack(means), atol=1e-7)


def test_join_by_key_and_text(table: FeatureStore) -> None:
    source, teacher = Images(), Fake()
    for row in (0, 2, 7, 8, 15, 16, 39):
        texts = source.record(row).captions
        asked = [*reversed(texts), "never seen", texts[0]]
        joined = example(source, row, *asked)
        table.join(joined)
        assert torch.equal(joined.image_features["teacher"], rounded(teacher.encode_images(pixels(source, row)))[0])
        found = joined.text_features["teacher"]
        expected = rounded(teacher.encode_texts(asked))
        expected[-2] = 0
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
        assert torch.equal(joined.image_features["teacher.texts"], expected.mean(0))


def test_unknown_key_is_zeros(table: FeatureStore) -> None:
    for row in (5, 100):  # bad; never there
        joined = example(Images(), row, "image 0 caption 0")
        table.join(joined)
        assert not joined.image_features["teacher"].any()
        assert not joined.text_features["teacher"].any()
        assert not joined.image_features["teacher.texts"].any()


def test_pickles_as_its_path(table: FeatureStore) -> None:
    table.join(example(Images(), 1, "a"))
    document = pickle.dumps(table)
    assert len(document) < 2000
    copy, joined, again = pickle.loads(document), example(Images(), 1, "a"), example(Images(), 1, "a")
    copy.join(joined)
    table.join(again)
    assert torch.equal(joined.image_features["teacher"], again.image_features["teacher"])
    assert copy.keys == table.keys


TOKENIZER = Tokenizer.train([f"image {i} caption {j}" for i in range(ROWS) for j in range(3)], 320)


def loader(table: FeatureStore, captions: int | Literal["one", "all"], **changes: object) -> Loader:
    data = DataConfig(captions=captions, augment=AugmentConfig(crop=0.5, flip=0.5, drop_words=0.3))
    order, text = Order(ROWS, 8, seed=3), TextConfig(context=24, vocab=400)
    return Loader(Images(), order, data, text, SIZE, TOKENIZER, stores=[table], seed=5, **changes)  # type: ignore[arg-type]


def same(a: Batch, b: Batch) -> bool:
    features = [(a.image_features, b.image_features), (a.text_features, b.text_features)]
    equal = all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in features)
    return equal and torch.equal(a.images, b.images) and torch.equal(a.texts.ids, b.texts.ids)


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
        edges = undropped.texts.starts.tolist()
        texts = [TOKENIZER.decode(undropped.texts.ids[a:b].tolist()) for a, b in pairwise(edges)]
        assert torch.equal(batch.text_features["teacher"], rounded(teacher.encode_texts(texts)))
        rows = [int(text.split()[1]) for text in texts]
        images = torch.cat([rounded(teacher.encode_images(pixels(Images(), row))) for row in rows])
        assert torch.equal(batch.image_features["teacher"][batch.image_of_text], images)
        for n in range(len(batch)):
            own = batch.text_features["teacher"][batch.image_of_text == n]
            assert torch.allclose(batch.image_features["teacher.texts"][n], own.mean(0), atol=1e-7)
        dropped += len(undropped.texts.ids) - len(batch.texts.ids)
    assert dropped > 0


def test_workers_change_nothing(table: FeatureStore) -> None:
    alone = loader(table, 2)
    pairs = zip(alone.batches(0, 6), replace(alone, workers=2).batches(0, 6), strict=True)
    assert all(same(a, b) for a, b in pairs)


def test_transforms_keep_a_row_for_each_caption(table: FeatureStore) -> None:
    def joined(example: Example, fetch: Fetch, draw: Draw) -> Example:
        features = {name: value[:1] for name, value in example.text_features.items()}
        return replace(example, captions=["two halves"], composed=True, text_features=features)

    batch = loader(table, 2, transforms=[joined]).batch(0)
    assert batch.text_features["teacher"].shape == (8, DIM)
    assert batch.composed.all()


def test_stands_beside_the_truth(tmp_path: Path) -> None:
    scenes = parse_scenes("scenes?n=24&captions=3", SIZE)
    table = embed(Fake(), scenes, tmp_path / "t")
    order, text = Order(24, 8, 0), TextConfig(context=48, vocab=400)
    tokenizer = Tokenizer.train((c for r in range(24) for c in scenes.captions(r)), 320)
    made = Loader(scenes, order, DataConfig(captions=2), text, SIZE, tokenizer, stores=[table], truth=True)
    batch = made.batch(0)
    assert batch.text_features["truth"].shape == (16, 8)
    assert batch.text_features["teacher"].shape == (16, DIM)
    assert batch.text_features["teacher"].norm(dim=1).sub(1).abs().max() < 2e-3
    assert batch.text_features["truth"][torch.arange(16), batch.image_of_text].all()


def test_the_truth_of_a_row_in_place_of_another_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = parse_scenes("scenes?n=24", SIZE)
    tokenizer = Tokenizer.train((c for r in range(24) for c in scenes.captions(r)), 320)
    read = scenes.record

    def record(row: int) -> Record:
        if row == 7:
            raise BadSample("truncated image")
        return read(row)

    monkeypatch.setattr(scenes, "record", record)
    made = Loader(scenes, Order(24, 8, 0), DataConfig(), TextConfig(context=48, vocab=400), SIZE, tokenizer, truth=True)
    with pytest.raises(ValueError, match=r"train-000007 is bad\. Positives by ground truth need every row"):
        list(made.batches(0, 3))
    assert len(list(replace(made, truth=False).batches(0, 3))) == 3


def parts_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("workers", [0, 2])
def test_goes_on_after_an_interruption(tmp_path: Path, workers: int) -> None:
    """Whole parts are not made again, and the result is that of one run, byte for byte."""
    whole = embed(Fake(), Images(), tmp_path / "whole", part=PART, batch=4).path
    with pytest.raises(KeyboardInterrupt):
        embed(Fake(stop_after=1 + 23), Images(), tmp_path / "cut", part=PART, batch=4)  # within the second part
    assert not (tmp_path / "cut" / "index.npy").exists()
    with pytest.raises(ValueError, match=r"cut is not finished\. Run the same `kiloword embed` command again"):
        FeatureStore(tmp_path / "cut")
    teacher = Fake()
    embed(teacher, Images(), tmp_path / "cut", part=PART, batch=4, workers=workers)
    assert teacher.images == 1 + ROWS - PART  # and one to see how many numbers a feature has
    assert parts_of(tmp_path / "cut") == parts_of(whole)


@pytest.mark.parametrize("harm", ["remove", "cut", "empty", "flip", "caption", "key", "other"])
def test_a_damaged_part_is_named_and_made_again(tmp_path: Path, harm: str) -> None:
    folder = embed(Fake(), Images(), tmp_path / "t", part=PART).path
    before = parts_of(folder)
    part = folder / "part-00001.arrow"
    raw = part.read_bytes()
    if harm == "other":  # a part of another table
        other = embed(Fake("other"), Images(fingerprint="q"), tmp_path / "o", part=PART).path
        part.write_bytes((other / part.name).read_bytes())
    elif harm == "flip":  # within the features, where no offset tells
        feature = FeatureStore(folder).images()[20].tobytes()
        place = raw.index(feature)
        part.write_bytes(raw[:place] + bytes(DIM * 2) + raw[place + DIM * 2 :])
        with pytest.raises(ValueError, match=r"part-00001\.arrow is damaged\. Run the same `kiloword embed`"):
            FeatureStore(folder).images()
    elif harm in ("caption", "key"):
        text = b"image 20 caption" if harm == "caption" else b"k020"
        part.write_bytes(raw.replace(text, b"\xff" * len(text)))
        with pytest.raises(ValueError, match=r"part-00001\.arrow is damaged\. Run the same `kiloword embed`"):
            FeatureStore(folder).captions  # noqa: B018
    else:
        part.unlink() if harm == "remove" else part.write_bytes(raw[: len(raw) // 2 if harm == "cut" else 0])
        with pytest.raises(ValueError, match=r"part-00001\.arrow is (missing|damaged)\. Run the same `kiloword embed`"):
            FeatureStore(folder).join(example(Images(), 20, "a"))
    teacher = Fake()
    embed(teacher, Images(), folder, part=PART)
    assert teacher.images == 1 + PART
    assert parts_of(folder) == before


def test_a_finished_table_is_left_alone(table: FeatureStore) -> None:
    times = {path: path.stat().st_mtime_ns for path in table.path.glob("part-*")}
    teacher = Fake()
    embed(teacher, Images(), table.path, batch=3)
    assert teacher.images == 1
    assert times == {path: path.stat().st_mtime_ns for path in table.path.glob("part-*")}


def test_another_teacher_or_data_is_refused(table: FeatureStore) -> None:
    folder = table.path.parent / "named"
    embed(Fake(), Images(), folder, teacher_name="a")
    with pytest.raises(ValueError, match=r"holds other features: teacher a \(fake\) there, teacher b \(new\) here"):
        embed(Fake("new"), Images(), folder, teacher_name="b")
    with pytest.raises(ValueError, match=r"data images \(p\) there, data images \(q\) here. Choose another --out"):
        embed(Fake(), Images(fingerprint="q"), table.path)
    with pytest.raises(ValueError, match="name teacher there, name second here"):
        embed(Fake(), Images(), table.path, name="second")
    with pytest.raises(ValueError, match="dtype fp16 there, dtype fp32 here"):
        embed(Fake(), Images(), table.path, dtype="fp32")


def test_check_wants_the_data_it_was_made_from(table: FeatureStore) -> None:
    with pytest.raises(
        ValueError, match=r"was made from images \(fingerprint p\), but the data is others \(o\): make one from the"
    ):
        table.check(Images(name="others", fingerprint="o"))
    with pytest.raises(ValueError, match="was made from images"):
        table.check(MixtureSource([Images(), Images(fingerprint="o")], [1.0, 1.0]))
    table.check(MixtureSource([Images()], [2.5]))


@dataclass
class Second(Images):
    """Other images under other keys."""

    name: str = "second"
    fingerprint: str = "s"

    def key(self, row: int) -> str:
        return f"second {row}"


def test_a_mixture_is_embedded_once_whatever_its_weights(tmp_path: Path) -> None:
    mixed = MixtureSource([Images(), Second()], [2.0, 0.5])
    table = embed(Fake(), mixed, tmp_path / "t", part=PART)
    assert len(table) == 2 * (ROWS - 1)
    for source in (mixed, MixtureSource([Second(), Images()], [1.0, 3.25]), Images(), Second()):
        table.check(source)
    assert embed(Fake(), MixtureSource([Images(), Second()], [1.0, 1.0]), tmp_path / "t").keys == table.keys


def test_what_is_missing_is_computed_from_sources_in_the_first_order_alone(tmp_path: Path) -> None:
    """Parts are ranges of rows: those of another order would hold other images, and lose as many."""
    first, second = Images(), Second()
    folder = embed(Fake(), mix([first, second]), tmp_path / "t", part=ROWS).path
    embed(Fake(), mix([second, first]), folder, part=ROWS)  # nothing is missing
    (folder / "part-00001.arrow").unlink()
    with pytest.raises(ValueError, match=r"1 x images \+ 1 x second, and 1 x second \+ 1 x images has the same"):
        embed(Fake(), mix([second, first]), folder, part=ROWS)
    store = embed(Fake(), mix([first, second]), folder, part=ROWS)
    assert len(store) == 2 * (ROWS - 1)


@dataclass
class Twice(Images):
    """Rows 20 and on have the keys of rows 0 and on, and their content unless `other` says so."""

    other: str = ""
    fingerprint: str = "t"

    def key(self, row: int) -> str:
        return f"k{row % 20}"

    def record(self, row: int) -> Record:
        found = super().record(0 if row % 20 == 5 else row % 20)
        if row == 33:
            found.image = 255 - found.image if self.other == "image" else found.image
            found.captions = ["another"] if self.other == "caption" else found.captions
        return replace(found, key=self.key(row))


@pytest.mark.parametrize("part", [4, 64])
def test_repeated_keys(tmp_path: Path, part: int) -> None:
    lines = Lines()
    table = embed(Fake(), Twice(), tmp_path / "t", part=part, report=ProgressReport(lines))  # type: ignore[arg-type]
    assert table.keys == [f"k{row}" for row in range(20)]
    assert len(table.images()) == len(table.text_means()) == len(table.starts) - 1 == 20  # some parts are empty
    assert len(table.texts()) == len(table.captions) == table.starts[-1]
    assert "20 rows repeat an earlier one's key and content." in lines.text
    for other in ("image", "caption"):
        with pytest.raises(ValueError, match="two images of images have the key 'k13' and differ"):
            embed(Fake(), Twice(other=other), tmp_path / other, part=part)


class Lines:
    """A stream that is no terminal."""

    text = ""

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_bad_rows_are_counted_and_named(tmp_path: Path) -> None:
    lines = Lines()
    for _ in range(2):  # also when they come from the parts
        embed(Fake(), Images(), tmp_path / "t", report=ProgressReport(lines))  # type: ignore[arg-type]
        assert "1 of 40 rows are bad, and not in the table." in lines.text
        assert "1 sample skipped, truncated image: k005\n" in lines.text
    assert "row 40/40" in lines.text
    assert "ETA 0:00" in lines.text


def test_nothing_usable(tmp_path: Path) -> None:
    class Bad(Images):
        def record(self, row: int) -> Record:
            raise BadSample("truncated image")

    with pytest.raises(ValueError, match=r"none of its 40 rows is a usable image: .*truncated im"):
        embed(Fake(), Bad(), tmp_path / "t", part=PART)


def test_features_must_be_numbers(tmp_path: Path) -> None:
    class Broken(Fake):
        def encode_texts(self, texts: Sequence[str]) -> Tensor:
            return super().encode_texts(texts) / 0

    with pytest.raises(ValueError, match="features of captions are NaN or infinite, near 'k000'"):
        embed(Broken(), Images(), tmp_path / "t")
    with pytest.raises(ValueError, match=r"features cannot be named 'a\.b'"):
        embed(Fake(), Images(), tmp_path / "u", name="a.b")
    with pytest.raises(ValueError, match="batch is 0"):
        embed(Fake(), Images(), tmp_path / "u", batch=0)


@pytest.mark.parametrize(("name", "value"), [("dim", 2**31), ("dim", 0), ("part", 0), ("rows", -5)])
def test_numbers_that_no_store_has(tmp_path: Path, table: FeatureStore, name: str, value: int) -> None:
    shutil.copytree(table.path, tmp_path / "store")
    file = tmp_path / "store" / "table.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(ValueError, match=rf"table.json cannot be used: {name} is {value}: expected 1 to"):
        FeatureStore(tmp_path / "store")


def other_part(path: Path, **columns: pa.Array) -> None:
    """The part with other columns, and the checksum that fits them."""
    with pa.ipc.open_file(pa.OSFile(str(path))) as reader:
        schema, batch = reader.schema, reader.get_batch(0)
    arrays = [columns.get(name, column) for name, column in zip(schema.names, batch.columns, strict=True)]
    meta = {**json.loads(schema.metadata[b"kiloword"]), "crc": checksum(arrays)}
    schema = schema.with_metadata({b"kiloword": json.dumps(meta)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))


@pytest.mark.parametrize("what", ["null keys", "null images", "null captions", "no features of captions", "NaN"])
def test_a_strangers_part(tmp_path: Path, table: FeatureStore, what: str) -> None:
    """With the right checksum: damaged, or refused for its NaN, and never a traceback."""
    shutil.copytree(table.path, tmp_path / "store")
    path = tmp_path / "store" / "part-00000.arrow"
    part = table._part(0)
    key, _, image, captions, texts = part.batch.columns
    nulls = {name: pa.nulls(len(key), column.type) for name, column in (("key", key), ("image", image))}
    nan = pa.array(np.full_like(image.values.to_numpy(), np.nan))
    columns = {
        "null keys": {"key": nulls["key"]},
        "null images": {"image": nulls["image"]},
        "null captions": {"captions": pa.nulls(len(key), captions.type)},
        "no features of captions": {
            "texts": pa.ListArray.from_arrays(pa.array([0] * (len(key) + 1), pa.int32()), texts.values)
        },
        "NaN": {"image": pa.FixedSizeListArray.from_arrays(nan, image.type.list_size)},
    }[what]
    other_part(path, **columns)
    says = "NaN or infinite: make it again" if what == "NaN" else "part-00000.arrow is damaged"
    with pytest.raises(ValueError, match=says):
        FeatureStore(tmp_path / "store").images()


def test_a_part_with_more_features_than_captions(table: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the last offset, which pyarrow would not write."""
    batch = table._part(0).batch
    texts = batch.column("texts")
    more = pa.ListArray.from_arrays(texts.offsets, pa.concat_arrays([texts.values, texts.values]))
    batch = batch.set_column(4, batch.schema.field(4), more)
    monkeypatch.setattr(Part, "__init__", lambda self, path, schema: setattr(self, "batch", batch))
    with pytest.raises(ValueError, match="x is damaged"):
        StorePart(Path("x"), table.file.schema())


def test_a_pipe_in_place_of_a_part(tmp_path: Path, table: FeatureStore) -> None:
    os.mkfifo(tmp_path / "part.arrow")
    with pytest.raises(ValueError, match="is damaged"):
        StorePart(tmp_path / "part.arrow", table.file.schema())


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
    with pytest.raises(
        ValueError,
        match=r"replaced at its path by features of another model; .* of the model fake .* of the model other ",
    ):
        go_on(3, Fake("other"))


def test_refuses_what_is_no_feature_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no feature store: it has no table\.json"):
        FeatureStore(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(ValueError, match="photos exists and holds no features"):
        embed(Fake(), Images(), tmp_path / "photos")
    folder = embed(Fake(), Images(), tmp_path / "t").path
    index = (folder / "index.npy").read_bytes()
    for raw in (b"", index[:40], index[:-8], b"nonsense" * 20):
        (folder / "index.npy").write_bytes(raw)
        with pytest.raises(ValueError, match=r"index\.npy is damaged\. Remove that file\."):
            FeatureStore(folder)
    table = folder / "table.json"
    good = json.loads(table.read_text())
    for change in ({"format": "kiloword-side-9"}, {"dim": "many"}, {"more": 1}):
        table.write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=r"table\.json cannot be used: .* It was damaged"):
            FeatureStore(folder)
    table.write_text('{"format"')
    with pytest.raises(ValueError, match=r"table\.json cannot be used: .* It was damaged"):
        embed(Fake(), Images(), folder)


def test_a_folder_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    with held_by_another(tmp_path / "t") as other:
        with pytest.raises(ValueError, match=rf"process {other.pid} on \S+ is writing \S+: wait for its end"):
            embed(Fake(), Images(), tmp_path / "t")
        assert [path.name for path in (tmp_path / "t").iterdir()] == [".lock"]
    embed(Fake(), Images(), tmp_path / "t")
    assert not (tmp_path / "t" / ".lock").exists()


def test_failed_writes_leave_no_half_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ValueError, match=r"cannot write .*table\.json: No space left"):
        embed(Fake(), Images(), tmp_path / "t")
    assert list((tmp_path / "t").iterdir()) == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=3), max_size=40), st.binary(max_size=3))
def test_places_by_key(keys: list[bytes], other: bytes) -> None:
    """Also of keys that come several times, in the order of their places."""
    places = np.arange(len(keys), dtype=np.uint64) + (7 << 32)
    table = lookup_table(keys, places)
    for wanted in [*keys, other]:
        assert find_key(table, wanted) == [(7 << 32) + n for n, k in enumerate(keys) if k == wanted]


def test_equal_digests_are_distinguished_by_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiloword.data.files.key_digest", lambda raw: len(raw))
    table, source = embed(Fake(), Images(), tmp_path / "t", part=PART), Images()
    for row in (0, 20, 39):
        joined = example(source, row, "a")
        table.join(joined)
        assert torch.equal(joined.image_features["teacher"], rounded(Fake().encode_images(pixels(source, row)))[0])
