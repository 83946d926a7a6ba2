"""Feature stores and embedded tables as files: damage that is no flipped byte, and what stays unwritten."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from kiloword.data.feature_store import INDEX, FeatureStore, StorePart, TableFile
from kiloword.data.parts import checksum, part_path
from kiloword.data.transforms.partner import similar
from kiloword.features.extract import FeatureWriter
from kiloword.features.tables import Rows
from kiloword.types import BadSample, Example, Record, Skipped


def about(**changes: Any) -> TableFile:
    given = {
        "name": "teacher", "dim": 2, "teacher": "t", "teacher_fingerprint": "tf", "precision": "fp32", "dtype": "fp32",
        "data": "d", "fingerprint": "f", "contents": ("f images", "f captions"), "rows": 5, "part": 2,
    }  # fmt: skip
    return TableFile(**given | changes)  # type: ignore[arg-type]


def rows(of: Iterable[int], captions: int = 2, skipped: Sequence[Skipped] = (), dtype: Any = np.float32) -> Rows:
    """Row n has the features (n, 1) and captions (n, 2), (n, 3); its content is 16 times n."""
    columns = [
        [f"k{row}".encode() for row in of],
        [bytes([row] * 16) for row in of],
        [np.array([row, 1], dtype) for row in of],
        [[f"{row} {n}".encode() for n in range(captions)] for row in of],
        [[np.array([row, 2 + n], dtype) for n in range(captions)] for row in of],
    ]
    schema = about(dtype="fp16" if dtype is np.float16 else "fp32").schema()
    arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
    return Rows(pa.RecordBatch.from_arrays(arrays, schema=schema), list(skipped))


def store(folder: Path, **changes: Any) -> FeatureStore:
    writer = FeatureWriter(folder, about(**changes))
    for number in writer.missing:
        writer.write(number, [rows(writer.rows_of(number))])
    return writer.finish()


def test_parts_hold_their_rows_and_the_last_one_the_rest(tmp_path: Path) -> None:
    table = store(tmp_path / "t")
    assert (len(table), table.file.parts, table.keys) == (5, 3, ["k0", "k1", "k2", "k3", "k4"])
    assert table.images().tolist() == [[row, 1] for row in range(5)]
    assert table.texts().tolist() == [[row, 2 + n] for row in range(5) for n in range(2)]
    assert table.text_means().tolist() == [[row, 2.5] for row in range(5)]
    assert table.starts.tolist() == [0, 2, 4, 6, 8, 10]
    assert table.captions[3:5] == ["1 1", "2 0"]
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "index.npy", "part-00000.arrow", "part-00001.arrow", "part-00002.arrow", "table.json",
    ]  # fmt: skip
    example = Example("k3", 3, torch.zeros(3, 1, 1), ["3 1", "unknown", "3 0"])
    table.join(example)
    assert example.image_features["teacher"].tolist() == [3, 1]
    assert example.text_features["teacher"].tolist() == [[3, 3], [0, 0], [3, 2]]
    assert example.image_features["teacher.texts"].tolist() == pytest.approx([2, 5 / 3])


def test_a_part_says_what_was_skipped_and_a_writer_goes_on(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, about())
    bad = [Skipped(1, "k1", "damaged")]
    writer.write(0, [rows([0], skipped=bad)])
    assert writer.skipped == bad
    assert not (tmp_path / INDEX).exists()
    again = FeatureWriter(tmp_path, about())
    assert (again.missing, again.skipped, again.repeated) == ([1, 2], bad, 0)
    again.write(1, [rows([3, 0])])
    assert (again.part(1).batch.num_rows, again.repeated) == (1, 1)
    again = FeatureWriter(tmp_path, about())
    assert (again.missing, again.repeated) == ([2], 1)
    with pytest.raises(ValueError, match=r"is not finished\. Run the same `kiloword embed`"):
        FeatureStore(tmp_path)
    for name, value, said in (
        ("teacher_fingerprint", "other", r"holds other features: teacher t \(tf\) there, teacher t \(other\) here"),
        ("contents", ("g images",), r"data d \(f\) there, data d \(f\) here"),
        ("name", "n", "name teacher there, name n here"),
        ("dim", 3, "dim 2 there, dim 3 here"),
        ("precision", "bf16", "precision fp32 there, precision bf16 here"),
        ("dtype", "fp16", "dtype fp32 there, dtype fp16 here"),
    ):
        with pytest.raises(ValueError, match=said):
            FeatureWriter(tmp_path, about(**{name: value}))
    assert FeatureWriter(tmp_path, about(part=4)).file.part == 2, "goes on with the parts that are there"


def test_no_features_are_no_table(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, about(rows=2))
    writer.write(0, [rows([], skipped=[Skipped(0, "k", "first"), Skipped(1, "k", "second")])])
    with pytest.raises(ValueError, match=r"d: none of its 2 rows is a usable image: .*first: k"):
        writer.finish()
    writer.skipped.clear()
    with pytest.raises(ValueError, match=r"is a usable image\.$"):
        writer.finish()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="exists and holds no features: choose another --out"):
        FeatureWriter(tmp_path / "other", about())


def test_images_without_captions_have_no_mean(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, about(rows=2, dtype="fp16"))
    writer.write(0, [rows(range(2), captions=0, dtype=np.float16)])
    table = writer.finish()
    assert table.text_means().tolist() == [[0, 0], [0, 0]]
    assert (table.images().dtype, table.texts().shape) == (np.float16, (0, 2))


def written(path: Path, change: Any) -> None:
    """A part whose batch and meta data are changed; the checksum fits."""
    with pa.ipc.open_file(pa.OSFile(str(path))) as reader:
        batch, meta = reader.get_batch(0), json.loads(reader.schema.metadata[b"kiloword"])
    batch = change(batch, meta)
    meta.setdefault("crc", checksum(batch.columns))
    schema = batch.schema.with_metadata({b"kiloword": json.dumps(meta)})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


def test_parts_that_are_none(tmp_path: Path) -> None:
    table = store(tmp_path / "t")
    path, schema = part_path(tmp_path / "t", 0), table.file.schema()
    whole = path.read_bytes()
    for change, said in (
        (lambda batch, meta: batch.rename_columns([*"abcde"]), "has other columns than its table.json"),
        (lambda batch, meta: (meta.pop("table"), batch)[1], "is damaged"),
        (lambda batch, meta: (meta.pop("skipped"), batch)[1], "is damaged"),
    ):
        written(path, change)
        with pytest.raises(ValueError, match=said):
            StorePart(path, schema)
    path.unlink()
    with pytest.raises(ValueError, match="is missing"):
        StorePart(path, schema)
    path.mkdir()
    with pytest.raises(ValueError, match="is damaged"):
        StorePart(path, schema)
    path.rmdir()
    path.write_bytes(whole)
    assert StorePart(path, schema).whole()
    written(path, lambda batch, meta: (meta.update(crc=meta["crc"] + 1), batch)[1])
    assert not StorePart(path, schema).whole()
    again = FeatureStore(tmp_path / "t")
    with pytest.raises(ValueError, match=r"part-00000\.arrow is damaged"):
        again.images()


def test_indexes_that_are_none(tmp_path: Path) -> None:
    store(tmp_path / "t")
    index = tmp_path / "t" / INDEX
    good = np.load(index)
    for wrong in (good.astype(np.int64), good[0], good[:1], good[None]):
        np.save(index, wrong)
        with pytest.raises(ValueError, match=r"index\.npy is not an index of a feature store\. Remove that file"):
            FeatureStore(tmp_path / "t")
    for raw in (b"", b"no array"):
        index.write_bytes(raw)
        with pytest.raises(ValueError, match=r"index\.npy is damaged\. Remove that file"):
            FeatureStore(tmp_path / "t")


@pytest.mark.parametrize("where", ["image", "texts"])
def test_features_that_are_nan_are_named(tmp_path: Path, where: str) -> None:
    writer = FeatureWriter(tmp_path, about(rows=2))
    part = rows(range(2))
    field = part.batch.schema.get_field_index(where)
    values = part.batch.column(where).to_pylist()
    (values[1] if where == "image" else values[1][0])[0] = math.nan
    kind = part.batch.schema.field(field)
    part.batch = part.batch.set_column(field, kind, pa.array(values, kind.type))
    writer.write(0, [part])
    table = writer.finish()
    table.join(Example("k0", 0, torch.zeros(3, 1, 1), ["0 0"]))
    with pytest.raises(ValueError, match="has NaN or infinite features of k1"):
        table.join(Example("k1", 1, torch.zeros(3, 1, 1), ["1 0"]))
    with pytest.raises(ValueError, match="has features that are NaN or infinite"):
        table.images()


class Keys:
    """Rows k0 to k4, of which some are bad."""

    name, fingerprint = "keys", "f"

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 5

    def record(self, row: int) -> Record:
        if row in self.bad:
            raise BadSample("damaged")
        return Record(f"k{row}", np.zeros((2, 2, 3), np.uint8), ["x"])


def test_nearest_and_farthest_are_of_other_samples(tmp_path: Path) -> None:
    """Means (n, 2.5): their angles are in order."""
    table = store(tmp_path / "t")
    assert similar(Keys(), table, farthest=False).tolist() == [1, 2, 3, 4, 3]
    assert similar(Keys(), table, farthest=True).tolist() == [4, 4, 0, 0, 0]
    assert similar(Keys(bad=(1,)), table, farthest=False).tolist() == [2, -1, 3, 4, 3]
    with pytest.raises(ValueError, match="keys has one sample with an embedding"):
        similar(Keys(bad=(0, 1, 2, 3)), table, farthest=False)
    other = store(tmp_path / "u", rows=4)
    with pytest.raises(ValueError, match="the partner table has no entry for 'k4' of keys"):
        similar(Keys(), other, farthest=False)
    assert similar(Keys(bad=(4,)), other, farthest=True).tolist() == [3, 3, 0, 0, -1]
