"""Parameters of a source: columns, splits and the folder of images of a table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.cli.main import main
from kiloword.data.sources.open import open_source
from kiloword.types import BadSample, Record, Source
from tars import photo

ROWS: list[dict[str, Any]] = [
    {"photo": "a", "text": "one", "more": "first, with comma", "split": "train"},
    {"photo": "b", "text": "two", "more": "second", "split": "test"},
    {"photo": "a", "text": "[three]", "more": "third", "split": "train"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images in `jpg`, a table of the same rows in three formats in `tables`."""
    for name in ("jpg", "tables"):
        (tmp_path / name).mkdir()
    for seed, name in enumerate("ab"):
        (tmp_path / "jpg" / f"{name}.png").write_bytes(photo(seed))
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        with (tmp_path / "tables" / f"x.{suffix}").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "tables" / "x.parquet")
    return tmp_path


def records(source: Source) -> list[Record]:
    return [source.record(row) for row in range(len(source))]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_columns_and_folder_are_named(folder: Path, suffix: str) -> None:
    src = f"{folder}/tables/x.{suffix}?image=photo&caption=text,more&images=jpg"
    source = open_source(src)
    first, second = records(source)
    assert source.name == src
    assert (first.key, first.image) == ("a", photo(0))
    assert first.captions == ["one", "first, with comma", "[three]", "third"]
    assert (second.key, second.image, second.captions) == ("b", photo(1), ["two", "second"])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_split_is_chosen(folder: Path, suffix: str) -> None:
    src = f"{folder}/tables/x.{suffix}?image=photo&caption=text&images={folder}/jpg&split="
    assert [r.captions for r in records(open_source(src + "test"))] == [["two"]]
    assert [r.captions for r in records(open_source(src + "train"))] == [["one", "[three]"]]
    with pytest.raises(ValueError, match=r"no rows whose split is 'dev'\. .* It has train, test\."):
        open_source(src + "dev")


def test_images_in_the_table_of_one_split(folder: Path) -> None:
    images = [{"bytes": photo(seed), "path": None} for seed in (5, 6, 5)]
    table = pa.table({"photo": images, "text": ["x", "y", "z"], "split": ["train", "test", "test"]})
    pq.write_table(table, folder / "in.parquet")
    found = records(open_source(f"{folder}/in.parquet?image=photo&caption=text&split=test"))
    assert [(r.image, r.captions) for r in found] == [(photo(6), ["y"]), (photo(5), ["z"])]


def test_a_cell_may_be_a_json_list(folder: Path) -> None:
    cell = json.dumps(["one", "two\nlines"]).replace('"', '""')
    (folder / "jpg" / "x.csv").write_text(f'file,raw\na.png,"{cell}"\nb,"a\nb"\n')
    found = records(open_source(f"{folder}/jpg/x.csv?image=file&caption=raw"))
    assert [r.captions for r in found] == [["one", "two\nlines"], ["a\nb"]]


def test_questions_and_numbers_of_images(folder: Path) -> None:
    (folder / "jpg" / "7.png").write_bytes(photo(7))
    pq.write_table(pa.table({"id": [7], "q": ["who?"], "a": [["me", "you"]]}), folder / "q.parquet")
    (record,) = records(open_source(f"{folder}/q.parquet?image=id&question=q&answer=a&images=jpg"))
    assert (record.image, record.captions) == (photo(7), ["me", "you"])
    assert record.info == {"question": "who?", "answers": ["me", "you"]}


def test_options_are_part_of_the_fingerprint(folder: Path) -> None:
    src = f"{folder}/tables/x.csv?image=photo&images={folder}/jpg&caption="
    text, more = open_source(src + "text"), open_source(src + "more")
    assert text.fingerprint != more.fingerprint
    assert text.fingerprint == open_source(f"{folder}/tables/x.csv?caption=text&image=photo").fingerprint


def test_a_name_with_a_question_mark_wins(folder: Path) -> None:
    name = folder / "jpg" / "why?image=x.csv"
    name.write_text("image,caption,a&b\na.png,because,so\n")
    assert open_source(str(name)).record(0).captions == ["because"]
    assert open_source(f"{name}?caption=a%26b").record(0).captions == ["so"]


def test_a_missing_image_is_named(folder: Path) -> None:
    (folder / "x.csv").write_text("image,caption\nnone,x\na,y\n")
    with pytest.raises(BadSample, match=r"image cannot be read \(No such file"):
        open_source(f"{folder}/x.csv?images=jpg").record(0)
    with pytest.raises(ValueError, match=r"none of its images, such as none, is in .*tables. Name their folder"):
        open_source(f"{folder}/x.csv?images=tables")


@pytest.mark.parametrize(
    ("src", "message"),
    [
        ("x.csv?imag=photo", "no parameter 'imag'; it has image, .*Did you mean image"),
        (
            "x.csv?image=phot",
            "no column 'phot'; it has photo, text, more, split. Did you mean photo.*FILE.image=COLUMN",
        ),
        ("x.csv?image=photo", "has the columns photo, text, more, split. Expected .*FILE.image=COLUMN&caption=COLUMN"),
        ("x.csv?image=photo&image=photo", "the parameter image is given twice"),
        ("x.csv?image=photo&caption=", "the parameter caption has an empty value"),
        ("x.csv?image=photo&caption=text,", "the parameter caption has an empty value"),
        ("x.csv?image=photo&caption=text&images=png", "no folder images=png. Looked for .*tables.png"),
        ("x.csv?image=photo&answer=text", "questions need question=COLUMN, and answer=COLUMN"),
        ("x.csv?image=photo&question=text&answer=more&caption=text", "without caption="),
        ("none.csv?image=photo", "none.csv: no such file or folder"),
        ("../jpg?image=photo", "takes no parameters, but .image=photo follows it"),
    ],
)
def test_bad_parameters(folder: Path, src: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(f"{folder}/tables/{src}")


def test_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = f"{folder}/tables/x.csv?image=photo&caption=text&images=jpg"
    main(["data", "stats", src])
    assert "images 2   captions 3   bad 0" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["train", "clip", "--size", "debug", "--data", src + "&captions=text", "--out", str(folder / "run")])
    assert end.value.code == 2
    assert "Did you mean caption?" in capsys.readouterr().err
    assert not (folder / "run").exists()
