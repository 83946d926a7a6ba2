"""One rule for the cells of a table, whatever its format and the name of the column: what is a list, what is a row."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_lost import captions, run

from kiloword.cli.main import main
from kiloword.data.open import open_source
from tars import photo

SEVERAL = ["a dog", 'it\'s a "cat"', "कुत्ता", "قطة", "一只猫", "🐈"]


def one_row(folder: Path, kind: str, cells: dict[str, Any]) -> Path:
    """A table of one row whose image is a.png."""
    (folder / "a.png").write_bytes(photo())
    path, row = folder / f"x.{kind}", {"image": "a.png", **cells}
    if kind == "parquet":
        pq.write_table(pa.table({name: [cell] for name, cell in row.items()}), path)
    elif kind == "jsonl":
        path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n")
    elif kind == "json":
        path.write_text(json.dumps([row]))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t" if kind == "tsv" else ",").writerows([row.keys(), row.values()])
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "json", "jsonl"])
@pytest.mark.parametrize(
    ("column", "query"), [("caption", ""), ("captions", ""), ("title", ""), ("alt", "?caption=alt")]
)
@pytest.mark.parametrize("write", [json.dumps, str, lambda several: json.dumps([*several, None, " "])])
def test_a_list_is_several_captions(tmp_path: Path, kind: str, column: str, query: str, write: Any) -> None:
    data = one_row(tmp_path, kind, {column: write(SEVERAL)})
    assert captions(open_source(f"{data}{query}")) == [SEVERAL]


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl"])
@pytest.mark.parametrize("column", ["caption", "captions", "title"])
def test_a_column_of_lists_is_several_captions(tmp_path: Path, kind: str, column: str) -> None:
    assert captions(open_source(str(one_row(tmp_path, kind, {column: SEVERAL})))) == [SEVERAL]


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
@pytest.mark.parametrize(
    "text", ["[Music] a dog", "[2019]", "[a dog]", "a ['dog']", '"Stop"', "['", "[गीत]", "['a'] dog"]
)
def test_a_text_in_brackets_is_a_text(tmp_path: Path, kind: str, text: str) -> None:
    assert captions(open_source(str(one_row(tmp_path, kind, {"caption": text})))) == [[text]]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("text", ["['a dog' 'a cat']", "['a dog', nan]", '["a dog", 5]', "['कुत्ता'\n 'बिल्ली']"])
def test_a_list_of_another_form_is_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, text: str
) -> None:
    code, output = run(capsys, "data", "check", one_row(tmp_path, kind, {"caption": text}))
    assert (code, "list" in output, "JSON" in output) == (1, True, True)


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
@pytest.mark.parametrize("column", ["answer", "answers"])
@pytest.mark.parametrize("write", [json.dumps, str])
@pytest.mark.parametrize("objects", [False, True])
def test_a_list_is_several_answers(tmp_path: Path, kind: str, column: str, write: Any, objects: bool) -> None:
    answers = [{"answer": text, "answer_id": 1} for text in SEVERAL] if objects else SEVERAL
    if objects and column == "answer":
        pytest.skip("objects are answers of VQAv2")
    source: Any = open_source(str(one_row(tmp_path, kind, {"question": "what?", column: write(answers)})))
    assert (source.question(0), captions(source)) == ("what?", [SEVERAL])


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("write", [json.dumps, str])
def test_a_list_is_several_labels(tmp_path: Path, kind: str, write: Any) -> None:
    source: Any = open_source(str(one_row(tmp_path, kind, {"label": write(["बिल्ली", "C++", "कुत्ता"])})))
    assert sorted(source.classnames) == sorted(["बिल्ली", "C++", "कुत्ता"])
    assert source.record(0).label.indices == (0, 1, 2)


def lines(folder: Path, name: str, *rows: str, images: Sequence[str] = ("a", "b", "c", "d")) -> str:
    for n, image in enumerate(images):
        (folder / f"{image}.png").write_bytes(photo(n))
    (folder / name).write_text("\n".join(rows) + "\n", newline="")
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("x.tsv", ["image\tcaption", "a.png\tx", 'b.png\t"a big dog', "c.png\tcat", 'd.png\tdog"']),
        ("x.tsv", ["image\tcaption", "a.png\tx", 'b.jpg\t"a big dog', "c.png\tcat", 'd.jpg\tdog"']),
        ("x.csv", ["image,caption", "a.png,x", 'b.png,"a big dog', 'c.png,"cat, asleep"', 'd.png,"dog']),
        ("x.csv", ["image,caption", "a.png,x", 'b.png,"बड़ा कुत्ता', "c.png,قطة", "d.png,猫 🐈"]),
        ("x.csv", ["id,image,caption", "1,a.png,x", '2,b.png,"a big dog', '3,c.png,"cat"', '4,d.png,"dog']),
        ("x.csv", ["image,caption\r", "a.png,x\r", 'b.png,"a big dog\r', "c.png,cat\r", 'd.png,dog"\r']),
    ],
)
def test_rows_that_a_quote_swallows_are_bad_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, rows: list[str]
) -> None:
    data = lines(tmp_path, name, *rows)
    code, output = run(capsys, "data", "check", data)
    assert code == 1
    assert "c.png" in output
    source: Any = open_source(data)
    assert source.key(0) == "a"
    assert len(source) >= 4, "no line is lost"


def test_one_quote_swallows_most_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["image,caption", *(f"{n}.png,caption {n}" for n in range(60))]
    rows[6] = '5.png,"caption 5'
    rows[51] = "50.png,a, b"
    output = run(capsys, "data", "check", lines(tmp_path, "x.csv", *rows, images=[str(n) for n in range(60)]))[1]
    bad = re.search(r"([0-9]+) of [0-9]+ samples are bad", output)
    assert bad is not None
    assert int(bad[1]) >= 44


@pytest.mark.parametrize(
    ("name", "text", "written"),
    [
        ("x.csv", "a dog, asleep\na cat, awake", '"a dog, asleep\na cat, awake"'),
        ("x.csv", "see these:\n1.jpg, a dog\n2.jpg, a cat", '"see these:\n1.jpg, a dog\n2.jpg, a cat"'),
        ("x.csv", 'the "Stop" sign\nof b.png', '"the ""Stop"" sign\nof b.png"'),
        ("x.tsv", "a dog\tasleep\na cat\tawake", '"a dog\tasleep\na cat\tawake"'),
        ("x.tsv", 'size 3" screw\n\n\n2" long', '"size 3"" screw\n\n\n2"" long"'),
        ("x.tsv", '"Stop"', '"""Stop"""'),
    ],
)
def test_quoted_cells_keep_their_line_breaks(tmp_path: Path, name: str, text: str, written: str) -> None:
    """As pandas writes them."""
    mark = "\t" if name.endswith("tsv") else ","
    rows = [f"image{mark}caption", f"a.png{mark}{written}", f"b.png{mark}last"]
    assert captions(open_source(lines(tmp_path, name, *rows))) == [[text], ["last"]]


def test_each_line_that_a_malformed_one_swallows_is_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = lines(tmp_path, "x.csv", "image,caption,n", "a.png,x,1", 'b,"a big dog,2', "c,cat,3", "d,dog,4")
    output = run(capsys, "data", "check", data)[1]
    assert "3 of 4 samples are bad" in output


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl"])
def test_numbers_as_pandas_writes_them_are_labels(tmp_path: Path, kind: str) -> None:
    for n in range(12):
        (tmp_path / f"{n}.png").write_bytes(photo(n))
    rows = [{"image": f"{n}.png", "label": float(n)} for n in range(12)]
    texts = {
        "csv": "\n".join(["image,label", *(f"{row['image']},{row['label']}" for row in rows)]),
        "json": json.dumps(rows),
        "jsonl": "\n".join(map(json.dumps, rows)),
    }
    (tmp_path / f"x.{kind}").write_text(texts[kind])
    source: Any = open_source(str(tmp_path / f"x.{kind}"))
    assert [source.record(row).label for row in range(12)] == list(range(12))


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_table_among_others_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, place: int
) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    mark = "\t" if kind == "tsv" else ","
    for n in range(3):
        path, captioned = tmp_path / f"{n}.{kind}", [] if n == place else ["बिल्ली"]
        if kind == "parquet":
            pq.write_table(
                pa.table({"image": ["a.png"] * len(captioned), "caption": pa.array(captioned, pa.string())}), path
            )
        else:
            path.write_bytes(b"" if n == place and kind == "tsv" else f"image{mark}caption\n".encode())
            with path.open("a") as file:
                file.writelines(f"a.png{mark}{text}\n" for text in captioned)
    data = str(tmp_path / f"{{0..2}}.{kind}")
    code, output = run(capsys, "data", "check", data)
    assert (code, "2 samples" in output) == (0, True)
    assert output.count("1 table skipped") == 1
    assert f"{place}.{kind}" in output
    with pytest.raises(SystemExit) as end:
        main(["data", "check", str(tmp_path / f"{{{place}..{place}}}.{kind}")])
    assert end.value.code == 2
