"""csv, tsv and parquet: columns, options, cells, questions, labels, what is found, what is said of unusable rows."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.data.inspect import stats
from kiloword.data.open import open_source
from kiloword.types import BadSample, LabelSet, NoCaption
from sources import records
from tars import photo

HEAD = b"image,caption\n"
GONE = "image cannot be read (No such file or directory)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images in p, one without bytes."""
    (tmp_path / "p").mkdir()
    for n in range(3):
        (tmp_path / "p" / f"{n}.png").write_bytes(photo(n))
    (tmp_path / "p" / "zero.png").write_bytes(b"")
    return tmp_path


def opened(path: Path, content: str | bytes | dict[str, Any] | pa.Table, query: str = "") -> Any:
    if isinstance(content, dict | pa.Table):
        pq.write_table(pa.table(content) if isinstance(content, dict) else content, path, row_group_size=2)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_source(f"{path}{query}")


def told(source: Any, part: str = "captions") -> list[Any]:
    """A part of each row's record, or why there is none."""
    found = []
    for row in range(len(source)):
        try:
            found.append(getattr(source.record(row), part))
        except BadSample as error:
            found.append(str(error))
    return found


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
        ("x.parquet", {"img": ["p/1.png", "p/0.png"], "captions": [["one, with comma", None, "two\nlines"], ["zero"]]}),
    ],
)
def test_rows_of_one_image_are_merged(folder: Path, name: str, content: Any) -> None:
    found = records(pickle.loads(pickle.dumps(opened(folder / name, content))))
    assert [(r.key, r.captions) for r in found] == [("p/1", ["one, with comma", "two\nlines"]), ("p/0", ["zero"])]
    assert [r.image for r in found] == [photo(1), photo(0)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('image,filepath,title,caption,captions\np/0.png,b,t,c,"[""s"", ""u""]"\n', ["s", "u"]),
        ("filepath,title,caption\np/0.png,t,c\n", ["c"]),
        ("filepath,title\np/0.png,[t]\n", ["[t]"]),
        ("image,text\np/0.png,as datasets names it\n", ["as datasets names it"]),
        ("image,text,label\np/0.png,not read,3\n", []),
        ('"image"\t"caption"\np/0.png\ty\n', ["y"]),
        ("image,caption,x\ty\np/0.png,z,1\n", ["z"]),  # commas decide
        ('image,captions\np/0.png,"a\n\n[b]"\n', ["a", "[b]"]),
        ("image| comment| caption\np/0.png| 0| a, b\n", ["a, b"]),
        ('image,captions\np/0.png," [""x"", """", ""y""]"\np/0.png,z\n', ["x", "y", "z"]),
        ({"caption": [3]}, ["3"]),
        ({"captions": [[{"raw": "x", "n": 1}, {"raw": "y"}]]}, ["x", "y"]),
        ({"captions": [{"tokens": ["x"], "raw": "y"}]}, ["y"]),
        ({"captions": [{"caption": ["x", "y"], "n": [1, 2]}]}, ["x", "y"]),
        ({"caption": ["[" * 1_000_000]}, ["[" * 1_000_000]),
        ({"question": [5], "answers": [[1]]}, "the question is not text"),
    ],
)
def test_which_column_counts(folder: Path, content: Any, expected: Any) -> None:
    content = {"image": ["p/0.png"], **content} if isinstance(content, dict) else content
    assert told(opened(folder / ("x.parquet" if isinstance(content, dict) else "x.csv"), content)) == [expected]


def test_bad_rows_have_reasons(folder: Path) -> None:
    lines = b"p/0.png,good|p/x.png,x|p/zero.png,x|p/1.png,caf\xe9|p/2.png,|,x|p/0.png,too,many,cells|a\0.png,|\xe9,y"
    source = opened(folder / "x.csv", HEAD + lines.replace(b"|", b"\n"))
    assert told(source) == [
        ["good"],
        GONE,
        "the image has zero bytes",
        "caption is not UTF-8",
        "no caption",
        "no image",
        "image cannot be read (not a file name)",
        f"{GONE[:-1]}; its name is not UTF-8)",
        "line without 2 columns",
    ]
    assert [source.key(row) for row in (4, 5, 8)] == ["p/2", "row 5", "line 8 (p/0.png,too,many,cells)"]
    (folder / "0.jsonl").write_text('{"image": "p/0.png", "caption": "a"}\n{"image": 5\n[2]\n')
    assert told(open_source(str(folder / "{0..0}.jsonl"))) == [["a"], "no object", "no object"]


@pytest.mark.parametrize("struct", [False, True])
def test_parquet_with_images_inside(tmp_path: Path, struct: bool) -> None:
    images = [photo(1), photo(0), photo(1), b""]
    column = [{"bytes": p, "path": "x"} for p in images] if struct else images
    opened(tmp_path / "x.parquet", {"image": column, "caption": ["a", "b", "c", "d"]})
    next((tmp_path / "cache/rows").glob("*.images")).unlink()
    source: Any = open_source(str(tmp_path / "x.parquet"))  # of the rows laid out, and images laid out again
    assert told(source) == [["a", "c"], ["b"], "the image has zero bytes"]
    assert [source.key(row) for row in range(3)] == ["0", "1", "3"]
    assert told(pickle.loads(pickle.dumps(source)), "image")[:2] == [photo(1), photo(0)]
    split = {"image": column, "caption": ["a", "b", "c", "d"], "split": ["x", "y", "y", "y"]}
    source = opened(tmp_path / "x.parquet", split, "?split=y")
    assert (told(source, "key")[:2], told(source)[:2]) == (["1", "2"], [["b"], ["c"]])


def test_a_parquet_without_bytes_reads_paths(folder: Path) -> None:
    """As datasets writes images that it was given as files."""
    images = [{"bytes": None, "path": "p/1.png"}, {"bytes": photo(2), "path": "p/0.png"}, {"bytes": None, "path": None}]
    source = opened(folder / "x.parquet", {"image": images, "caption": list("abc")})
    assert [source.record(row).image for row in range(2)] == [photo(1), photo(2)]
    assert (told(source), source.key(1)) == ([["a"], ["b"], "the image has zero bytes"], "1")
    source = opened(folder / "x.parquet", {"image": [{"path": "p/2"}], "caption": ["a"]})
    assert source.record(0).image == photo(2)


def test_downloads_that_failed_are_no_bad_rows(tmp_path: Path) -> None:
    """As img2dataset writes parquet: a folder of them is one data set, whose keys name their file."""
    for n in range(2):
        rows = {"url": list("abc"), "caption": list("xyz"), "status": ["success", "failed_to_download", "of a user"]}
        pq.write_table(pa.table({**rows, "jpg": [photo(n), None, photo(n + 2)]}), tmp_path / f"{n:05}.parquet")
        (tmp_path / f"{n:05}_stats.json").write_text("{}")
    source: Any = open_source(str(tmp_path))
    assert (told(source), source.key(1), source.key(2)) == ([["x"], ["z"]] * 2, "00000/2", "00001/0")
    assert (source.record(2).image, stats(source, decoded=True).bad) == (photo(1), [])
    assert ["1 row skipped" in note and "failed_to_download" in note for note in source.notes] == [True] * 2


# Options


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_columns_folder_and_split_are_named(folder: Path, suffix: str) -> None:
    rows = [("photo", "text", "more", "split"), ("0", "one", "first, with comma", "train")]
    rows += [("1", "two", "second", "test"), ("0", "[three]", "third", "train")]
    path = folder / "tables" / f"x.{suffix}"
    path.parent.mkdir()
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t" if suffix == "tsv" else ",").writerows(rows)
    if suffix == "parquet":
        pq.write_table(pa.table(dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))), path)
    src = f"{path}?image=photo&images=p&caption="
    source: Any = open_source(src + "text,more")
    assert source.name == src + "text,more"
    assert [(r.key, r.image) for r in records(source)] == [("0", photo(0)), ("1", photo(1))]
    assert told(source) == [["one", "first, with comma", "[three]", "third"], ["two", "second"]]
    assert told(open_source(src + "text&split=test")) == [["two"]]
    assert told(open_source(src + "text&split=train")) == [["one", "[three]"]]
    plain = open_source(src + "text").fingerprint
    assert plain not in (source.fingerprint, open_source(src + "text&split=test").fingerprint)
    absolute = f"{path}?images={folder}/p&caption=text&image=photo"
    assert plain == open_source(absolute).fingerprint, "where images are does not count"


def test_names_with_marks(folder: Path) -> None:
    name = folder / "why?image=x.csv"
    name.write_text("image,caption,a&b\np/0.png,because,so\n")
    assert told(open_source(str(name))) == [["because"]]
    assert told(open_source(f"{name}?caption=a%26b")) == [["so"]]


REFUSED: list[tuple[str, Any, str]] = [  # what follows the path of a table, its content, a word of the message
    ("", "image,question\n0.png,why?\n", "`answers`"),
    ("", "image,caption,caption\na.png,x,y\n", "2 columns"),
    ("", b"\xff\xfe,caption\n", "not UTF-8"),
    ("", "p/1.png,a red dog\np/0.png,two cats\n", "has the columns p/1.png, a red dog"),  # no header
    ("", "im\x1b[2Jage,caption\n", r"im\\x1b\[2Jage"),
    ("?imag=photo", HEAD, "Did you mean image"),
    ("?image=imag", HEAD, "no column 'imag'.*Did you mean image"),
    ("?caption=", HEAD, "expected a value"),
    ("?images=png", HEAD + b"a,x\n", "images=png. Looked for"),
    ("?images=../tables", HEAD + b"a,x\n", "none of its images, such as a, .*Name their folder"),
    ("?answer=caption", HEAD, "question= and answer="),
    ("?question=image&answer=image&caption=caption", HEAD, "in place of caption="),
    ("?split=dev", b"image,caption,split\na,x,train\na,x,test\n", "'dev'.*train, test"),
    (";y.csv", HEAD, "belong to a name"),
    *(("", {"image": [i], "caption": ["x"]}, "no paths") for i in ({"a": 3}, {"bytes": "a"}, ["a"], "https://a.org/a")),
]


@pytest.mark.parametrize(("query", "content", "word"), REFUSED)
def test_what_is_refused(tmp_path: Path, query: str, content: Any, word: str) -> None:
    (tmp_path / "tables").mkdir()
    with pytest.raises(ValueError, match=word):
        opened(tmp_path / "tables" / ("x.parquet" if isinstance(content, dict) else "x.csv"), content, query)


# Questions


def test_rows_of_questions_are_not_merged(folder: Path) -> None:
    rows = b'''image,question,answers,question_type
p/0.png,is it red?,"[""yes"", ""no"", """"]",is it
p/0.png,"what, then?","blue
green
",what
p/1.png,,yes,what
p/1.png,why?,,why
p/zero.png,what?,no,
p/0.png,\xff,no,
p/none.png,what?,no,
p/0.png,x,too,many,cells
'''
    source = opened(folder / "q.csv", rows)
    keys = ["p/0#0", "p/0#1", "p/1#2", "p/1#3", "p/zero#4", "p/0#5", "p/none#6", "line 11 (p/0.png,x,too,many,cells)"]
    assert [source.key(row) for row in range(len(source))] == keys
    assert source.record(0).info == {"question": "is it red?", "answers": ["yes", "no", ""], "question_type": "is it"}
    assert (source.info(1)["question"], source.record(1).image) == ("what, then?", photo(0))
    assert told(source) == [
        ["yes", "no"],
        ["blue", "green"],
        "the question is not text",
        "a question without an answer",
        "the image has zero bytes",
        "caption is not UTF-8",
        GONE,
        "line without 4 columns",
    ]


def test_one_answer_and_none(folder: Path) -> None:
    source = opened(folder / "q.tsv", "filepath\tquestion\tanswer\np/1.png\twhich?\t[a]\np/1.png\tshort\n")
    assert told(source) == [["[a]"], "line without 3 columns"]
    rows = {"id": [7], "q": ["who?"], "a": [["me", "you"]], "image_id": [3]}
    (folder / "p" / "7.png").write_bytes(photo(7))
    record = opened(folder / "q.parquet", rows, "?image=id&question=q&answer=a&images=p").record(0)
    assert (record.image, record.captions) == (photo(7), ["me", "you"])
    assert record.info == {"question": "who?", "answers": ["me", "you"], "image_id": 3}
    with pytest.raises(NoCaption) as caught:
        opened(folder / "q.parquet", rows, "?image=id&question=q&images=p").record(0)
    assert caught.value.record.info == {"question": "who?", "image_id": 3}


# Labels


def table(path: Path, **columns: list[Any]) -> Path:
    rows = len(next(iter(columns.values())))
    pq.write_table(pa.table({"image": [photo(row) for row in range(rows)], **columns}), path)
    return path


COLUMNS: list[tuple[str, list[Any], list[Any], list[str] | None]] = [
    ("cls", [3, None, -1, 0], [3, None, None, 0], None),
    ("label", ["b_b", "a", "", None, "b_b"], [1, 0, None, None, 1], ["a", "b b"]),
    ("class", list("fedcba"), [5, 4, 3, 2, 1, 0], list("abcdef")),
    ("label", [True, False], [1, 0], None),
    ("label", [1.0, float("nan"), 2.5, float("inf")], [1, None, "class index is not a whole number: '2.5'",
        "class index is not a whole number: 'inf'"], None),
    ("fine_label", [[0, 2], [], None], [LabelSet((0, 2)), LabelSet(()), None], None),
    ("label", [["dog", "cat"], ["cat"]], [LabelSet((0, 1)), LabelSet((0,))], ["cat", "dog"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "expected", "names"), COLUMNS)
def test_labels(tmp_path: Path, name: str, values: list[Any], expected: list[Any], names: list[str] | None) -> None:
    source: Any = open_source(str(table(tmp_path / "x.parquet", **{name: values})))
    assert (told(source, "label"), source.classnames) == (expected, names)
    assert {type(one) for one in told(source, "label")} <= {int, type(None), str, LabelSet}


def test_labels_beside_captions_and_in_csv(folder: Path) -> None:
    both = opened(folder / "x.parquet", {"image": ["p/0.png", "p/1.png"], "caption": ["x", "y"], "label": [1, 0]})
    assert told(both, "label") == [None, None]
    both = open_source(f"{folder}/x.parquet?label=label&caption=caption")
    assert [(r.captions, r.label) for r in map(both.record, (0, 1))] == [(["x"], 1), (["y"], 0)]
    text = 'image,class,region\np/0.png,7,Asia\np/0.png,"[1, 2]",\np/3.png,x,\np/0.png,,Europe\n'
    source = opened(folder / "x.csv", text, "?info=region")
    assert source.classnames == ["x"]
    assert told(source, "label") == [7, LabelSet((1, 2)), GONE, None]
    assert (source.record(0).info, source.labels.tolist()) == ({"region": "Asia"}, [7, -1, 0, -1])
    source = opened(folder / "x.csv", b"image,label\np/0.png,caf\xe9\np/1.png,x\n")
    assert (source.classnames, told(source, "label")[1]) == (["x"], 0)
    assert "is no class name" in told(source, "label")[0]


def test_class_names_of_tables(tmp_path: Path) -> None:
    (tmp_path / "classnames.txt").write_text("red bus\ncat\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a {c}\n")
    source: Any = open_source(str(table(tmp_path / "x.parquet", label=["cat", "red_bus", "catt"])))
    assert (source.classnames, source.templates) == (["red bus", "cat"], ["a {c}"])
    assert told(source, "label") == [1, 0, "label 'catt' is no class name. Did you mean cat?"]
    with pytest.raises(ValueError, match=r"none of its 2 labels is a class name, such as 'cow'; the first of 2"):
        open_source(str(table(tmp_path / "x.parquet", label=["cow", "hen"])))


@pytest.mark.parametrize("listed", ["", "Sequence", "list"])
def test_class_label_of_hugging_face(tmp_path: Path, listed: str) -> None:
    feature: Any = {"_type": "ClassLabel", "names": ["cat", "dog"]}
    kinds = {"": feature, "Sequence": {"_type": "Sequence", "feature": feature}, "list": [feature]}
    path = table(tmp_path / "x.parquet", label=[[1], [0, 1]] if listed else [1, 5])
    for metadata in (json.dumps({"info": {"features": {"label": kinds[listed]}}}).encode(), b'{"info": 3}'):
        pq.write_table(pq.read_table(path).replace_schema_metadata({b"huggingface": metadata}), path)
        source: Any = open_source(str(path))
        assert source.classnames == (["cat", "dog"] if b"names" in metadata else None)
        assert told(source, "label") == ([LabelSet((1,)), LabelSet((0, 1))] if listed else [1, 5])


def test_tables_in_shards(tmp_path: Path) -> None:
    """As Hugging Face distributes large sets: one class list for all, rows one after another."""
    for shard, values in enumerate(([1, 0], [0], [1, 1, 0])):
        table(tmp_path / f"val-{shard:05}-of-00003.parquet", fine=values)
    pattern = str(tmp_path / "val-{00000..00002}-of-00003.parquet?label=fine")
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    source: Any = open_source(pattern)
    assert (source.name, source.classnames, told(source, "label")) == (pattern, ["cat", "dog"], [1, 0, 0, 1, 1, 0])
    assert [source.key(row) for row in (1, 2)] == ["val-00000-of-00003/1", "val-00001-of-00003/0"]
    (tmp_path / "classnames.txt").unlink()
    table(tmp_path / "val-00001-of-00003.parquet", fine=["dog"])
    with pytest.raises(ValueError, match=r"its tables name different classes\. Put classnames\.txt"):
        open_source(pattern)
    with pytest.raises(ValueError, match=r"1 of 4 files are missing, the first is .*val-00003"):
        open_source(pattern.replace("00002}", "00003}"))


def test_tables_of_several_folders(tmp_path: Path) -> None:
    """Each names its images from its own folder."""
    for n in range(2):
        (tmp_path / f"{n}").mkdir()
        (tmp_path / f"{n}" / "a.png").write_bytes(photo(n))
        (tmp_path / f"{n}" / "x.csv").write_text("image,caption\na.png,x\n/none.png,y\n")
    source = open_source(f"{tmp_path}/{{0..1}}/x.csv")
    assert [source.record(row).image for row in (0, 2)] == [photo(0), photo(1)]
    assert told(source)[3] == GONE


# Columns, separators and folders of images that are found without being named


def lines(*cells: str, mark: str = ",") -> str:
    return "\n".join(cell.replace("|", mark) for cell in cells) + "\n"


@pytest.mark.parametrize(
    "table",
    [
        lines("image|caption", "0.png|a dog", "1.png|a cat", "2.png|a cow"),
        lines("Datei|Text|Jahr", "0.png|a dog|2020", "1.png|a cat|2020", "2.png|a cow|2020", mark=";"),
        lines("url|name|words", *(f"http://x/{n}.png|{n}.png|a {one}" for n, one in enumerate(("dog", "cat", "cow")))),
        lines("file|species|words", *(f"{n}.png|dog|a {one}" for n, one in enumerate(("dog", "cat", "cow")))),
    ],
)
@pytest.mark.parametrize("name", ["captions.txt", "table.csv"])
def test_a_table_beside_a_folder_of_images_needs_no_parameters(folder: Path, table: str, name: str) -> None:
    (folder / name).write_text(table)
    for src in (folder / name, folder):  # the table, and the folder that holds no other one
        found = records(open_source(str(src)))
        assert [(one.key, one.captions) for one in found] == [("0", ["a dog"]), ("1", ["a cat"]), ("2", ["a cow"])]


def test_images_and_their_table_in_one_folder(folder: Path) -> None:
    (folder / "p" / "words.csv").write_text(lines("image|caption", "0.png|a dog", "1.png|a cat"))
    source: Any = open_source(str(folder / "p"))
    assert told(source) == [["a dog"], ["a cat"]]
    assert "2.png" in " ".join(source.notes)  # the image that the table does not name


def test_an_empty_caption_beside_others_is_counted(folder: Path) -> None:
    (folder / "t.csv").write_text(lines("image|caption", "0.png|a dog", "0.png|", "1.png|a cat", "2.png|"))
    source: Any = open_source(str(folder / "t.csv"))
    assert source.record(0).captions == ["a dog"]
    # 2.png has no caption at all: a bad sample
    assert [note for note in source.notes if "empty caption, but the image has others: 0" in note]


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        (lines("file|plain|about", *(f"{n}.png|a dog {n}|a pet {n}" for n in range(3))), ["image=file", "plain,about"]),
        (lines("file|twin|about", *(f"{n}.png|{n}.png|a pet {n}" for n in range(3))), ["caption=about"]),
        (lines("file|kind", *(f"{n}.png|dog" for n in range(3))), ["image=file"]),
    ],
)
def test_what_is_not_sure_is_refused_with_the_parameters(folder: Path, cells: str, named: list[str]) -> None:
    (folder / "table.csv").write_text(cells)
    with pytest.raises(ValueError) as error:
        open_source(str(folder / "table.csv"))
    assert all(one in str(error.value) for one in named)


def test_two_tables_or_texts_beside_images_leave_the_choice_to_the_user(folder: Path) -> None:
    table = lines("image|caption", "0.png|a dog")
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text(table)
    with pytest.raises(ValueError, match=r"a\.csv, b\.csv"):
        open_source(str(folder))
    (folder / "p" / "a.csv").write_text(table)
    (folder / "p" / "0.txt").write_text("a wolf")
    assert open_source(str(folder / "p")).record(0).captions == ["a wolf"]
