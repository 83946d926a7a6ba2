"""Folders of images: what is taken for an image, its captions and its class, and what is named as left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.data.classes.names import classnames, templates
from kiloword.data.inspect import stats
from kiloword.data.open import open_source
from kiloword.types import BadSample
from sources import records
from tars import pairs, photo, write_tar


def folders(root: Path, names: list[str], inner: str = "") -> Path:
    """A class folder for each name with an image, named by the place of the name."""
    for row, name in enumerate(names):
        (root / name / inner).mkdir(parents=True)
        (root / name / inner / f"{row}.JPEG").write_bytes(photo(row))
    return root


def labels(source: Any) -> dict[str, Any]:
    return {record.key: record.label for record in records(source)}


def test_images_and_the_files_beside_them(tmp_path: Path) -> None:
    files = {
        "a.png": photo(1), "a.txt": b"x\n\ny\n",
        "b.png": photo(2), "b.json": b'{"captions": ["q"], "z": [1, null]}', "b.txt": b"not read", "b.jpg": photo(3),
        "c.png": b"", "c.txt": b"c",
        "e.png": photo(5), "e.json": b'{"question": "w?", "answers": ["1", "2"]}', "e.cls": b"[2, 0]",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):  # the second time from what the first has read
        source: Any = open_source(str(tmp_path))
        assert [source.key(row) for row in range(5)] == ["a", "b.jpg", "b.png", "c", "e"]
        assert [source.captions(row) for row in (0, 1, 4)] == [["x", "y"], ["q"], ["1", "2"]]
        assert (source.record(2).image, source.record(2).info) == (photo(2), {"z": [1, None]})
        assert (source.info(4)["question"], source.record(4).label.indices) == ("w?", (0, 2))
        with pytest.raises(BadSample, match="the image has zero bytes"):
            source.record(3)
    (tmp_path / "a.txt").write_bytes(b"xyz\n")
    changed: Any = open_source(str(tmp_path))
    assert (changed.captions(0), changed.fingerprint == source.fingerprint) == (["xyz"], False)


def test_what_a_folder_is_taken_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tars go before images; tars in test/ count beside class names alone; a folder in place of a tar is none."""
    (tmp_path / "a.PNG").write_bytes(photo())
    (tmp_path / "a.txt").write_bytes(b"a dog")
    (tmp_path / "dir.tar").mkdir()
    images: Any = open_source(str(tmp_path))
    assert (images.name, images.key(0), images.captions(0)) == (str(tmp_path), "a", ["a dog"])
    for name in ("10.tar", "9.tar"):
        write_tar(tmp_path / name, pairs(1, int(name[:-4])))
    tars: Any = open_source(str(tmp_path))
    assert [tars.key(row) for row in range(2)] == ["0009", "0010"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_source("~/9.tar")) == 1


def test_a_file_named_scenes_goes_before_the_drawn_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(open_source("scenes?n=3", 32)) == 3
    write_tar(tmp_path / "scenes" / "0.tar", pairs(2))
    assert len(open_source("scenes")) == 2
    with pytest.raises(ValueError, match="no such file"):
        open_source("scenesque")


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ([], "", "is an empty folder"),
        (["x.md"], "", "is a folder without tars or images"),
        (["x.md"], "x.md", r"x\.md: unknown kind of file"),
        ([], "none", "none: no such file or folder"),
        (["dev/9.tar", "train/0.tar"], "", "name one of dev, train"),
        (["9.tar"], "{9..11}.tar", r"2 of 3 files are missing, the first is .*10\.tar"),
        (["0.tar.gz"], "", r"tars \(not packed\)"),
        (["0.tar.gz"], "0.tar.gz", "unpack"),
        (["0.tar"], "0.tar", "cannot be read as a plain tar"),
        (["train.csv"], "", r"name one of train\.csv"),
        (["0/a/x.png", "0/b/x.png", "1/a/x.png", "1/b/x.png"], "", "name one of 0, 1"),
        (["one/x.png"], "", "name one of one"),
        (["0.tar"], "{2..0}.tar", "names 0 files"),
        (["x.csv"], "{x,y}.csv", "no such file"),
        (["x.csv"], "*.csv", "belong to a name"),
        (["x.png"], "?image=photo", "takes no parameters"),
        (["x.parquet"], "x.parquet", "cannot be read as a table"),
        ([], "{0..9999}/{0..999}.tar", "at most 1,000,000"),
        (["classnames.txt", "a/x.png", "b/x.png"], "", "has 2 class folders, but classnames.txt names 3 classes"),
    ],
)
def test_folders_that_are_no_data(tmp_path: Path, files: list[str], name: str, message: str) -> None:
    (tmp_path / "data").mkdir()
    for file in files:
        (tmp_path / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / file).write_bytes(photo() if file.endswith(".png") else b"x\ny\nz\n")
    with pytest.raises(ValueError, match=message):
        open_source(str(tmp_path / "data" / name))


# Class folders


def test_class_folders_count_in_sorted_order(tmp_path: Path) -> None:
    source: Any = open_source(str(folders(tmp_path, ["red_bus", "Cat", "dog", "a b"])))
    assert list(labels(source).items()) == [("Cat/1", 0), ("a b/3", 1), ("dog/2", 2), ("red_bus/0", 3)]
    assert (source.classnames, source.templates) == (["Cat", "a b", "dog", "red bus"], None)
    assert (source.captions(0), stats(source).labels) == ([], {0: 1, 1: 1, 2: 1, 3: 1})
    (tmp_path / "Cat" / "1.json").write_text('{"caption": "an a", "region": "Asia"}')
    record = open_source(str(tmp_path)).record(0)
    assert (record.captions, record.label, record.info) == (["an a"], 0, {"region": "Asia"})


def test_wnids_have_the_names_and_templates_of_imagenet(tmp_path: Path) -> None:
    """With the images in a folder of their own, as Tiny-ImageNet's."""
    source: Any = open_source(str(folders(tmp_path / "train", ["n02123045", "n01440764", "n03773504"], "images")))
    assert labels(source) == {"n01440764/images/1": 0, "n02123045/images/0": 1, "n03773504/images/2": 2}
    assert source.classnames == ["tench", "tabby cat", "missile"]
    assert source.templates == templates("imagenet1k")
    (tmp_path / "classnames.txt").write_text("\n".join([*classnames("imagenet1k")[:500], "missile"]))
    source = open_source(str(tmp_path / "train"))
    assert labels(source) == {"n01440764/images/1": 0, "n02123045/images/0": 281, "n03773504/images/2": 500}
    unknown: Any = open_source(str(folders(tmp_path / "other" / "21k", ["n00000001", "n01440764"])))
    assert (unknown.classnames, labels(unknown)) == (None, {"n00000001/0": 0, "n01440764/1": 1})


def test_numbers_are_labels(tmp_path: Path) -> None:
    """As of ImageNet-V2, 10 comes after 9; of GTSRB, five digits are no shards."""
    source: Any = open_source(str(folders(tmp_path / "v2", ["0", "10", "9"])))
    assert (labels(source), source.classnames) == ({"0/0": 0, "10/1": 10, "9/2": 9}, None)
    (tmp_path / "v2" / "classnames.txt").write_text("\n".join(f"name {n}" for n in range(11)))
    assert labels(open_source(str(tmp_path / "v2"))) == {"0/0": 0, "10/1": 10, "9/2": 9}
    (tmp_path / "v2" / "classnames.txt").write_text("a\nb\nc\n")  # too few to be numbered so
    assert labels(open_source(str(tmp_path / "v2"))) == {"0/0": 0, "10/1": 1, "9/2": 2}
    signs = folders(tmp_path / "signs", ["00007", "00042"])
    (signs / "00007" / "GT-00007.csv").write_text("x")
    assert labels(open_source(str(signs))) == {"00007/0": 7, "00042/1": 42}


def test_empty_class_folders_keep_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders(tmp_path, ["a", "c"])
    for name in ("b", ".cache", "c/more"):
        (tmp_path / name).mkdir()
    source: Any = open_source(str(tmp_path))
    assert (labels(source), source.classnames) == ({"a/0": 0, "c/1": 2}, ["a", "b", "c"])
    assert source.notes == [f"{tmp_path}: 1 path skipped, {why}" for why in ("no images in it: b", "hidden: .cache")]
    assert "no images in it: b" in capsys.readouterr().err


# As other libraries write them


def test_shards_of_img2dataset_are_captions(tmp_path: Path) -> None:
    """What it writes as `files`: numbered folders, and the metadata of all downloads, of which some failed."""
    for shard in ("00000", "00001"):
        (tmp_path / shard).mkdir()
        (tmp_path / shard / f"{shard}0000.jpg").write_bytes(photo())
        (tmp_path / shard / f"{shard}0000.txt").write_text(shard)
        (tmp_path / shard / f"{shard}0000.json").write_text(json.dumps({"caption": shard, "status": "success"}))
        (tmp_path / f"{shard}_stats.json").write_text("{}")
        rows = {"url": list("ab"), "caption": list("ab"), "status": ["success", "failed_to_download"]}
        pq.write_table(pa.table(rows), tmp_path / f"{shard}.parquet")
    source: Any = open_source(str(tmp_path))
    found = [(r.key, r.captions, r.label) for r in records(source)]
    assert found == [("00000/000000000", ["00000"], None), ("00001/000010000", ["00001"], None)]
    assert (source.classnames, source.notes, stats(source, decoded=True).bad) == (None, [], [])


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("column", ["text", "caption"])
def test_image_folders_of_datasets(tmp_path: Path, suffix: str, column: str) -> None:
    rows = [{"file_name": "\u00e4.png", column: "x"}, {"file_name": "in/b.png", column: "y"}]
    (tmp_path / "in").mkdir()
    for n, name in enumerate(("a\u0308.png", "in/b.png", "in/other.png")):  # the letter as a Mac writes it
        (tmp_path / name).write_bytes(photo(n))
    (tmp_path / "a\u0308.txt").write_text("not read")
    path = tmp_path / f"metadata.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        cells = [",".join(row.values()) for row in rows]
        path.write_text("\n".join([f"file_name,{column}", *cells] if suffix == "csv" else map(json.dumps, rows)))
    source: Any = open_source(str(tmp_path))
    found = [(r.key, r.captions, r.image) for r in records(source)]
    assert found == [("\u00e4", ["x"], photo(0)), ("in/b", ["y"], photo(1))]
    assert any("does not name it: in/other.png" in note for note in source.notes)


def test_image_folders_of_datasets_with_labels(tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(photo(n))
    (tmp_path / "metadata.csv").write_text("file_name,label,image\n1.png,dog,one\n0.png,cat,two\n")
    source: Any = open_source(str(tmp_path))
    assert (labels(source), source.classnames) == ({"1": 1, "0": 0}, ["cat", "dog"])
    (tmp_path / "metadata.csv").write_text("url,label\n1.png,dog\n")  # says nothing of these files
    (tmp_path / "0.txt").write_text("zero")
    assert open_source(str(tmp_path)).record(0).captions == ["zero"]
