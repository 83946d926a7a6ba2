"""Data sets made of others: captions and keep-lists joined by key, mixtures with weights, and parts by key."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from kiloword.config.recipes import DataConfig
from kiloword.data.edits import MixtureSource, every_row, is_held_out, mix
from kiloword.data.joins import kept, omitted, with_captions
from kiloword.data.open import open_data, open_source
from kiloword.data.reading import captions_at, eval_batches
from kiloword.data.scenes.source import parse_scenes
from kiloword.data.source import keys
from kiloword.types import BadSample, NoCaption, Record, Source
from tars import pairs, photo, write_tar


def table(path: Path, **columns: Any) -> Path:
    pa.parquet.write_table(pa.table(columns), path)
    return path


def captions(source: Source) -> dict[str, list[str]]:
    return {(record := source.record(row)).key: record.captions for row in range(len(source))}


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    """Keys 0000 to 0005, each with the caption "image N"."""
    return write_tar(tmp_path / "0.tar", pairs(6))


@pytest.fixture
def extra(tmp_path: Path) -> Path:
    """Rows of one key are merged; white space, nulls and what the image has already are left out."""
    texts = pa.array(
        [["c", " d "], ["a", "a", None, "", "image 0"], ["e"], ["x"], []], pa.large_list(pa.large_string())
    )
    return table(tmp_path / "extra.parquet", key=["0003", "0000", "0003", "unheard", "0001"], captions=texts)


def test_captions_join_by_key(tar: Path, extra: Path) -> None:
    source: Any = with_captions(open_source(str(tar)), [extra])
    expected = {f"{n:04d}": [f"image {n}"] for n in range(6)}
    expected["0000"] += ["a"]
    expected["0003"] += ["c", "d", "e"]
    assert [source.captions(row) for row in range(6)] == list(expected.values())
    opened = open_data(DataConfig(sources=(str(tar),), extra_captions=(str(extra),)))
    for one in (source, pickle.loads(pickle.dumps(source)), opened):
        assert captions(one) == expected


def test_several_tables_of_both_forms(tar: Path, extra: Path, tmp_path: Path) -> None:
    keys: Any = pa.array(["0003", "0003", "0002"], pa.large_string()).dictionary_encode()
    second = table(tmp_path / "b.parquet", caption=["c", "f", None], key=keys, score=[1, 2, 3])
    for tables, found in (([extra, second], ["c", "d", "e", "f"]), ([second, extra], ["c", "f", "d", "e"])):
        source = with_captions(open_source(str(tar)), tables)
        assert source.record(3).captions == ["image 3", *found]
        assert source.record(2).captions == ["image 2"]


def test_without_raw_captions(tar: Path, extra: Path) -> None:
    source = with_captions(open_source(str(tar)), [extra], raw_captions=False)
    assert source.record(0).captions == ["a", "image 0"]
    assert source.record(3).captions == ["c", "d", "e"]
    for row in (1, 2, 4, 5):
        with pytest.raises(BadSample, match="no caption"):
            source.record(row)
    with pytest.raises(ValueError, match="extra"):
        with_captions(open_source(str(tar)), [], raw_captions=False)


def test_the_fingerprint_is_of_all_that_is_read(tar: Path, extra: Path, tmp_path: Path) -> None:
    plain, copy = open_source(str(tar)), tmp_path / "renamed.parquet"
    copy.write_bytes(extra.read_bytes())
    other = table(tmp_path / "other.parquet", key=["0003"], captions=["x"])
    ways: list[tuple[list[Path], bool]] = [([], True), ([extra], True), ([extra], False), ([other], True)]
    prints = [with_captions(plain, paths, own).fingerprint for paths, own in ways]
    assert len(set(prints)) == 4
    assert with_captions(plain, [copy]).fingerprint == prints[1]


def test_mixtures_are_joined_part_by_part(tmp_path: Path) -> None:
    first, second = (open_source(str(write_tar(tmp_path / f"{n}.tar", pairs(8, 8 * n)))) for n in range(2))
    path = table(tmp_path / "t.parquet", key=["0001", "0009"], captions=[["a"], ["b"]])
    source: Any = with_captions(MixtureSource([first, second], [1.0, 0.5]), [path])
    assert source.record(1).captions == ["image 1", "a"]
    found = {tuple(source.at(epoch).record(row).captions) for epoch in range(4) for row in range(8, 12)}
    assert ("image 9", "b") in found
    scenes = parse_scenes("scenes:train?n=4")
    both: Any = mix([first, scenes], [2, 1])
    lists = [listed(tmp_path / f"{n}.parquet", part, {("0001", 0)}) for n, part in enumerate(both.sources)]
    chosen = kept(both, lists)
    assert (len(chosen), captions_at(chosen, 1)) == (18, ["image 2"])
    assert str(omitted(chosen)) == "omits 1 of 28 captions (pairs), and with them 1 of 12 images that keep none"


def test_images_without_a_caption_get_those_of_the_table(tmp_path: Path) -> None:
    """What has neither stays bad, and an image that cannot be read too."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(photo() if name != "c" else b"")
    extra = table(tmp_path / "extra.parquet", key=["a", "c"], captions=[["a dog"], ["a cat"]])
    source = with_captions(open_source(str(tmp_path)), [extra])
    assert source.record(0).captions == ["a dog"]
    with pytest.raises(NoCaption) as none:
        source.record(1)
    assert (none.value.record.key, none.value.record.image) == ("b", photo())
    with pytest.raises(BadSample, match="zero bytes"):
        source.record(2)


LATIN = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"key": ["a"], "text": ["a"]}, "captions"),
        ({"key": [1, 2], "caption": ["a", "b"]}, "int64"),
        ({"key": ["a"], "captions": [[1]]}, "int64"),
        ({"key": pa.array([], pa.string()), "caption": pa.array([], pa.string())}, "no rows"),
        ({"key": ["0", "1"], "caption": ["a", "b"]}, "none of the 6 images .* such as '0', .* as '0000'"),
        ({"key": ["0000"], "caption": LATIN}, "UTF"),
        (b"", "table"),
        (None, "no such file"),
    ],
)
def test_tables_that_cannot_be_used(tar: Path, tmp_path: Path, columns: Any, word: str) -> None:
    path = tmp_path / "t.parquet"
    if isinstance(columns, dict):
        table(path, **columns)
    elif columns is not None:
        path.write_bytes(columns)
    with pytest.raises(ValueError, match=word):
        with_captions(open_source(str(tar)), [path])


def listed(path: Path, source: Source, drop: set[tuple[str, int]], order: int = 1) -> Path:
    """A keep-list of all captions of a source, without some (key, index)."""
    rows = [
        (key, caption, (key, index) not in drop)
        for row, key in enumerate(keys(source))
        for index, caption in enumerate(captions_at(source, row))
        if key is not None
    ][::order]
    key, caption, keep = zip(*rows, strict=True)
    return table(path, key=key, caption=caption, keep=keep)


@pytest.fixture
def source(tmp_path: Path, tar: Path) -> Source:
    """Keys 0000 to 0005 with the captions "image N", "more of N" and "twice", which is there two times."""
    texts = [[f"more of {n}", "twice"] for n in range(6)]
    path = table(tmp_path / "more.parquet", key=[f"{n:04d}" for n in range(6)], captions=texts)
    return with_captions(open_source(str(tar)), [path])


def test_captions_and_images_are_omitted(tmp_path: Path, source: Source) -> None:
    drop = {("0001", 0), *((f"{3:04d}", n) for n in range(3))}
    chosen = kept(source, [listed(tmp_path / "keep.parquet", source, drop)])
    expected = captions(source)
    expected["0001"] = ["more of 1", "twice"]
    del expected["0003"]
    assert captions(chosen) == captions(pickle.loads(pickle.dumps(chosen))) == expected
    assert [captions_at(chosen, row) for row in range(len(chosen))] == list(expected.values())
    assert keys(chosen) == list(expected)
    assert str(omitted(chosen)) == "omits 4 of 18 captions (pairs), and with them 1 of 6 images that keep none"


def test_the_fingerprint_follows_what_is_kept(tmp_path: Path, source: Source) -> None:
    one, same, other = (
        kept(source, [listed(tmp_path / f"{n}.parquet", source, {("0001", index)}, order)])
        for n, (index, order) in enumerate([(0, 1), (0, -1), (1, 1)])
    )
    assert one.fingerprint == same.fingerprint
    assert len({source.fingerprint, one.fingerprint, other.fingerprint}) == 3


def test_a_text_that_an_image_has_twice_is_told_apart_by_order(tmp_path: Path) -> None:
    data = table(tmp_path / "data.parquet", image=["a.png"] * 3, caption=["x", "y", "x"])
    source = open_source(str(data))
    keep = table(tmp_path / "k.parquet", key=["a"] * 3, caption=captions_at(source, 0), keep=[True, True, False])
    assert captions_at(kept(source, [keep]), 0) == ["x", "y"]


def test_lists_of_other_data_are_refused(tmp_path: Path, source: Source) -> None:
    whole = pa.parquet.read_table(listed(tmp_path / "whole.parquet", source, set()))

    def with_column(name: str, values: Any) -> pa.Table:
        return whole.set_column(whole.column_names.index(name), name, pa.array(values))

    n = len(whole)
    for change, word in (
        (with_column("key", [f"x{i}" for i in range(n)]), "none of the 6 images"),
        (whole.slice(0, n - 3), "lacks 1 of the 6 images of .*0005"),
        (with_column("keep", [False] * n), "keeps no caption"),
        (with_column("keep", [None, *[True] * (n - 1)]), "keep has an empty"),
        (with_column("keep", ["yes"] * n), "keep. .*yes"),
        (whole.drop_columns(["keep"]), "no column 'keep'"),
    ):
        pa.parquet.write_table(change, tmp_path / "bad.parquet")
        with pytest.raises(ValueError, match=word):
            kept(source, [tmp_path / "bad.parquet"])


# Mixtures, and parts by key


class Bare:
    """Rows that can do no more than be read."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.fingerprint, self.rows = name, name, rows

    def __len__(self) -> int:
        return self.rows

    def record(self, row: int) -> Record:
        return Record(f"{self.name} {row}", b"", [f"read {row}"], info={"question": f"ask {row}", "answers": ["yes"]})


class Rich(Bare):
    """Tells keys, captions and questions without reading."""

    classnames, templates = ("x", "y"), ["a {c}"]
    natural, notes = False, ["cut"]  # drawn images are not mirrored, nor is a set with some of them

    def key(self, row: int) -> str:
        return f"key {row}"

    def captions(self, row: int) -> list[str]:
        return [f"said {row}"]

    def info(self, row: int) -> dict[str, str]:
        return {"question": f"asked {row}"}


def test_rows_stand_source_by_source_each_as_often_as_its_weight() -> None:
    mixture: Any = mix([Bare("a", 3), Rich("b", 2)], [2.0, 1.0])
    assert (len(mixture), mixture.name) == (8, "2 x a + 1 x b")
    assert [mixture.record(row).key for row in range(8)] == [*["a 0", "a 1", "a 2"] * 2, "b 0", "b 1"]
    assert [mixture.key(row) for row in range(8)] == ["a 0", "a 1", "a 2"] * 2 + ["key 0", "key 1"]
    assert [mixture.captions(row)[0] for row in (0, 5, 6, 7)] == ["read 0", "read 2", "said 0", "said 1"]
    assert [mixture.info(row)["question"] for row in (0, 5, 6, 7)] == ["ask 0", "ask 2", "asked 0", "asked 1"]
    assert (len(every_row(mixture)), [mixture.stored_row(row) for row in range(8)]) == (5, [0, 1, 2, 0, 1, 2, 3, 4])
    alike: Any = mix([Rich("a", 3), Rich("b", 2)])
    assert (alike.classnames, alike.templates, mixture.classnames) == (Rich.classnames, Rich.templates, None)
    assert (mixture.natural, mix([Bare("a", 3), Bare("b", 2)]).natural, mixture.notes) == (False, True, ["cut"])


def test_weights_are_one_each_or_none_and_take_at_least_a_row() -> None:
    one, two = Bare("a", 10), Bare("b", 4)
    assert mix([one]) is mix([one], [1.0]) is one
    assert [len(mix([one], [2.0])), len(mix([one, two])), len(mix([one, two], [0.06, 0.5]))] == [20, 14, 3]
    for weights in ([1.0], [1.0, 0.12], [0.05, 1.0], [-1.0, 1.0], [float("inf"), 1.0]):
        with pytest.raises(ValueError, match="weight"):
            mix([one, two], weights)
    with pytest.raises(ValueError, match="no data"):
        mix([])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "photos" / "0.tar", pairs(80)).parent


def test_the_parts_are_the_whole_and_share_no_key(tmp_path: Path, photos: Path) -> None:
    """A key decides alone, whatever its neighbours."""
    whole, train, val = (open_source(f"{part}{photos}") for part in ("", "train-part:", "val-part:"))
    assert not set(keys(train)) & set(keys(val))
    assert sorted([*keys(train), *keys(val)], key=str) == keys(whole)
    assert train.name == f"train-part:{photos}"
    val = pickle.loads(pickle.dumps(val))  # as a loader worker gets it
    (batch,) = eval_batches(val, 32)
    assert (batch.keys, batch.captions) == (keys(val), [[f"image {int(str(key))}"] for key in keys(val)])
    assert len({train.fingerprint, val.fingerprint, whole.fingerprint}) == 3
    assert sum(is_held_out(f"{n:07d}.jpg") for n in range(20_000)) == 1963  # the same tenth in every version
    write_tar(tmp_path / "more" / "0.tar", pairs(80, 20))
    changed = set(keys(val)) ^ set(keys(open_source(f"val-part:{tmp_path / 'more'}")))
    assert changed == {f"{n:04d}" for n in (*range(20), *range(80, 100)) if is_held_out(f"{n:04d}")}


def test_an_empty_part_and_a_missing_source_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "few" / "0.tar", pairs(2))
    for src in (f"val-part:{tmp_path / 'few'}", "val-part:nowhere"):
        with pytest.raises(ValueError, match=r"few|nowhere"):
            open_source(src)
