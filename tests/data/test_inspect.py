"""`kiloword data index | check | stats`: what is counted, named and drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cases import mostly_slow
from commands import refused
from kiloword.cli.data import draw_examples
from kiloword.cli.main import main as cli
from kiloword.data.images.contact import contact_sheet
from kiloword.data.inspect import main, stats
from kiloword.data.map_style import MapStyleSource
from kiloword.data.open import open_source
from kiloword.data.transforms.mix import cycle
from kiloword.types import BadSample, Record
from tars import encode, noise, pairs, photo, write_tar


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tars: ten good samples, then four bad ones and a good one."""
    bad = {"broken.png": photo()[:60], "broken.txt": b"x", "silent.png": photo(), "zero.png": b"", "zero.txt": b"x"}
    bad |= {"latin.png": photo(), "latin.txt": b"caf\xe9"}
    bad |= {"wide.bmp": encode(noise(10, 30), "JPEG"), "wide.txt": b"image 1\nthree words here"}
    write_tar(tmp_path / "data" / "0.tar", pairs(10))
    write_tar(tmp_path / "data" / "1.tar", bad)
    return tmp_path / "data"


def test_stats_count_what_is_there(folder: Path) -> None:
    found = stats(open_source(str(folder)))
    captions, words, characters, widths, heights = found.measures.values()
    assert (found.rows, len(captions), sum(captions)) == (15, 12, 13)
    assert [s.key for s in found.bad] == ["silent", "zero", "latin"]  # "broken" has a sound header: `check` finds it
    assert words == [2] * 10 + [1] + [2, 3]
    assert characters[-1] == len("three words here")
    assert (widths[-1], heights[-1]) == (30, 10)
    assert found.texts.most_common(1) == [("image 1", 2)]


def test_main_prints_and_returns_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("index", str(folder)) == 0
    assert "15 samples" in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == ["0.tar", "1.tar", "kiloword-index.arrow"]
    assert main("check", str(folder)) == 4
    printed = capsys.readouterr().out
    assert "1 sample skipped, caption is not UTF-8: latin\n" in printed
    assert "4 of 15 samples are bad (26.67%)" in printed
    assert "--bad-share" in printed  # training would stop
    assert main("stats", str(folder), folder / "sheet.png") == 0
    printed = capsys.readouterr().out
    assert "images 12   captions 13   bad 3" in printed
    with Image.open(folder / "sheet.png") as sheet:
        assert sheet.width > 1000


@pytest.mark.parametrize("workers", mostly_slow([0, 2], 0))
def test_more_rows_than_a_worker_takes_at_once(workers: int) -> None:
    bad = (1, 999, 1000, 2500)
    pixels = np.zeros((3, 4, 3), np.uint8)
    found = stats(MapStyleSource([(pixels, "" if row in bad else "x") for row in range(2501)]), workers)
    assert [one.row for one in found.bad] == list(bad)
    assert found.texts == {"x": 2497}


@pytest.fixture
def red_and_blue(tmp_path: Path) -> str:
    members = {}
    for n in range(24):
        pixels = np.full((40, 60, 3), [200, 10, 10] if n % 2 else [10, 10, 200], np.uint8)
        members[f"{n:02}.png"] = encode(pixels)
        members[f"{n:02}.txt"] = b"all red\nvery red" if n % 2 else b"all blue\nvery blue"
    return str(write_tar(tmp_path / "data" / "0.tar", members))


def composed(png: Path) -> int:
    """How many images of a sheet have much red and much blue; they are squares of 180 pixels there."""
    with Image.open(png) as sheet:
        pixels = np.asarray(sheet).astype(int)
    tiles = [pixels[y + 3 : y + 177, x + 3 : x + 177] for y in range(16, 1184, 296) for x in range(16, 1536, 256)]
    return sum(0.2 < (tile[..., 0] > tile[..., 2]).mean() < 0.8 for tile in tiles)


def test_examples_are_those_of_a_run(red_and_blue: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its folder, its config.json and the same flags as defaults; a recipe of a paper has its own image size."""
    run = tmp_path / "run"
    words = f"train clip-c --data {red_and_blue} --size debug --batch 4 --steps 1 --vocab 300 --settings.rho 1"
    cli([*words.split(), "--out", str(run), "--settings.merge", " beside ", "--seed", "3"])
    for name, like in (("folder", run), ("file", run / "config.json")):
        capsys.readouterr()
        cli(["data", "stats", red_and_blue, "--as", str(like), "--png", str(tmp_path / f"{name}.png")])
        assert "at size debug sees them, 24 composed" in capsys.readouterr().out
    assert (tmp_path / "folder.png").read_bytes() == (tmp_path / "file.png").read_bytes()
    assert 0 < composed(tmp_path / "folder.png") < 24  # partners of the own colour are not seen
    assert "24 composed" not in draw_examples(red_and_blue, "clip-c", "debug", tmp_path / "default.png")


def test_pairs_are_rewritten_from_end_to_end(red_and_blue: str, tmp_path: Path) -> None:
    recipe, table = tmp_path / "fixed.toml", tmp_path / "pairs.parquet"
    text = 'method = "clip-c"\nsize = "debug"\nseed = 5\nsettings.partner = "fixed"\nsettings.rho = 1.0\n'
    recipe.write_text(text)
    cli(["data", "pairs", red_and_blue, "--as", str(recipe), "--out", str(table)])
    found, source = pq.read_table(table), open_source(red_and_blue)
    assert found.to_pylist() == [
        {"key": f"{row:02}", "partner": f"{other:02}", "caption": f"{first} and {second}"}
        for row, other in enumerate(cycle(5, 24))
        for first, second in zip(source.record(row).captions, source.record(int(other)).captions, strict=True)
    ]
    recipe.write_text(f'{text}settings.rewrites = "{table}"\n')
    assert "24 composed" in draw_examples(red_and_blue, str(recipe), "debug", tmp_path / "b.png")


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("stats scenes?n=4 --as clip", "data stats SRC --as METHOD --png FILE"),
        ("stats scenes?n=4 --as . --png a", "config.json"),
        ("pairs scenes?n=4", "data pairs SRC --as RUN --out"),
        ("stats scenes?n=4 --out a", "--out"),
        ("pairs scenes?n=4 --as clip-c --out a", "new ones in each epoch"),
        ("pairs scenes?n=4 --as clip --out a", "no pairs"),
    ],
)
def test_words_that_are_refused(
    words: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output in refused(capsys, "data", *words.split())
    assert not Path("a").exists()


# Contact sheets


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
        return Record(str(row), encode(noise(9, 12)), list(self.captions), row % 3)


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
    contact_sheet(Sampled(1, 1), tmp_path / "class.png")
    contact_sheet(Sampled(1, 1, ("cat",)), tmp_path / "caption.png")
    assert (tmp_path / "class.png").read_bytes() == (tmp_path / "caption.png").read_bytes()
