"""Keep-lists: pairs are found by key and text, feature stores and resumes hold, lists of other data are refused."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from kiloword.config.recipes import DataConfig
from kiloword.data.feature_store import contents
from kiloword.data.reading import captions_at
from kiloword.data.scenes import parse_scenes
from kiloword.data.sources.extra_captions import with_captions
from kiloword.data.sources.keep import KeepList, kept, omitted
from kiloword.data.sources.mixture import MixtureSource, mix
from kiloword.data.sources.open import open_data, open_source
from kiloword.data.sources.optional import keys
from kiloword.types import BadSample, Source
from tars import pairs, write_tar


def table(path: Path, **columns: Any) -> Path:
    pa.parquet.write_table(pa.table(columns), path)
    return path


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
def source(tmp_path: Path) -> Source:
    """Keys 0000 to 0005 with the captions "image N", "more of N" and "twice", which is there two times."""
    tar = write_tar(tmp_path / "0.tar", pairs(6))
    extra = [[f"more of {n}", "twice"] for n in range(6)]
    path = table(tmp_path / "extra.parquet", key=[f"{n:04d}" for n in range(6)], captions=extra)
    return with_captions(open_source(str(tar)), [path])


def captions(source: Source) -> dict[str, list[str]]:
    return {(record := source.record(row)).key: record.captions for row in range(len(source))}


def test_captions_and_images_are_omitted(tmp_path: Path, source: Source) -> None:
    drop = {("0001", 0), *((f"{3:04d}", n) for n in range(3))}
    chosen = kept(source, [listed(tmp_path / "keep.parquet", source, drop)])
    expected = captions(source)
    expected["0001"] = ["more of 1", "twice"]
    del expected["0003"]
    assert captions(chosen) == expected
    assert [captions_at(chosen, row) for row in range(len(chosen))] == list(expected.values())
    assert keys(chosen) == list(expected)
    assert pickle.loads(pickle.dumps(chosen)).captions(1) == ["more of 1", "twice"]
    assert str(omitted(chosen)) == ("omits 4 of 18 captions (pairs), and with them 1 of 6 images that keep none")


def test_the_fingerprint_follows_what_is_kept(tmp_path: Path, source: Source) -> None:
    one, same, other = (
        kept(source, [listed(tmp_path / f"{n}.parquet", source, {("0001", index)}, order)])
        for n, (index, order) in enumerate([(0, 1), (0, -1), (1, 1)])
    )
    assert one.fingerprint == same.fingerprint
    assert len({source.fingerprint, one.fingerprint, other.fingerprint}) == 3
    assert contents(one) == contents(source), "feature stores of the whole serve it"


def test_a_text_that_an_image_has_twice_is_told_apart_by_order(tmp_path: Path) -> None:
    data = table(tmp_path / "data.parquet", image=["a.png"] * 3, caption=["x", "y", "x"])
    source = open_source(str(data))
    texts = captions_at(source, 0)
    assert texts == ["x", "y", "x"]
    keep = table(tmp_path / "k.parquet", key=["a"] * 3, caption=texts, keep=[True, True, False])
    assert captions_at(kept(source, [keep]), 0) == ["x", "y"]


def test_a_mixture_keeps_by_its_parts(tmp_path: Path, source: Source) -> None:
    both = mix([source, parse_scenes("scenes:train?n=4")], [2, 1])
    assert isinstance(both, MixtureSource)
    lists = [listed(tmp_path / f"{n}.parquet", part, {("0001", 0)}) for n, part in enumerate(both.sources)]
    chosen = kept(both, lists)
    assert isinstance(chosen, MixtureSource)
    assert len(chosen) == 16
    assert captions_at(chosen, 7) == ["more of 1", "twice"]
    total = omitted(chosen)
    assert total is not None
    assert (total.captions, total.all_images) == (1, 10)


def test_settings_open_it(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "0.tar", pairs(4))
    keep = listed(tmp_path / "keep.parquet", open_source(str(tar)), {("0002", 0)})
    chosen = open_data(DataConfig(sources=(str(tar),), keep=(str(keep),)))
    assert keys(chosen) == ["0000", "0001", "0003"]


def test_lists_of_other_data_are_refused(tmp_path: Path, source: Source) -> None:
    whole = pa.parquet.read_table(listed(tmp_path / "whole.parquet", source, set()))

    def refused(change: pa.Table, words: str) -> None:
        pa.parquet.write_table(change, tmp_path / "bad.parquet")
        with pytest.raises(ValueError, match=words):
            kept(source, [tmp_path / "bad.parquet"])

    def with_column(name: str, values: Any) -> pa.Table:
        return whole.set_column(whole.column_names.index(name), name, pa.array(values))

    n = len(whole)
    refused(with_column("key", [f"x{i}" for i in range(n)]), "is of another data set: it has none of the 6 images")
    refused(whole.slice(0, n - 3), "lacks 1 of the 6 images of .*, such as '0005'")
    refused(with_column("caption", [f"x{i}" for i in range(n)]), "lacks captions that .* has, such as one of 0000")
    refused(with_column("keep", [False] * n), "keeps no caption")
    refused(with_column("keep", [None, *[True] * (n - 1)]), "the column keep has 1 empty cell")
    refused(with_column("keep", ["yes"] * n), "the column keep holds string. Expected true or false")
    refused(with_column("key", list(range(n))), "the column key holds int64. Expected text")
    refused(whole.drop_columns(["keep"]), "is no keep-list: it lacks the column keep")
    refused(whole.slice(0, 0), "has no rows")
    with pytest.raises(ValueError, match=re.escape("no such file")):
        KeepList([tmp_path / "none.parquet"])


def test_a_caption_that_changed_later_is_bad(tmp_path: Path, source: Source) -> None:
    chosen = kept(source, [listed(tmp_path / "keep.parquet", source, set())])
    del chosen.chosen._lookup  # type: ignore[attr-defined]
    chosen.chosen = KeepList([table(tmp_path / "k.parquet", key=["0000"], caption=["other"], keep=[True])])  # type: ignore[attr-defined]
    with pytest.raises(BadSample, match="a caption that the keep-list lacks"):
        chosen.record(0)
