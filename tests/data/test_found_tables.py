"""Columns, separators and folders of images that are found without being named."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from kiloword.data.open import open_source


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "pics").mkdir()
    for n in range(3):
        Image.new("RGB", (8, 8), (90 * n, 0, 0)).save(tmp_path / "pics" / f"{n}.png")
    return tmp_path


def rows(*cells: str, mark: str = ",") -> str:
    return "\n".join(cell.replace("|", mark) for cell in cells) + "\n"


@pytest.mark.parametrize(
    "table",
    [
        rows("image|caption", "0.png|a dog", "1.png|a cat", "2.png|a cow"),
        rows("Datei|Text|Jahr", "0.png|a dog|2020", "1.png|a cat|2020", "2.png|a cow|2020", mark=";"),
        rows("url|name|words", *(f"http://x/{n}.png|{n}.png|a {one}" for n, one in enumerate(("dog", "cat", "cow")))),
        rows("file|species|words", *(f"{n}.png|dog|a {one}" for n, one in enumerate(("dog", "cat", "cow")))),
    ],
)
@pytest.mark.parametrize("name", ["captions.txt", "table.csv"])
def test_a_table_beside_a_folder_of_images_needs_no_parameters(photos: Path, table: str, name: str) -> None:
    (photos / name).write_text(table)
    for src in (photos / name, photos):  # the table, and the folder that holds no other one
        source = open_source(str(src))
        found = [source.record(row) for row in range(len(source))]
        assert [(one.key, one.captions) for one in found] == [("0", ["a dog"]), ("1", ["a cat"]), ("2", ["a cow"])]


def test_images_and_their_table_in_one_folder(photos: Path) -> None:
    (photos / "pics" / "words.csv").write_text(rows("image|caption", "0.png|a dog", "1.png|a cat"))
    source = open_source(str(photos / "pics"))
    assert [source.record(row).captions for row in range(len(source))] == [["a dog"], ["a cat"]]
    assert "2.png" in " ".join(source.notes)  # the image that the table does not name


def test_an_empty_caption_beside_others_is_counted(photos: Path) -> None:
    (photos / "t.csv").write_text(rows("image|caption", "0.png|a dog", "0.png|", "1.png|a cat", "2.png|"))
    source = open_source(str(photos / "t.csv"))
    assert source.record(0).captions == ["a dog"]
    # 2.png has no caption at all: a bad sample
    assert [note for note in source.notes if "empty caption, but the image has others: 0" in note]


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        (rows("file|plain|about", *(f"{n}.png|a dog {n}|a pet {n}" for n in range(3))), ["image=file", "plain,about"]),
        (rows("file|twin|about", *(f"{n}.png|{n}.png|a pet {n}" for n in range(3))), ["caption=about"]),
        (rows("file|kind", *(f"{n}.png|dog" for n in range(3))), ["image=file"]),
    ],
)
def test_what_is_not_sure_is_refused_with_the_parameters(photos: Path, cells: str, named: list[str]) -> None:
    (photos / "table.csv").write_text(cells)
    with pytest.raises(ValueError) as error:
        open_source(str(photos / "table.csv"))
    assert all(one in str(error.value) for one in named)


def test_two_tables_or_texts_beside_images_leave_the_choice_to_the_user(photos: Path) -> None:
    table = rows("image|caption", "0.png|a dog")
    for name in ("a.csv", "b.csv"):
        (photos / name).write_text(table)
    with pytest.raises(ValueError, match=r"a\.csv, b\.csv"):
        open_source(str(photos))
    (photos / "pics" / "a.csv").write_text(table)
    (photos / "pics" / "0.txt").write_text("a wolf")
    assert open_source(str(photos / "pics")).record(0).captions == ["a wolf"]
