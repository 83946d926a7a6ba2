"""A library does not empty itself: photos that may come back are kept, and many are removed only by the user's word."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from pathlib import Path

import pytest

from folders import model_folder
from photo_folders import draw, run

ALBUMS = ["disk", unicodedata.normalize("NFD", "\u00dcrlaub"), "\u0635\u0648\u0631/2024", "\u7167\u7247", "a b/c/d"]


class Photos:
    """A folder of photos with its library. The model is made once."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model, self.capsys = folder, model, capsys
        self.album, self.library = folder / "album", folder / "lib"

    def index(self, *words: object, album: Path | None = None) -> tuple[int, str]:
        named = [album or self.album, "--model", self.model, "--out", self.library, "--device", "cpu"]
        return run(self.capsys, "index", *named, *words)

    def found(self) -> list[str]:
        """Paths of all photos that a search finds."""
        words = ["--top", 1000, "--json", self.folder / "hits.json", "--device", "cpu"]
        assert run(self.capsys, "search", self.library, "a dog", *words)[0] == 0
        return sorted(hit["path"] for hit in json.loads((self.folder / "hits.json").read_text())["results"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("library") / "model")


@pytest.fixture
def photos(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> Photos:
    return Photos(tmp_path, model, capsys)


def filled(photos: Photos, inner: str, n: int = 3) -> list[str]:
    """An album with n photos of a phone and n on a disk, indexed. Returns: all paths."""
    for i in range(n):
        draw(photos.album / "phone" / f"{i}.jpg", i)
        draw(photos.album / inner / f"{i}.jpg", 10 + i)
    assert photos.index()[0] == 0
    return photos.found()


@pytest.mark.parametrize("inner", ALBUMS)
@pytest.mark.parametrize("left", ["empty", "gone", "link"])
def test_photos_of_an_unmounted_disk_are_kept(photos: Photos, inner: str, left: str) -> None:
    """When the disk is there again, nothing is encoded anew."""
    paths = filled(photos, inner)
    place = photos.album / inner
    shutil.move(place, photos.folder / "away")
    if left == "empty":
        place.mkdir()
    elif left == "link":
        os.symlink("/media/nobody/disk", place)
    draw(photos.album / "phone" / "new.jpg", 30)
    code, said = photos.index()
    assert (code, "3 photos kept" in said, f"{inner}/0.jpg" in said) == (0, True, True)
    assert photos.found() == sorted([*paths, "phone/new.jpg"])
    if left != "gone":
        place.rmdir() if left == "empty" else place.unlink()
    shutil.move(photos.folder / "away", place)
    code, said = photos.index()
    assert (code, "0 new, 0 changed, 0 gone" in said, "kept" in said) == (0, True, False)


def test_photos_behind_links_to_nothing_are_kept(photos: Photos) -> None:
    paths = filled(photos, "disk")
    (photos.album / "phone/0.jpg").unlink()
    os.symlink("/media/nobody/0.jpg", photos.album / "phone/0.jpg")
    code, said = photos.index()
    assert (code, "phone/0.jpg" in said) == (0, True)
    assert photos.found() == paths


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_deleted_photos_are_forgotten(photos: Photos, gone: int) -> None:
    paths = filled(photos, "disk", 4)
    for n in range(gone):
        (photos.album / "phone" / f"{n}.jpg").unlink()
    code, said = photos.index()
    assert (code, f"{gone} gone" in said, "kept" in said) == (0, True, False)
    assert photos.found() == [path for path in paths if path not in [f"phone/{n}.jpg" for n in range(gone)]]


@pytest.mark.parametrize("names", [["0.jpg", "1.jpg"], ["x.jpg", "y.jpg", "z.png"]])
def test_most_photos_are_removed_by_the_users_word_alone(photos: Photos, names: list[str]) -> None:
    """A folder in which most photos are others, as of another disk."""
    for n in range(7):
        draw(photos.album / f"{n}.jpg", n)
    assert photos.index()[0] == 0
    before = photos.found()
    parts = {path: path.read_bytes() for path in photos.library.glob("*.*")}
    for path in photos.album.iterdir():
        path.unlink()
    for n, name in enumerate(names):
        draw(photos.album / name, 20 + n)
    code, said = photos.index()
    lost = sum(not (photos.album / path).exists() for path in before)
    assert (code, f"{lost} of 7 photos" in said, "--forget" in said, "Traceback" in said) == (2, True, True, False)
    assert {path: path.read_bytes() for path in photos.library.glob("*.*")} == parts
    assert photos.found() == before
    assert photos.index("--forget")[0] == 0
    assert photos.found() == sorted(names)


@pytest.mark.parametrize("inner", ["", "disk", "\u7167\u7247/2024"])
@pytest.mark.parametrize("other", ["empty", "few", "others"])
def test_another_folder_by_mistake_changes_nothing(photos: Photos, inner: str, other: str) -> None:
    """The folder of the library is not mounted, and another one is named."""
    for n in range(4):
        draw(photos.album / inner / f"{n}.jpg", n)
    assert photos.index()[0] == 0
    before = photos.found()
    shutil.move(photos.album, photos.folder / "away")
    wrong = photos.folder / "wrong"
    wrong.mkdir()
    if other == "few":
        draw(wrong / inner / "0.jpg", 0)
    elif other == "others":
        draw(wrong / "more" / "m.jpg", 9)
    code, said = photos.index(album=wrong)
    assert (code, "Traceback" in said) == (2, False)
    assert photos.found() == before
    code, said = photos.index(album=photos.folder / "away")
    assert (code, "0 new, " in said, "0 gone" in said) == (0, True, True)


def test_the_users_word_removes_a_deleted_album(photos: Photos) -> None:
    filled(photos, "disk")
    shutil.rmtree(photos.album / "disk")
    assert photos.index()[0] == 0
    assert len(photos.found()) == 6
    code, said = photos.index("--forget")
    assert (code, "3 gone" in said) == (0, True)
    assert photos.found() == ["phone/0.jpg", "phone/1.jpg", "phone/2.jpg"]


@pytest.mark.parametrize("name", ["@eaDir", "#recycle", "$RECYCLE.BIN"])
def test_trash_is_not_kept(photos: Photos, name: str) -> None:
    """A photo that is moved to the trash of the device was deleted."""
    paths = filled(photos, "disk")
    (photos.album / name).mkdir()
    (photos.album / "phone/1.jpg").rename(photos.album / name / "1.jpg")
    code, said = photos.index()
    assert (code, "1 gone" in said, name in said) == (0, True, True)
    assert photos.found() == [path for path in paths if path != "phone/1.jpg"]
