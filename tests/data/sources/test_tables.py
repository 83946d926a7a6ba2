"""csv, tsv and parquet: columns, merging, damage."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiloword.data.sources.open import open_source
from kiloword.types import BadSample, Source
from tars import photo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "p").mkdir()
    for i in range(3):
        (tmp_path / "p" / f"{i}.png").write_bytes(photo(i))
    (tmp_path / "p" / "zero.png").write_bytes(b"")
    return tmp_path


def source_of(path: Path, content: str | bytes) -> Source:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_source(str(path))


def reason(source: Source, row: int) -> str:
    with pytest.raises(BadSample) as caught:
        source.record(row)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.csv", 'image,caption\np/1.png,"one, with comma"\np/0.png,zero\np/1.png,"two\nlines"\n'),
        ("x.csv", 'filepath\ttitle\np/1.png\tone, with comma\np/0.png\tzero\np/1.png\t"two\nlines"\n'),
        (
            "x.tsv",
            '\ufeffid\timage\tcaption\n7\tp/1.png\tone, with comma\n8\tp/0.png\tzero\n9\tp/1.png\t"two\nlines"\n',
        ),
        ("x.CSV", 'image,captions\r\np/1.png,"[""one, with comma"", ""two\\nlines""]"\r\np/0.png,zero\r\n'),
    ],
)
def test_rows_of_one_image_are_merged(folder: Path, name: str, content: str) -> None:
    source = source_of(folder / name, content)
    records = [source.record(row) for row in range(len(source))]
    assert [r.key for r in records] == ["p/1", "p/0"]
    assert [r.captions for r in records] == [["one, with comma", "two\nlines"], ["zero"]]
    assert [r.image for r in records] == [photo(1), photo(0)]


def test_captions_one_a_line(folder: Path) -> None:
    assert source_of(folder / "x.csv", 'image,captions\np/1.png,"a\n\n[b]"\n').record(0).captions == ["a", "[b]"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.sampled_from("012"), st.sampled_from(["a", "b", " "])), min_size=1, max_size=12))
def test_merging_equals_a_dictionary(folder: Path, rows: list[tuple[str, str]]) -> None:
    expected: dict[str, list[str]] = {}
    for name, caption in rows:
        expected.setdefault(name, []).extend([caption] if caption.strip() else [])
    lines = "".join(f"p/{name}.png,{caption}\n" for name, caption in rows)
    source = source_of(folder / "x.csv", "image,caption\n" + lines)
    found = {source.key(row)[-1]: source.captions(row) for row in range(len(source))}  # type: ignore[attr-defined]
    assert found == expected
    assert list(found) == list(expected)


def test_bad_rows_have_reasons(folder: Path) -> None:
    lines = [
        b"image,caption",
        b"p/0.png,good",
        b"p/missing.png,x",
        b"p/zero.png,x",
        b"p/1.png,caf\xe9",
        b"p/2.png,",
        b",nothing",
        b"p/0.png,too,many,columns",
        b"p/0.png," + b"x" * 100_000,
    ]
    source = source_of(folder / "x.csv", b"\n".join(lines))
    assert len(source) == 7
    assert source.record(0).captions == ["good", "x" * 100_000]
    assert [reason(source, row) for row in range(1, 7)] == [
        "image cannot be read (No such file or directory)",
        "the image has zero bytes",
        "caption is not UTF-8",
        "no caption",
        "no image is named",
        "line without 2 columns",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("url,text\nx,y\n", r"has the columns url, text. Expected `image` \(or `filepath`\) and `caption`"),
        ("image,text\nx,y\n", "has the columns image, text"),
        ("", "is empty"),
        ("image,caption\n", "has no rows"),
        (b"\xff\xfe,caption\n", "the first line is not UTF-8"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        source_of(tmp_path / "x.csv", content)


def test_parquet_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x.parquet cannot be read as a table"):
        source_of(tmp_path / "x.parquet", b"nonsense")
    pq.write_table(pa.table({"image": ["a.png"], "caption": [3]}), tmp_path / "y.parquet")
    with pytest.raises(ValueError, match=r"y.parquet cannot be read as a table"):
        open_source(str(tmp_path / "y.parquet"))


def test_parquet_with_paths(folder: Path) -> None:
    table = {"image": ["p/1.png", "p/0.png", "p/1.png"], "captions": [["a", None], ["b"], ["c", ""]]}
    pq.write_table(pa.table(table), folder / "x.parquet")
    source = open_source(str(folder / "x.parquet"))
    assert [source.record(row).captions for row in range(2)] == [["a", "c"], ["b"]]
    assert [source.record(row).image for row in range(2)] == [photo(1), photo(0)]


@pytest.mark.parametrize("struct", [False, True])
def test_parquet_with_images_inside(tmp_path: Path, struct: bool) -> None:
    images = [photo(1), photo(0), photo(1), b""]
    column = [{"bytes": p, "path": "x"} for p in images] if struct else images
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"image": column, "caption": ["a", "b", "c", "d"]}), path, row_group_size=2)
    for _ in range(2):  # the second time from the file that the first has laid out
        source = open_source(str(path))
        assert [source.record(row).captions for row in range(2)] == [["a", "c"], ["b"]]
        assert [source.record(row).image for row in range(2)] == [photo(1), photo(0)]
        assert reason(source, 2) == "the image has zero bytes"
    assert pickle.loads(pickle.dumps(source)).record(1) == source.record(1)
    pq.write_table(pa.table({"image": column[::-1], "caption": ["d", "c", "b", "a"]}), path)
    assert open_source(str(path)).record(1).captions == ["c", "a"]
