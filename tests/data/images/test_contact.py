"""Contact sheets: what is drawn, and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kiloword.data.images.contact import contact_sheet, draw_tiles
from kiloword.types import BadSample, Record
from tars import encode


def plain(height: int, width: int, level: int = 0) -> np.ndarray:
    return np.full((height, width, 3), (level, 90, 200), np.uint8)


def sheet(shown: list[tuple[Image.Image, str, int]], folder: Path) -> np.ndarray:
    draw_tiles(shown, folder / "sheet.png")
    with Image.open(folder / "sheet.png") as image:
        return np.asarray(image.convert("RGB")).astype(int)


class Sampled:
    """Rows that are read are noted; some are bad."""

    name, fingerprint, classnames = "sampled", "f", ("cat", "dog")

    def __init__(self, rows: int, good: int, captions: tuple[str, ...] = ()) -> None:
        self.rows, self.good, self.captions, self.seen = rows, good, captions, list[int]()

    def __len__(self) -> int:
        return self.rows

    def record(self, row: int) -> Record:
        self.seen.append(row)
        if len(self.seen) > self.good:
            raise BadSample("damaged")
        return Record(str(row), encode(plain(9, 12)), list(self.captions), row % 3)


def test_a_sheet_shows_24_samples_and_tries_ten_times_as_many(tmp_path: Path) -> None:
    for rows, good, read, height in ((1000, 1000, 24, 4 * 296 + 16), (1000, 2, 240, 296 + 16)):
        source, again = Sampled(rows, good), Sampled(rows, good)
        contact_sheet(source, tmp_path / "sheet.png")
        contact_sheet(again, tmp_path / "again.png")
        assert source.seen == again.seen
        assert len(set(source.seen)) == len(source.seen) == read
        assert (tmp_path / "sheet.png").read_bytes() == (tmp_path / "again.png").read_bytes()
        with Image.open(tmp_path / "sheet.png") as image:
            assert image.height == height
    with pytest.raises(ValueError, match="none of the samples"):
        contact_sheet(Sampled(5, 0), tmp_path / "c.png")


def test_class_data_is_shown_with_the_class(tmp_path: Path) -> None:
    for rows, text in ((1, "cat"), (1, "a caption")):
        contact_sheet(Sampled(rows, rows, () if text == "cat" else (text,)), tmp_path / "sheet.png")
        with Image.open(tmp_path / "sheet.png") as found:
            same = sheet([(Image.fromarray(plain(9, 12)), text, 1)], tmp_path)
            assert np.array_equal(np.asarray(found.convert("RGB")), same)
