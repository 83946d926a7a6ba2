"""Sheets of images and the printed statistics of a data set, place by place and line by line."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from kiloword.data.images.contact import _wrap, contact_sheet, draw_tiles
from kiloword.data.inspect import Stats, print_bad, print_stats
from kiloword.types import BadSample, Record, Skipped
from tars import encode

FONT = ImageFont.load_default(13)


def plain(height: int, width: int, level: int = 0) -> np.ndarray:
    return np.full((height, width, 3), (level, 90, 200), np.uint8)


def sheet(shown: list[tuple[Image.Image, str, int]], folder: Path) -> np.ndarray:
    draw_tiles(shown, folder / "sheet.png")
    with Image.open(folder / "sheet.png") as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (6, 1), (7, 2), (13, 3)])
def test_tiles_stand_in_rows_of_six(tmp_path: Path, count: int, rows: int) -> None:
    """Tiles of 240 x 280 pixels, 16 apart; an image is as large as fits 240 x 180, with an edge around it."""
    levels = [10 * n for n in range(count)]
    pixels = sheet([(Image.fromarray(plain(18, 24, level)), "", 1) for level in levels], tmp_path)
    assert pixels.shape == (16 + 296 * rows, 16 + 256 * 6, 3)
    for place, level in enumerate(levels):
        top, left = 16 + 296 * (place // 6), 16 + 256 * (place % 6)
        assert (pixels[top : top + 180, left : left + 240] == (level, 90, 200)).all()
        for y, x in ((top - 1, left - 1), (top + 180, left + 240), (top - 1, left + 240), (top + 180, left - 1)):
            assert pixels[y, x].tolist() == [215] * 3
            assert pixels[y + (1 if y > top else -1), x].tolist() == [255] * 3
    drawn = (pixels != 255).any(-1).sum()
    assert drawn == count * 242 * 182


@pytest.mark.parametrize(("height", "width", "size"), [(90, 30, (180, 60)), (10, 240, (10, 240)), (1, 900, (1, 240))])
def test_images_keep_their_shape(tmp_path: Path, height: int, width: int, size: tuple[int, int]) -> None:
    pixels = sheet([(Image.fromarray(plain(height, width)), "", 1)], tmp_path)
    blue = (pixels == (0, 90, 200)).all(-1)
    assert np.argwhere(blue).min(0).tolist() == [16, 16]
    assert (np.argwhere(blue).max(0) - 15).tolist() == list(size)


def test_captions_stand_below_and_what_is_not_shown_is_counted(tmp_path: Path) -> None:
    """Lines of 17 pixels from 6 below; the number of further captions in grey behind the last one."""
    image = Image.fromarray(plain(18, 24))
    one, three = (sheet([(image, "HHH", n)], tmp_path)[16 + 180 + 2 :] for n in (1, 3))
    inked = [np.flatnonzero((part < 100).all(-1).any(1)) for part in (one, three)]
    assert inked[0].tolist() == inked[1].tolist()
    assert 4 <= inked[0].min() < inked[0].max() < 4 + 17
    assert (one[4 + 17 :] == 255).all()
    grey = np.flatnonzero((three != 255).any(-1).any(1))
    assert 4 + 17 < grey[grey > 4 + 17].min() < grey.max() < 4 + 2 * 17 + 4
    assert three[4 + 17 :].min() >= 120, "it is not as dark as a caption"
    long = " ".join(["word"] * 200)
    lines = [_lines(sheet([(image, long, n)], tmp_path)[16 + 180 + 2 :]) for n in (1, 2)]
    assert lines == [5, 5], "five lines, the number among them"


def _lines(below: np.ndarray) -> int:
    rows = (below != 255).any(-1).any(1)
    return int((np.diff(rows.astype(int), prepend=0) == 1).sum())


def test_words_wrap_where_the_tile_ends() -> None:
    text = "the quick brown fox jumps over the lazy dog and runs away from it as fast as it can"
    words = text.split()
    wrapped = _wrap(text, FONT, 5)
    assert " ".join(wrapped).split() == words
    assert len(wrapped) > 1
    for line, following in itertools.pairwise(wrapped):
        assert FONT.getlength(line) <= 240 < FONT.getlength(f"{line} {following.split()[0]}")
    cut = _wrap(text, FONT, 2)
    assert cut == [wrapped[0], wrapped[1][:-3] + "..."]
    assert _wrap("", FONT, 3) == [""]
    assert _wrap("two  words", FONT, 1) == ["two words"]
    (broken,) = _wrap("m" * 300, FONT, 1)
    assert FONT.getlength(broken) <= 240 < FONT.getlength(broken + "m")
    assert len("".join(_wrap("a " * 300, FONT, 99)).replace(" ", "")) == 200, "of 400 characters"


class Sampled:
    """Rows that are read are noted; some are bad."""

    name, fingerprint, classnames = "sampled", "f", ("cat", "dog")

    def __init__(self, rows: int, good: int) -> None:
        self.rows, self.good, self.seen = rows, good, list[int]()

    def __len__(self) -> int:
        return self.rows

    def record(self, row: int) -> Record:
        self.seen.append(row)
        if len(self.seen) > self.good:
            raise BadSample("damaged")
        return Record(str(row), encode(plain(9, 12, row % 250)), [], row % 3)


def test_a_sheet_shows_24_samples_and_tries_ten_times_as_many(tmp_path: Path) -> None:
    enough, few, small = Sampled(1000, 1000), Sampled(1000, 2), Sampled(5, 5)
    for source, read, height in ((enough, 24, 4 * 296 + 16), (few, 240, 296 + 16), (small, 5, 296 + 16)):
        contact_sheet(source, tmp_path / "sheet.png")
        assert len(set(source.seen)) == len(source.seen) == read
        with Image.open(tmp_path / "sheet.png") as image:
            assert image.height == height
    assert enough.seen[:3] != [0, 1, 2]
    again = Sampled(1000, 1000)
    contact_sheet(again, tmp_path / "again.png")
    assert again.seen == enough.seen


def test_class_data_is_shown_with_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "kiloword.data.images.contact.draw_tiles", lambda shown, path: said.extend(text for _, text, _ in shown)
    )
    source = Sampled(5, 5)
    contact_sheet(source, tmp_path / "sheet.png")
    names = {0: "cat", 1: "dog", 2: "class 2"}
    assert said == [names[row % 3] for row in source.seen]


def test_statistics_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = Stats(9, [Skipped(3, "c", "damaged")])
    for row, captions in enumerate((["a dog", "a dog runs"], ["a dog"], ["x" * 120], ["x" * 120, "x" * 120])):
        found.add(Record(str(row), b"", captions, row % 3), (10 * row + 20, 30))
    print_stats(found, ["cat", "dog"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "images 4   captions 6   bad 1"
    assert [line.split() for line in lines[1:7]] == [
        ["least", "5%", "median", "95%", "most", "mean"],
        *(line.split() for line in STATISTICS),
    ]
    assert lines[7:] == [
        "class 0 cat: 2",
        "class 1 dog: 1",
        "class 2 : 1",
        "captions that repeat an earlier one: 3 (50.00%)",
        f"    3 x {'x' * 100}",
        "    2 x a dog",
        "1 sample skipped, damaged: c",
        "1 of 9 samples are bad (11.11%)",
        "Only headers of images were read: `kiloword data check` decodes them, and names those that are cut.",
    ]


STATISTICS = (
    "captions per image 1 1 2 2 2 1.5",
    "words per caption 1 1 2 3 3 1.7",
    "characters per caption 5 5 65 120 120 63.3",
    "image width 20 22 35 48 50 35.0",
    "image height 30 30 30 30 30 30.0",
)


def test_bad_samples_by_reason_the_most_frequent_first(capsys: pytest.CaptureFixture[str]) -> None:
    bad = [Skipped(row, f"k{row}", "rare" if row == 4 else "often") for row in range(22)]
    print_bad(bad, 88)
    print_bad([], 3)
    named = [f"k{row}" for row in range(22) if row != 4]
    assert capsys.readouterr().out.splitlines() == [
        f"21 samples skipped, often: {', '.join(named[:20])} and 1 more",
        "1 sample skipped, rare: k4",
        "22 of 88 samples are bad (25.00%)",
        "all samples are good",
    ]
    assert Stats(0).duplicates() == []
