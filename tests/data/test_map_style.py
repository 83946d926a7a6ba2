"""Training from Python on one's own map-style data set, as the README shows it."""

from __future__ import annotations

from collections.abc import Callable
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


def captions(i: int) -> list[str]:
    return [f"a {WORDS[i % 8]} thing", f"something {WORDS[i // 8]}"]


class Photos:
    """What a user writes: image i and its captions."""

    def __init__(self, count: int = 24, form: Callable[[np.ndarray], Any] = Image.fromarray) -> None:
        self.count, self.form = count, form

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Any, str | list[str]]:
        return self.form(noise(40, 50, i)), captions(i)


def test_every_kind_of_image(tmp_path: Path) -> None:
    path = tmp_path / "3.png"
    path.write_bytes(raw := encode(pixels := noise(40, 50, 3)))
    kinds: list[Any] = [(Image.fromarray(pixels), pixels), (pixels, pixels), (raw, raw), (path, raw), (f"{path}", raw)]
    for image, expected in kinds:
        for texts in ("a thing", ["a thing"]):
            source = MapStyleSource([(image, texts)])
            assert np.array_equal(source.record(0).image, expected)
            assert source.record(0).captions == source.captions(0) == ["a thing"]
    grey: Any = MapStyleSource([(np.full((4, 5), 7, np.uint8), "grey")]).record(0).image
    assert grey.shape == (4, 5, 3)


def test_fingerprint_follows_the_data() -> None:
    forms = ((24, Image.fromarray), (23, Image.fromarray), (24, encode), (24, encode))
    assert len({MapStyleSource(Photos(n, form)).fingerprint for n, form in forms}) == 3
    assert MapStyleSource(Photos(), fingerprint="v2").fingerprint == "v2"


class Holes(Photos):
    """Rows 3 and 23 cannot be read, row 5 has no caption; the first and the last are in the fingerprint."""

    errors: dict[int, Exception] = {3: KeyError("lost"), 4: MemoryError("no room"), 23: BadSample("mine")}  # noqa: RUF012

    def __getitem__(self, i: int) -> tuple[Any, str | list[str]]:
        if i in self.errors:
            raise self.errors[i]
        return ("none.png" if i == 6 else noise(40, 50, i)), [] if i == 5 else captions(i)


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
    run = replace(run, steps=6, batch=8, data=replace(run.data, bad_share=0.17))
    train(run, tmp_path, source=mix([source, source]))
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["skipped"] == 8


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ([], "is empty"),
        ([{"image": 1}], "the columns image"),
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
