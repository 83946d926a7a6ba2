"""Pseudo-captions from a table: they join by key, and nothing else of a source changes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from kiloword.config.recipes import DataConfig, TextConfig
from kiloword.data.feature_store import contents
from kiloword.data.loader import Loader
from kiloword.data.sampler import Order
from kiloword.data.scenes import parse_scenes
from kiloword.data.sources.extra_captions import CaptionTable, WithCaptions, with_captions
from kiloword.data.sources.map_style import MapStyleSource
from kiloword.data.sources.mixture import MixtureSource
from kiloword.data.sources.open import open_data, open_source
from kiloword.data.text.tokenizer import Tokenizer
from kiloword.types import BadSample, NoCaption, Source
from tars import pairs, photo, write_tar


def table(path: Path, **columns: Any) -> Path:
    pa.parquet.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    """Keys 0000 to 0005, each with the caption "image N"."""
    return write_tar(tmp_path / "0.tar", pairs(6))


@pytest.fixture
def extra(tmp_path: Path) -> Path:
    """Rows of one key are merged; white space, nulls and what the image has already are left out."""
    return table(
        tmp_path / "extra.parquet",
        key=["0003", "0000", "0003", "unheard", "0001"],
        captions=[["c", " d "], ["a", "a", None, "", "image 0"], ["e"], ["x"], []],
    )


def captions(source: Source) -> list[list[str]]:
    return [source.record(row).captions for row in range(len(source))]


def test_captions_join_by_key(tar: Path, extra: Path) -> None:
    source = with_captions(open_source(str(tar)), [extra])
    expected = [[f"image {n}"] for n in range(6)]
    expected[0] += ["a"]
    expected[3] += ["c", "d", "e"]
    assert captions(source) == expected
    assert [source.captions(row) for row in range(6)] == expected  # type: ignore[attr-defined]
    assert source.key(3) == "0003"  # type: ignore[attr-defined]
    assert len(source) == 6


def test_several_tables_of_both_forms(tar: Path, extra: Path, tmp_path: Path) -> None:
    second = table(
        tmp_path / "b.parquet", caption=["c", "f", None], key=["0003", "0003", "0002"], score=[1.0, 2.0, 3.0]
    )
    source = with_captions(open_source(str(tar)), [extra, str(second)])
    assert source.record(3).captions == ["image 3", "c", "d", "e", "f"]
    assert source.record(2).captions == ["image 2"]
    other = with_captions(open_source(str(tar)), [second, extra])
    assert other.record(3).captions == ["image 3", "c", "f", "d", "e"]


def test_without_raw_captions(tar: Path, extra: Path) -> None:
    source = with_captions(open_source(str(tar)), [extra], raw_captions=False)
    assert source.record(0).captions == ["a", "image 0"]
    assert source.record(3).captions == ["c", "d", "e"]
    for row in (1, 2, 4, 5):
        with pytest.raises(BadSample, match="no caption"):
            source.record(row)
        with pytest.raises(BadSample, match="no caption"):
            source.captions(row)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no image has a caption without raw captions and extra ones"):
        with_captions(open_source(str(tar)), [], raw_captions=False)


def test_the_settings_open_it(tar: Path, extra: Path) -> None:
    config = DataConfig(sources=(str(tar),), extra_captions=(str(extra),))
    assert open_data(config).record(3).captions == ["image 3", "c", "d", "e"]
    assert open_data(replace(config, raw_captions=False)).record(3).captions == ["c", "d", "e"]
    assert open_data(replace(config, extra_captions=())).record(3).captions == ["image 3"]


def test_the_fingerprint_is_of_all_that_is_read(tar: Path, extra: Path, tmp_path: Path) -> None:
    plain = open_source(str(tar))
    copy = tmp_path / "renamed.parquet"
    copy.write_bytes(extra.read_bytes())
    other = table(tmp_path / "other.parquet", key=["0003"], caption=["x"])
    ways: list[tuple[list[Path], bool]] = [([], True), ([extra], True), ([extra], False), ([other], True)]
    prints = {with_captions(plain, paths, own).fingerprint for paths, own in ways}
    assert len(prints) == len(ways)
    assert with_captions(plain, [copy]).fingerprint in prints


def test_contents_tell_what_a_feature_store_covers(tar: Path, extra: Path) -> None:
    plain = open_source(str(tar))
    both, alone = contents(with_captions(plain, [extra])), contents(with_captions(plain, [extra], raw_captions=False))
    assert contents(plain) < both
    assert alone < both
    assert not alone <= contents(plain)
    assert not contents(plain) <= alone


def test_what_else_a_source_knows_stays(tmp_path: Path) -> None:
    scenes = parse_scenes("scenes?n=20&captions=2&task=colour")
    path = table(tmp_path / "t.parquet", key=[scenes.key(4)], captions=[["a circle"]])
    source = with_captions(scenes, [path])
    record, plain = source.record(4), scenes.record(4)
    assert record.captions == [*plain.captions, "a circle"]
    assert np.array_equal(record.image, plain.image)
    assert (record.label, record.key, record.info) == (plain.label, plain.key, plain.info)
    assert source.natural is False  # type: ignore[attr-defined]
    assert source.classnames == scenes.classnames  # type: ignore[attr-defined]
    assert source.relevance(record.captions, [4])[:-1].all()  # type: ignore[attr-defined]
    assert not hasattr(source, "at")
    assert not hasattr(
        with_captions(MapStyleSource([(photo(), "a")]), [table(tmp_path / "o", key=["0"], caption=["b"])]), "x"
    )


def test_a_mixture_is_wrapped_part_by_part(tmp_path: Path) -> None:
    first, second = (open_source(str(write_tar(tmp_path / f"{n}.tar", pairs(8, 8 * n)))) for n in range(2))
    path = table(tmp_path / "t.parquet", key=["0001", "0009"], captions=[["a"], ["b"]])
    source = with_captions(MixtureSource([first, second], [1.0, 0.5]), [path])
    assert isinstance(source, MixtureSource)
    assert source.record(1).captions == ["image 1", "a"]
    found = {tuple(source.at(epoch).record(row).captions) for epoch in range(4) for row in range(8, 12)}
    assert ("image 9", "b") in found


def test_workers_read_the_same(tar: Path, extra: Path) -> None:
    source = with_captions(open_source(str(tar)), [extra])
    assert isinstance(source, WithCaptions)
    document = pickle.dumps(source)
    assert len(document) < 3000
    copy = pickle.loads(document)
    assert captions(copy) == captions(source)
    assert (copy.fingerprint, copy.name) == (source.fingerprint, source.name)
    tokenizer = Tokenizer.train(["image a b c d e 0 1 2 3 4 5"], 300)
    loader = Loader(source, Order(6, 3), DataConfig(captions="all"), TextConfig(vocab=400), 16, tokenizer)
    alone, two = (list(replace(loader, workers=w).batches(0, 4)) for w in (0, 2))
    assert [b.texts.ids.tolist() for b in alone] == [b.texts.ids.tolist() for b in two]
    assert sum(len(b.texts) for b in alone) == 2 * (6 + 1 + 3)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"captions": [["a"]]}, r"has the columns captions\. Expected `key`, and `captions` \(lists of text\) or"),
        ({"key": ["a"], "text": ["a"]}, r"has the columns key, text\. Expected `key`"),
        (
            {"key": [1, 2], "caption": ["a", "b"]},
            r"`key` holds int64\. Expected text, as the images are named \(not n",
        ),
        (
            {"key": ["a"], "captions": [[1]]},
            r"the column `captions` holds list<.*int64>\. Expected text or lists of text",
        ),
        ({"key": ["a"], "caption": [1.5]}, r"the column `caption` holds double\. Expected text or lists of text"),
        ({"key": ["a"], "captions": [[]]}, r"the column `captions` holds list<.*null>\. Expected text"),
        ({"key": pa.array([], pa.string()), "caption": pa.array([], pa.string())}, "has no rows. Expected a key and"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CaptionTable(table(tmp_path / "t.parquet", **columns))


def test_files_that_cannot_be_read(tmp_path: Path, extra: Path) -> None:
    with pytest.raises(ValueError, match=r"none: no such file\. Expected a parquet table"):
        CaptionTable(tmp_path / "none")
    raw = extra.read_bytes()
    for harmed in (b"", b"key,caption\na,b\n", raw[: len(raw) // 2]):
        extra.write_bytes(harmed)
        with pytest.raises(ValueError, match="cannot be read as a table: "):
            CaptionTable(extra)
    latin = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())
    with pytest.raises(ValueError, match=r"cannot be read as a table: .*UTF"):
        CaptionTable(table(tmp_path / "latin.parquet", key=["0000"], caption=latin))


@pytest.mark.parametrize("kind", ["large", "dictionary"])
def test_other_types_of_text(tar: Path, tmp_path: Path, kind: str) -> None:
    keys: Any = pa.array(["0000", "0001"], pa.large_string())
    keys = keys.dictionary_encode() if kind == "dictionary" else keys
    lists = pa.array([["a"], ["b"]], pa.large_list(pa.large_string()))
    source = with_captions(open_source(str(tar)), [table(tmp_path / "t.parquet", key=keys, captions=lists)])
    assert source.record(1).captions == ["image 1", "b"]


def test_a_table_that_matches_no_image_is_refused(tar: Path, extra: Path, tmp_path: Path) -> None:
    other = table(tmp_path / "t.parquet", key=["0", "1"], caption=["a", "b"])
    with pytest.raises(
        ValueError,
        match=r"t\.parquet .* has none of the 6 images of .*such as '0', the images' such as '0000'",
    ):
        with_captions(open_source(str(tar)), [extra, other])


def test_images_without_a_caption_get_those_of_the_table(tmp_path: Path) -> None:
    """What has neither stays bad, and an image that cannot be read too."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(photo() if name != "c" else b"")
    extra = table(tmp_path / "extra.parquet", key=["a", "c"], captions=[["a dog"], ["a cat"]])
    source = with_captions(open_source(str(tmp_path)), [extra])
    assert source.record(0).captions == ["a dog"]
    with pytest.raises(NoCaption) as none:
        source.record(1)
    assert none.value.record.key == "b"
    assert none.value.record.image == photo()
    with pytest.raises(BadSample, match="zero bytes"):
        source.record(2)
