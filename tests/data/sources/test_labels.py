"""Class folders, label columns, lists of classes: what labels are read as, and what is said of bad ones."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.data.classes.names import classnames, templates
from kiloword.data.inspect import check, stats
from kiloword.data.sources.map_style import MapStyleSource
from kiloword.data.sources.open import open_source
from kiloword.data.sources.sample import parse_label
from kiloword.types import BadSample, LabelSet
from tars import photo, write_tar


def folders(root: Path, names: list[str], inner: str = "") -> Path:
    """A class folder for each name with an image, named by the place of the name."""
    for row, name in enumerate(names):
        (root / name / inner).mkdir(parents=True)
        (root / name / inner / f"{row}.JPEG").write_bytes(photo(row))
    return root


def labels(source: Any) -> dict[str, Any]:
    return {source.key(row): source.record(row).label for row in range(len(source))}


def test_class_folders_count_in_sorted_order(tmp_path: Path) -> None:
    source: Any = open_source(str(folders(tmp_path, ["red_bus", "Cat", "dog"])))
    assert labels(source) == {"Cat/1": 0, "dog/2": 1, "red_bus/0": 2}
    assert (source.classnames, source.templates) == (["Cat", "dog", "red bus"], None)
    assert (source.captions(0), check(source), stats(source).labels) == ([], [], {0: 1, 1: 1, 2: 1})


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
    """As of ImageNet-V2: 10 comes after 9."""
    source: Any = open_source(str(folders(tmp_path, ["0", "10", "9"])))
    assert (labels(source), source.classnames) == ({"0/0": 0, "10/1": 10, "9/2": 9}, None)
    (tmp_path / "classnames.txt").write_text("\n".join(f"name {n}" for n in range(11)))
    assert labels(open_source(str(tmp_path))) == {"0/0": 0, "10/1": 10, "9/2": 9}


def test_class_names_beside_folders(tmp_path: Path) -> None:
    folders(tmp_path, ["b_b", "a"])
    plain = open_source(str(tmp_path))
    (tmp_path / "classnames.txt").write_text("B b\nc\na\n")
    source: Any = open_source(str(tmp_path))
    assert (labels(source), source.classnames) == ({"a/1": 2, "b_b/0": 0}, ["B b", "c", "a"])
    assert source.fingerprint != plain.fingerprint
    (tmp_path / "classnames.txt").write_text("x\ny\n")
    assert labels(open_source(str(tmp_path))) == {"a/1": 0, "b_b/0": 1}
    (tmp_path / "classnames.txt").write_text("x\ny\nz\n")
    with pytest.raises(ValueError, match=r"has 2 class folders, but classnames.txt names 3 classes"):
        open_source(str(tmp_path))


def test_empty_class_folders_keep_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders(tmp_path, ["a", "c"])
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    source: Any = open_source(str(tmp_path))
    assert (labels(source), source.classnames) == ({"a/0": 0, "c/1": 2}, ["a", "b", "c"])
    assert source.notes == [f"{tmp_path}: 1 path skipped, {why}" for why in ("no images in it: b", "hidden: .cache")]
    assert "no images in it: b" in capsys.readouterr().err


def test_folders_of_class_folders_are_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        folders(tmp_path / split, ["a", "b"])
    with pytest.raises(ValueError, match="its folders train, val have: name one of them"):
        open_source(str(tmp_path))
    folders(tmp_path / "one", ["images"])
    with pytest.raises(ValueError, match="its folders images have: name one of them"):
        open_source(str(tmp_path / "one"))


def test_captions_and_other_values_beside_the_images(tmp_path: Path) -> None:
    folders(tmp_path, ["a", "b"])
    (tmp_path / "a" / "0.json").write_text('{"caption": "an a", "region": "Asia"}')
    record = open_source(str(tmp_path)).record(0)
    assert (record.captions, record.label, record.info) == (["an a"], 0, {"region": "Asia"})


def table(path: Path, **columns: list[Any]) -> Path:
    rows = len(next(iter(columns.values())))
    pq.write_table(pa.table({"image": [photo(row) for row in range(rows)], **columns}), path)
    return path


def column(source: Any) -> list[Any]:
    """The labels of all rows, or why a row is bad."""

    def label(row: int) -> Any:
        try:
            return source.record(row).label
        except BadSample as error:
            return str(error)

    return [label(row) for row in range(len(source))]


def test_labels_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    source: Any = open_source(str(table(path, cls=[3, None, -1, 0], label_name=["a", "b", "c", "d"])))
    assert (column(source), source.classnames) == ([3, None, None, 0], None)
    source = open_source(f"{table(path, kind=['b_b', 'a', '', None, 'b_b'])}?label=kind")
    assert (column(source), source.classnames) == ([1, 0, None, None, 1], ["a", "b b"])
    source = open_source(str(table(path, label=list("fedcba"))))
    assert (column(source), source.classnames) == ([5, 4, 3, 2, 1, 0], list("abcdef"))
    one, two = column(open_source(str(table(path, label=[True, False]))))
    assert (one, two, type(one)) == (1, 0, int)
    source = open_source(str(table(path, label=[[0, 2], [], None])))
    assert column(source) == [LabelSet((0, 2)), LabelSet(()), None]
    source = open_source(str(table(path, label=[["dog", "cat"], ["cat"]])))
    assert (column(source), source.classnames) == ([LabelSet((0, 1)), LabelSet((0,))], ["cat", "dog"])
    both: Any = open_source(f"{table(path, caption=['x', 'y'], label=[1, 0])}?label=label&caption=caption")
    assert [(both.record(row).captions, both.record(row).label) for row in (0, 1)] == [(["x"], 1), (["y"], 0)]
    without: Any = open_source(str(path))
    assert (column(without), without.classnames) == ([None, None], None)


def test_a_csv_has_a_sample_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(photo())
    (tmp_path / "x.csv").write_text('image,class,region\na.png,7,Asia\na.png,"[1, 2]",\nb.png,x,\na.png,,Europe\n')
    source: Any = open_source(f"{tmp_path / 'x.csv'}?info=region")
    assert source.classnames == ["x"]
    assert column(source) == [7, LabelSet((1, 2)), "image cannot be read (No such file or directory)", None]
    assert source.record(0).info == {"region": "Asia"}


def test_class_names_of_tables(tmp_path: Path) -> None:
    (tmp_path / "classnames.txt").write_text("red bus\ncat\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a {c}\n")
    source: Any = open_source(str(table(tmp_path / "x.parquet", label=["cat", "red_bus", "catt"])))
    assert (source.classnames, source.templates) == (["red bus", "cat"], ["a {c}"])
    assert column(source) == [1, 0, "label 'catt' is no class name. Did you mean cat?"]
    with pytest.raises(ValueError, match=r"none of its 2 labels is a class name, such as 'cow'; the first of 2"):
        open_source(str(table(tmp_path / "x.parquet", label=["cow", "hen"])))


def test_lists_of_classes_in_a_list_of_objects(tmp_path: Path) -> None:
    """By index or name, or in objects that the first one does not resemble."""
    for row in range(3):
        (tmp_path / f"{row}.png").write_bytes(photo(row))
    for given, expected in (([[0, 2], [], [1]], [(0, 2), (), (1,)]), ([["b", "c"], ["a"], []], [(1, 2), (0,), ()])):
        rows = [{"image": f"{row}.png", "label": label} for row, label in enumerate(given)]
        (tmp_path / "list.json").write_text(json.dumps(rows))
        found = [open_source(str(tmp_path / "list.json")).record(row).label for row in range(3)]
        assert found == [LabelSet(indices) for indices in expected]
    for one, index in (([1], 1), (["a"], 0)):
        (tmp_path / "list.json").write_text(json.dumps([{"image": "0.png"}, {"image": "1.png", "label": one}]))
        assert labels(open_source(str(tmp_path / "list.json"))) == {"0": None, "1": LabelSet((index,))}


@pytest.mark.parametrize("listed", [False, True])
def test_class_label_of_hugging_face(tmp_path: Path, listed: bool) -> None:
    feature: Any = {"_type": "ClassLabel", "names": ["cat", "dog"]}
    features = {"label": {"_type": "Sequence", "feature": feature} if listed else feature}
    values: list[Any] = [[1], [0, 1]] if listed else [1, 5]
    path = table(tmp_path / "x.parquet", label=values)
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    source: Any = open_source(str(path))
    assert source.classnames == ["cat", "dog"]
    assert column(source) == ([LabelSet((1,)), LabelSet((0, 1))] if listed else [1, 5])
    if not listed:
        assert [(bad.row, bad.reason) for bad in check(source)] == [(1, "class index 5, but there are 2 class names")]


@pytest.mark.parametrize("metadata", [b"[", b'{"info": 3}', b'{"info": {"features": {"label": []}}}', b"[" * 9999])
def test_metadata_of_another_form_is_ignored(tmp_path: Path, metadata: bytes) -> None:
    path = table(tmp_path / "x.parquet", label=[1, 0])
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"huggingface": metadata}), path)
    source: Any = open_source(str(path))
    assert (column(source), source.classnames) == ([1, 0], None)


def vector(values: Any, dtype: str = "int64") -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(values, dtype))
    return out.getvalue()


def test_tars_of_several_classes(tmp_path: Path) -> None:
    members = [
        ("a.npy", vector([0, 1, 1])),
        ("a.png", photo()),
        ("b.png", photo()),
        ("b.cls", b"[2, 0]"),
        ("c.png", photo()),
        ("c.npy", vector([0.5, 0.1], "float32")),  # an embedding
        ("c.txt", b"a caption"),
        ("d.npy", vector([1, 0, 0])),
        ("d.cls", b"2"),
        ("d.png", photo()),
        ("lone.npy", vector([1, 0, 0])),
    ]
    source: Any = open_source(str(write_tar(tmp_path / "0.tar", members)))
    assert labels(source) == {"a": LabelSet((1, 2), 3), "b": LabelSet((0, 2)), "c": None, "d": 2}
    assert source.labels.tolist() == [-1, -1, -1, 2]


def test_arrays_beside_labels_are_groups(tmp_path: Path) -> None:
    """As in DataComp's Dollar Street, GeoDE and FMoW; a json has precedence, an embedding is none."""
    members = [
        (f"{key}.{suffix}", raw)
        for key, array, more in (
            ("a", vector([3, 0]), []),
            ("b", vector([2.0, 0.5], "float32"), []),
            ("c", vector([1, 0]), [("json", b'{"region": "x"}')]),
            ("d", vector([0.5] * 65, "float32"), []),
            ("e", vector([[1]]), []),
        )
        for suffix, raw in [("npy", array), ("cls", b"1"), ("png", photo()), *more]
    ]
    source: Any = open_source(str(write_tar(tmp_path / "0.tar", members)))
    assert [source.record(row).label for row in range(5)] == [1] * 5
    infos = [source.record(row).info for row in range(5)]
    assert infos == [{"npy": [3, 0]}, {"npy": [2, 0.5]}, {"region": "x"}, {}, {}]
    assert [source.captions(row) for row in range(5)] == [[]] * 5


@pytest.mark.parametrize("raw", [b"[1, -2]", b"[1, true]", b'["a"]', b"[" * 9999, b"1 2", b"-1", b"[1e3]", b"[[1]]"])
def test_bad_labels_are_bad_samples(raw: bytes) -> None:
    with pytest.raises(BadSample, match="class"):
        parse_label(raw)


@pytest.mark.parametrize(
    "raw", [vector([[0, 1]]), vector([0, 2]), vector(["a"], "U1"), vector([0, 1])[:-1], vector([0])[:30], b"\x93NUMPY"]
)
def test_other_arrays_are_no_labels(raw: bytes) -> None:
    assert parse_label(raw) is None


def test_an_array_that_needs_unpickling_is_no_label(tmp_path: Path) -> None:
    out = io.BytesIO()
    np.save(out, np.array([{"a": tmp_path}], object), allow_pickle=True)
    assert parse_label(out.getvalue()) is None


class Own:
    """A data set as of torchvision."""

    classes = ("cat", "dog")

    def __init__(self, targets: list[Any]) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[bytes, Any]:
        return photo(row), self.targets[row]


def test_own_data_sets_with_labels() -> None:
    source = MapStyleSource(Own([1, np.int64(0), None, -1, "dog", [0, 1]]))
    assert (source.classnames, source.captions(0)) == (["cat", "dog"], [])
    bad = "class index is not a whole number: "
    assert column(source) == [1, 0, None, f"{bad}'-1'", f"{bad}'dog'", LabelSet((0, 1))]
    named = MapStyleSource(Own([[0], []]), classnames=["x", "y"], templates=["a {c}"])
    assert (column(named), named.classnames, named.templates) == ([LabelSet((0,)), LabelSet(())], ["x", "y"], ["a {c}"])
    assert named.fingerprint != MapStyleSource(Own([[0], [1]])).fingerprint
    captions = MapStyleSource(Own(["a", "b"]))
    assert (captions.classnames, captions.record(0).captions, captions.record(0).label) == (None, ["a"], None)
    with pytest.raises(ValueError, match=re.escape("(image, class index or list of them)")):
        MapStyleSource(Own([1.5]))


def test_tables_in_shards(tmp_path: Path) -> None:
    """As Hugging Face distributes large sets: one class list for all, rows one after another."""
    for shard, values in enumerate(([1, 0], [0], [1, 1, 0])):
        table(tmp_path / f"val-{shard:05}-of-00003.parquet", fine=values)
    pattern = str(tmp_path / "val-{00000..00002}-of-00003.parquet?label=fine")
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    source: Any = open_source(pattern)
    assert (source.name, source.classnames, column(source)) == (pattern, ["cat", "dog"], [1, 0, 0, 1, 1, 0])
    (tmp_path / "classnames.txt").unlink()
    table(tmp_path / "val-00001-of-00003.parquet", fine=["dog"])
    with pytest.raises(ValueError, match=r"its tables name different classes\. Put classnames\.txt"):
        open_source(pattern)
    with pytest.raises(ValueError, match=r"1 of 4 files are missing, the first is .*val-00003"):
        open_source(pattern.replace("00002}", "00003}"))
