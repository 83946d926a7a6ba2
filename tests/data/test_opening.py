"""What a path, a pattern, a column or an image in memory stands for: which is taken where several are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from kiloword.data import inspect
from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.inputs import as_list, is_one, kind, prepare
from kiloword.data.inspect import check
from kiloword.data.open import open_source
from kiloword.data.reading import BadRows, captions_of, eval_batches, left_out
from kiloword.data.sample import check_regular, parse_label, read_whole
from kiloword.data.scenes import parse, render
from kiloword.data.source import majority
from kiloword.data.transforms.mix import halves
from kiloword.types import BadSample, Record, Skipped
from tars import noise, pairs, photo, write_tar


def test_a_file_named_scenes_goes_before_the_drawn_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(open_source("scenes?n=3", 32)) == 3
    assert open_source("scenes:val?n=3", 32).record(0).image.shape == (32, 32, 3)  # type: ignore[union-attr]
    write_tar(tmp_path / "scenes" / "0.tar", pairs(2))
    assert len(open_source("scenes")) == 2
    with pytest.raises(ValueError, match="no such file"):
        open_source("scenesque")


def test_images_in_memory() -> None:
    pixels = noise(9, 12)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    given = [Image.fromarray(pixels), pixels, tensor, tensor.float() / 255, tensor.double() / 255]
    transform = EvalTransform(8)
    prepared = prepare(given, transform)
    assert prepared.shape == (5, 3, 8, 8)
    assert all(torch.equal(one, prepared[0]) for one in prepared)
    ready = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    assert prepare(ready, transform) is ready
    assert [is_one(one) for one in (*given, "x", Path("x"), given, ready, pixels[None])] == [True] * 7 + [False] * 3
    assert (as_list(pixels)[0] is pixels, len(as_list(ready)), as_list(given) is given) == (True, 2, True)
    for wrong, output in (
        (3, "got an int as images: expected"),
        ([], "got no images: expected at least one"),
    ):
        with pytest.raises(ValueError, match=output):
            as_list(wrong)  # type: ignore[arg-type]
    for one, output in (
        ({}, "got a dict as image 4"),
        (pixels[..., :2], r"image 4 is a uint8 array \[9, 12, 2\]"),
        (pixels[0], "image 4 is a uint8 array"),
        (pixels.astype(float), "image 4 is a float64 array"),
        (pixels[:0], r"image 4 is a uint8 array \[0, 12, 3\]"),
        (tensor[:2], r"image 4 is a torch.uint8 tensor \[2, 9, 12\]"),
        (tensor.int(), "image 4 is a torch.int32 tensor"),
        (tensor[:, :0], r"image 4 is a torch.uint8 tensor \[3, 0, 12\]"),
        (tensor / 128, "with values from .* expected 0 to 1; the model normalises"),
        (tensor / 255 - 0.5, "with values from -0.5 to"),
        (tensor / 0, "with values from"),
    ):
        with pytest.raises(ValueError, match=output):
            prepare([one], transform, 4)
    assert [kind(value) for value in ([], 3, b"")] == ["a list", "an int", "a bytes"]


def test_paths_as_images(tmp_path: Path) -> None:
    transform = EvalTransform(8)
    (tmp_path / "a.png").write_bytes(photo())
    assert prepare([str(tmp_path / "a.png"), tmp_path / "a.png"], transform).shape == (2, 3, 8, 8)
    (tmp_path / "b.png").write_bytes(b"text")
    for name, output in (
        ("", "is a folder: expected an image file"),
        ("none", "image .*none cannot be read: No such file"),
        ("b.png", "image .*b.png cannot be used: not an image"),
    ):
        with pytest.raises(ValueError, match=output):
            prepare([tmp_path / name], transform)
    assert read_whole(tmp_path / "b.png", "it", 4) == b"text"
    with pytest.raises(BadSample, match="it has 4 bytes, more than 3"):
        read_whole(tmp_path / "b.png", "it", 3)
    check_regular(tmp_path / "none")
    with pytest.raises(ValueError, match="is no regular file"):
        check_regular(tmp_path)
    assert [parse_label(cls) for cls in (None, b"0", b" 12\n", b"9" * 18)] == [None, 0, 12, 10**18 - 1]
    for wrong in (b"", b"-1", b"1.0", b"9" * 19):
        with pytest.raises(BadSample, match="class index is not a whole number"):
            parse_label(wrong)


class Small:
    """Rows that are read one by one; some have a label, some are bad."""

    name, fingerprint = "small", "f"

    def __len__(self) -> int:
        return 7

    def record(self, row: int) -> Record:
        if row == 4:
            raise BadSample("damaged")
        return Record(
            f"k{row}", noise(8, 8, row), [f"said {row}"] * (row != 6), row if row == 2 else None, {"row": row}
        )


def test_evaluation_in_parts() -> None:
    batches = list(eval_batches(Small(), 4, batch=2, parts=[range(1, 4), range(5, 5), range(3, 7, 2)]))
    assert [batch.rows for batch in batches] == [[1, 2], [3], [3, 5]]
    assert [None if b.labels is None else b.labels.tolist() for b in batches] == [[-1, 2], None, None]
    whole = list(eval_batches(Small(), 4))
    assert [(b.rows, b.keys, len(b.images)) for b in whole] == [
        ([0, 1, 2, 3, 5, 6], [f"k{n}" for n in (0, 1, 2, 3, 5, 6)], 6)
    ]
    assert (whole[0].captions[-1], whole[0].infos[-1]) == ([], {"row": 6})
    assert whole[0].skipped == [Skipped(4, "row 4", "damaged")]
    (bad,) = eval_batches(Small(), 4, parts=[range(4, 5)])
    assert (bad.rows, bad.images.shape, bad.labels) == ([], (0, 3, 4, 4), None)
    assert list(captions_of(Small(), 3)) == ["said 0", "said 2"], "every second row of 7, of which one is bad"
    assert list(captions_of(Small(), 7)) == [f"said {n}" for n in (0, 1, 2, 3, 5)]


def test_looking_at_a_data_set_in_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inspect, "_CHUNK", 3)
    assert check(Small()) == [Skipped(4, "row 4", "damaged")]
    found = inspect.stats(Small(), 1)
    assert (found.rows, found.measures["captions per image"], found.labels, len(found.bad)) == (
        7,
        [1] * 5 + [0],
        {2: 1},
        1,
    )


def test_bad_rows_are_counted_up_to_their_share() -> None:
    bad = BadRows(10, 0.3)
    some = [Skipped(row, f"k{row}", "often" if row else "rare") for row in range(4)]
    assert bad.count(some[:2]) == some[:2]
    assert bad.count(some[1:3]) == some[2:3]
    assert len(bad) == 3
    again = BadRows(10, 0.3)
    again.load_state_dict(json.loads(json.dumps(bad.state_dict())))
    with pytest.raises(
        ValueError,
        match=r"4 of the data set's 10 rows are bad, more than the allowed 30\.00%: 3 .*, often: k1",
    ):
        again.count(some)
    many = [Skipped(n, f"k{n}", reason) for n, reason in enumerate("aabbbcdddd")]
    assert [part.split(", ")[1] for part in str(left_out(many)).split("; ")] == ["d: k6", "b: k2", "a: k0"]
    assert majority([("x", "b"), ("x", "a"), ("y", "c"), (None, "c")]) == {"x": "a", "y": "c", None: "c"}


class Many(Small):
    """130 rows, none of them bad."""

    def __len__(self) -> int:
        return 130

    def record(self, row: int) -> Record:
        return Record(f"k{row}", noise(4, 4, row), [f"said {row // 2}"])


def test_what_is_taken_by_default() -> None:
    """64 images a batch of evaluation, 10 captions that repeat, the plainest way to say a query."""
    batches = list(eval_batches(Many(), 4))
    assert [len(batch.rows) for batch in batches] == [64, 64, 2]
    found = inspect.stats(Many(), 0)
    assert found.texts.most_common(99)[-1][1] == 2
    query = parse("a small red star")
    assert query is not None
    assert render(query) == render(query, 0) != render(query, 1)
    with pytest.raises(ValueError, match="got a dict as image 0"):
        prepare([{}], EvalTransform(4))
    first, second = (torch.full((3, 4, 4), level, dtype=torch.uint8) for level in (0, 9))
    first[:, :, :1] = 5
    assert halves(first, second, side_by_side=True)[0, 0].tolist() == [0, 0, 9, 9], "centres, not squeezed"
