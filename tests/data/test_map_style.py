"""Training from Python on one's own map-style data set, as the README shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kiloword.data.edits import mix
from kiloword.data.map_style import MapStyleSource
from kiloword.methods.defaults import default_recipe
from kiloword.training.log import read_metrics
from kiloword.training.loop import train
from kiloword.types import BadSample, LabelSet
from tars import encode, noise

WORDS = ["red", "green", "blue", "grey", "dark", "pale", "warm", "cold"]


class Photos:
    """What a user writes: image i and its captions."""

    def __init__(self, kind: str = "pillow", count: int = 24, folder: Path | None = None) -> None:
        self.kind, self.count, self.folder = kind, count, folder

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Any, str | list[str]]:
        pixels = noise(40, 50, i)
        captions = [f"a {WORDS[i % 8]} thing", f"something {WORDS[i // 8]}"]
        if self.kind == "pillow":
            return Image.fromarray(pixels), captions
        if self.kind == "array":
            return pixels, captions[0]
        raw = encode(pixels)
        if self.kind == "bytes":
            return raw, captions
        assert self.folder is not None
        path = self.folder / f"{i}.png"
        path.write_bytes(raw)
        return (path if self.kind == "path" else str(path)), captions


@pytest.mark.parametrize("kind", ["pillow", "array", "bytes", "path", "string"])
def test_every_kind_of_image(kind: str, tmp_path: Path) -> None:
    source = MapStyleSource(Photos(kind, folder=tmp_path))
    record = source.record(3)
    pixels = record.image if isinstance(record.image, np.ndarray) else noise(40, 50, 3)
    assert (pixels == noise(40, 50, 3)).all()
    assert isinstance(record.image, bytes) == (kind in ("bytes", "path", "string"))
    assert record.captions[0] == "a grey thing" == source.captions(3)[0]


def test_grey_arrays_become_rgb() -> None:
    grey = MapStyleSource([(np.full((4, 5), 7, np.uint8), "grey")]).record(0).image
    assert isinstance(grey, np.ndarray)
    assert grey.shape == (4, 5, 3)


def test_fingerprint_follows_the_data() -> None:
    assert MapStyleSource(Photos()).fingerprint == MapStyleSource(Photos()).fingerprint
    kinds = (("pillow", 24), ("pillow", 23), ("array", 24))
    assert len({MapStyleSource(Photos(kind, n)).fingerprint for kind, n in kinds}) == 3
    assert MapStyleSource(Photos(), fingerprint="v2").fingerprint == "v2"


class Holes(Photos):
    """Rows 3 and 23 cannot be read, row 5 has no caption; the first and the last are in the fingerprint."""

    errors: dict[int, Exception] = {3: KeyError("lost"), 4: MemoryError("no room"), 23: BadSample("mine")}  # noqa: RUF012

    def __getitem__(self, i: int) -> tuple[Any, str | list[str]]:
        if i in self.errors:
            raise self.errors[i]
        image, captions = super().__getitem__(i)
        return ("none.png" if i == 6 else image), [] if i == 5 else captions


def test_rows_that_raise_are_bad_samples(tmp_path: Path) -> None:
    """While the tokenizer is trained, and in the fingerprint, too; but memory that is full ends the run."""
    source = MapStyleSource(Holes())
    for row, said in ((3, "lost"), (5, "no caption"), (6, "No such file"), (23, "mine")):
        with pytest.raises(BadSample, match=said):
            source.record(row)
    with pytest.raises(MemoryError, match="no room"):
        source.record(4)
    Holes.errors.pop(4)
    run = default_recipe("siglip", "debug", data=("own",))
    train(replace(run, steps=3, batch=8, data=replace(run.data, bad_share=0.2)), tmp_path, source=source)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["skipped"] == 4
    twice = replace(run, steps=6, batch=8, data=replace(run.data, bad_share=0.17))
    train(twice, tmp_path / "twice", source=mix([source, source]))
    assert read_metrics(tmp_path / "twice" / "metrics.jsonl")[-1]["skipped"] == 8


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ([], "is empty"),
        ([{"image": 1}], "is a dict"),
        ([(noise(4, 4), "x", 3)], "no pair"),
        ([(None, "x")], "NoneType"),
        ([(noise(4, 4), 7.5)], "float"),
    ],
)
def test_another_form_is_refused(dataset: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MapStyleSource(dataset)


class Own:
    """A data set as of torchvision."""

    classes = ("cat", "dog")

    def __init__(self, targets: list[Any]) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[bytes, Any]:
        return encode(noise(4, 4, row)), self.targets[row]


def test_own_data_sets_with_labels() -> None:
    source = MapStyleSource(Own([1, np.int64(0), None, -1, "dog", [0, 1]]))
    assert (source.classnames, source.captions(0)) == (["cat", "dog"], [])
    assert [source.record(row).label for row in (0, 1, 2, 5)] == [1, 0, None, LabelSet((0, 1))]
    for row in (3, 4):
        with pytest.raises(BadSample):
            source.record(row)
    named = MapStyleSource(Own([[0], []]), classnames=["x", "y"], templates=["a {c}"])
    assert (named.record(1).label, named.classnames, named.templates) == (LabelSet(()), ["x", "y"], ["a {c}"])
    assert named.fingerprint != MapStyleSource(Own([[0], [1]])).fingerprint
    captions = MapStyleSource(Own(["a", "b"]))
    assert (captions.classnames, captions.record(0).captions, captions.record(0).label) == (None, ["a"], None)
    with pytest.raises(ValueError, match="class index or"):
        MapStyleSource(Own([1.5]))
