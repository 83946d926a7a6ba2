"""What a path, a pattern, a column or an image in memory stands for: which is taken where several are there."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from kiloword.data.images.augmentation import EvalTransform
from kiloword.data.images.inputs import as_list, is_one, prepare
from kiloword.data.open import open_source
from kiloword.data.reading import captions_of, eval_batches, read, read_image
from kiloword.types import BadSample, NoCaption, Record, Skipped
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
    for wrong, output in ((3, "an int"), ([], "no images")):
        with pytest.raises(ValueError, match=output):
            as_list(wrong)  # type: ignore[arg-type]
    for one, output in (
        ({}, "got a dict as image 4"),
        (pixels[..., :2], r"image 4 is a uint8 array \[9, 12, 2\]"),
        (pixels.astype(float), "image 4 is a float64 array"),
        (pixels[:0], r"image 4 is a uint8 array \[0, 12, 3\]"),
        (tensor[:2], r"image 4 is a torch.uint8 tensor \[2, 9, 12\]"),
        (tensor[:, :0], r"image 4 is a torch.uint8 tensor \[3, 0, 12\]"),
        (tensor / 128, "with values from .* expected 0 to 1; the model normalises"),
        (tensor / 0, "with values from"),
    ):
        with pytest.raises(ValueError, match=output):
            prepare([one], transform, 4)


def test_paths_as_images(tmp_path: Path) -> None:
    transform = EvalTransform(8)
    (tmp_path / "a.png").write_bytes(photo())
    assert prepare([str(tmp_path / "a.png"), tmp_path / "a.png"], transform).shape == (2, 3, 8, 8)
    (tmp_path / "b.png").write_bytes(b"text")
    for name, output in (
        ("", "Is a directory"),
        ("none", "image .*none cannot be read: No such file"),
        ("b.png", "image .*b.png cannot be used: not an image"),
    ):
        with pytest.raises(ValueError, match=output):
            prepare([tmp_path / name], transform)


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
    (whole,) = eval_batches(Small(), 4)
    assert (whole.rows, whole.keys[4], len(whole.images)) == ([0, 1, 2, 3, 5, 6], "k5", 6)
    assert (whole.captions[-1], whole.infos[-1]) == ([], {"row": 6})
    assert whole.skipped == [Skipped(4, "row 4", "damaged")]
    with pytest.raises(ValueError, match="batch is 0"):
        eval_batches(Small(), 4, batch=0)
    assert list(captions_of(Small(), 3)) == ["said 0", "said 2"], "every second row of 7, of which one is bad"
    assert list(captions_of(Small(), 7)) == [f"said {n}" for n in (0, 1, 2, 3, 5)]


class Drive(Small):
    """A row is what reading it raises."""

    def __init__(self, *rows: Exception) -> None:
        self.rows, self.asked = rows, 0

    def record(self, row: int) -> Record:
        self.asked += 1
        raise self.rows[row]


def test_a_drive_is_asked_again_and_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    errors = (OSError(errno.ESTALE, "stale"), OSError(errno.ENOENT, "gone"), NoCaption(Record("k", b"", [])))
    source = Drive(*errors, MemoryError("full"))
    for row, said, asked in ((0, "stale", 4), (1, "gone", 5), (2, "no caption", 6)):
        with pytest.raises(BadSample, match=said):
            read(source, row)
        assert source.asked == asked
    assert waits == sorted(waits) != []
    with pytest.raises(MemoryError, match="full"):
        read(source, 3)
    assert read_image(source, 2).key == "k"
