"""One rule for the cells of a table, whatever its format and the name of the column: what is a list, what is a row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from users import Run, captions, write_photos, write_table

from kiloword.data.open import open_source

SEVERAL = ["a dog", 'it\'s a "cat"', "कुत्ता", "قطة", "一只猫", "🐈"]
every_kind = pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "json", "jsonl"])
as_a_text = pytest.mark.parametrize("write", [json.dumps, str])


def one_row(folder: Path, kind: str, **cells: Any) -> Any:
    """A source of one row whose image is a.png."""
    (name,) = write_photos(folder, ["a.png"])
    return write_table(folder / f"x.{kind}", [{"image": name, **cells}])


@every_kind
@pytest.mark.parametrize(
    ("column", "query"), [("caption", ""), ("captions", ""), ("title", ""), ("alt", "?caption=alt")]
)
@pytest.mark.parametrize("write", [json.dumps, str, list, lambda several: json.dumps([*several, None, " "])])
def test_a_list_is_several_captions(tmp_path: Path, kind: str, column: str, query: str, write: Any) -> None:
    data = one_row(tmp_path, kind, **{column: write(SEVERAL)})
    assert captions(open_source(f"{data}{query}")) == [SEVERAL]


@every_kind
@pytest.mark.parametrize(
    "text", ["[Music] a dog", "[2019]", "[a dog]", "a ['dog']", '"Stop"', "['", "[गीत]", "['a'] dog"]
)
def test_a_text_in_brackets_is_a_text(tmp_path: Path, kind: str, text: str) -> None:
    assert captions(open_source(str(one_row(tmp_path, kind, caption=text)))) == [[text]]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("text", ["['a dog' 'a cat']", "['a dog', nan]", '["a dog", 5]', "['कुत्ता'\n 'बिल्ली']"])
def test_a_list_of_another_form_is_a_bad_row(tmp_path: Path, run: Run, kind: str, text: str) -> None:
    code, output = run("data", "check", one_row(tmp_path, kind, caption=text))
    assert (code, "list" in output, "JSON" in output) == (1, True, True)


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
@pytest.mark.parametrize(("column", "objects"), [("answer", False), ("answers", False), ("answers", True)])
@as_a_text
def test_a_list_is_several_answers(tmp_path: Path, kind: str, column: str, objects: bool, write: Any) -> None:
    """Objects are answers of VQAv2."""
    answers = [{"answer": text, "answer_id": 1} for text in SEVERAL] if objects else SEVERAL
    source: Any = open_source(str(one_row(tmp_path, kind, question="what?", **{column: write(answers)})))
    assert (source.info(0)["question"], captions(source)) == ("what?", [SEVERAL])


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@as_a_text
def test_a_list_is_several_labels(tmp_path: Path, kind: str, write: Any) -> None:
    source: Any = open_source(str(one_row(tmp_path, kind, label=write(["बिल्ली", "C++", "कुत्ता"]))))
    assert sorted(source.classnames) == sorted(["बिल्ली", "C++", "कुत्ता"])
    assert source.record(0).label.indices == (0, 1, 2)


def lines(folder: Path, name: str, *rows: str, images: Sequence[str] = ("a", "b", "c", "d")) -> str:
    """A table of these lines, as they stand."""
    write_photos(folder, [f"{image}.png" for image in images])
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
def test_rows_that_a_quote_swallows_are_bad_rows(tmp_path: Path, run: Run, name: str, rows: list[str]) -> None:
    data = lines(tmp_path, name, *rows)
    code, output = run("data", "check", data)
    assert (code, "line 3 (" in output, "c.png" in output) == (1, True, True)
    source: Any = open_source(data)
    assert (source.key(0), len(source), source.captions(0)) == ("a", 4, ["x"]), "no line is lost"


def test_a_quote_around_most_of_a_table(tmp_path: Path, run: Run) -> None:
    rows = ["image,caption", *(f"{n}.png,caption {n}" for n in range(60))]
    rows[6] = '5.png,"caption 5'
    rows[51] = "50.png,a, b"
    rows[3] = '2.png,"two lines\nof one caption"'
    output = run("data", "check", lines(tmp_path, "x.csv", *rows, images=[str(n) for n in range(60)]))[1]
    assert ["line 8 (5.png" in output, "55 of 60 samples are bad" in output] == [True] * 2


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


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl"])
def test_numbers_as_pandas_writes_them_are_labels(tmp_path: Path, kind: str) -> None:
    names = write_photos(tmp_path, [f"{n}.png" for n in range(12)])
    rows = [{"image": name, "label": float(n)} for n, name in enumerate(names)]
    source: Any = open_source(str(write_table(tmp_path / f"x.{kind}", rows)))
    assert [source.record(row).label for row in range(12)] == list(range(12))


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_table_among_others_is_named(tmp_path: Path, run: Run, kind: str, place: int) -> None:
    for n in range(3):
        path = one_row(tmp_path, kind, caption="बिल्ली").rename(tmp_path / f"{n}.{kind}")
        if n == place:
            empty_table(path)
    code, output = run("data", "check", str(tmp_path / f"{{0..2}}.{kind}"))
    assert (code, "2 samples" in output) == (0, True)
    assert output.count("1 table skipped") == 1
    assert f"{place}.{kind}" in output
    assert run("data", "check", str(tmp_path / f"{{{place}..{place}}}.{kind}"))[0] == 2


def empty_table(path: Path) -> None:
    """Its columns without a row; of a tsv, not even them."""
    if path.suffix == ".parquet":
        pq.write_table(pq.read_table(path).slice(0, 0), path)
    else:
        path.write_bytes(b"" if path.suffix == ".tsv" else b"image,caption\n")
