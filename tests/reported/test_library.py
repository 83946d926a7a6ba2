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
        return sorted(self.captions())

    def captions(self) -> dict[str, str]:
        """Path -> caption of all photos that a search finds."""
        words = ["--top", 1000, "--json", self.folder / "hits.json", "--device", "cpu"]
        assert run(self.capsys, "search", self.library, "a dog", *words)[0] == 0
        hits = json.loads((self.folder / "hits.json").read_text())["results"]
        return {hit["path"]: hit["caption"] for hit in hits}


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


@pytest.mark.parametrize("letter", ["d", "\u00e9", "\u7167"])
def test_photos_that_cannot_be_looked_up_are_kept(photos: Photos, letter: str) -> None:
    """Their folder lists them, but no status can be had: here, as the whole path is longer than the system allows."""
    place, longest = photos.album, os.pathconf(photos.folder, "PC_PATH_MAX") - 1
    while (room := longest - 8 - len(os.fsencode(place))) > 10:
        step = min(200, room - 1 if room < 210 else room - 11)
        place /= letter * (step // len(letter.encode()))
    for n in range(3):
        draw(photos.album / "phone" / f"{n}.jpg", n)
    draw(place / "0.jpg", 10)
    assert photos.index()[0] == 0
    before = photos.found()
    longer = photos.album.with_name("longer-album")
    photos.album.rename(longer)
    code, said = photos.index(album=longer)
    assert (code, len(before), "0 gone" in said, "1 photo kept" in said) == (0, 4, True, True)
    assert photos.found() == before


@pytest.mark.parametrize("share", ["all", "some"])
@pytest.mark.parametrize("bytes_", [b"", b"\xff\xd8\xff", b"\0" * 4096])
def test_photos_that_become_unreadable_are_kept(photos: Photos, share: str, bytes_: bytes) -> None:
    """As placeholders of a cloud, or after damage; they are tried again until they can be read."""
    paths = filled(photos, "disk")
    lost = [path for path in paths if share == "all" or path.startswith("disk")]
    stored = {path: (photos.album / path).read_bytes() for path in lost}
    for path in lost:
        (photos.album / path).write_bytes(bytes_)
    for _ in range(2):
        code, said = photos.index()
        assert (code, f"{len(lost)} paths skipped" in said, "disk/0.jpg" in said, "keeps" in said) == (0, *[True] * 3)
        assert photos.found() == paths
    for path, image in stored.items():
        (photos.album / path).write_bytes(image)
    assert photos.index()[0] == 0
    code, said = photos.index()
    assert (code, "0 new, 0 changed, 0 gone" in said, "keeps" in said) == (0, True, False)
    assert photos.found() == paths


@pytest.mark.parametrize("inner", ["", "disk", "\u0635\u0648\u0631/2024"])
@pytest.mark.parametrize("text", ['{"x": 1}', "\u7167\u7247", "folder"])
def test_a_library_json_of_another_program_hides_no_photos(photos: Photos, inner: str, text: str) -> None:
    draw(photos.album / inner / "0.jpg", 0)
    draw(photos.album / inner / "more/1.jpg", 1)
    other = photos.album / inner / "library.json"
    other.mkdir() if text == "folder" else other.write_text(text)
    code, said = photos.index()
    assert (code, "library.json" in said) == (0, text != "folder")
    assert photos.found() == sorted(str(Path(inner, name)) for name in ("0.jpg", "more/1.jpg"))


@pytest.mark.parametrize("name", ["lib", "\u0635\u0648\u0631", "a b"])
def test_a_library_among_the_photos_is_named(photos: Photos, name: str) -> None:
    draw(photos.album / "0.jpg", 0)
    photos.library = photos.album / "inner" / name
    assert photos.index()[0] == 0
    draw(photos.library / "x.jpg", 1)
    code, said = photos.index()
    assert (code, f"library of kiloword: inner/{name}" in said, ".parquet" in said) == (0, True, False)
    assert photos.found() == ["0.jpg"]
    code, said = photos.index(album=photos.library)
    assert (code, "library of kiloword" in said) == (2, True)


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("x.txt", "caf\u00e9".encode("latin-1"), ""),
        ("x.txt", "\u0643\u062a\u0627\u0628".encode("utf-16"), ""),
        ("x.txt", "\u5199\u771f".encode("shift-jis"), ""),
        ("x.txt", ("word " * 400).encode(), ("word " * 400)[:1000]),
        ("x.txt", ("\u0939" * 1001).encode(), "\u0939" * 1000),
        ("x.json", b'{"caption": "a dog"}', ""),
    ],
)
def test_captions_that_are_not_kept_are_named(photos: Photos, name: str, text: bytes, kept: str) -> None:
    for photo in ("x", "y", "z"):
        draw(photos.album / "deep" / f"{photo}.jpg", ord(photo))
    (photos.album / "deep" / name).write_bytes(text)
    whole = "\u0939" * 1000
    (photos.album / "deep/y.txt").write_text(whole, encoding="utf-8")
    code, said = photos.index()
    assert (code, said.count(f"deep/{name}"), "y.txt" in said, "z.txt" in said) == (0, 1, False, False)
    assert photos.captions() == {"deep/x.jpg": kept, "deep/y.jpg": whole, "deep/z.jpg": ""}


@pytest.mark.parametrize("others", [4, 3, 2, 0])
@pytest.mark.parametrize("inner", ["", "\u7167\u7247/2024"])
def test_equal_names_on_another_disk_replace_few_photos(photos: Photos, inner: str, others: int) -> None:
    """More than half of them are replaced by the user's word alone; what was moved with its times is not encoded."""
    for n in range(4):
        draw(photos.album / inner / f"{n}.jpg", n)
    assert photos.index()[0] == 0
    parts = {path.name: path.read_bytes() for path in photos.library.glob("*.*")}
    moved = photos.folder / "other"
    shutil.move(photos.album, moved)
    for n in range(others):
        draw(moved / inner / f"{n}.jpg", 20 + n)
    code, said = photos.index(album=moved)
    if others > 2:
        assert (code, f"{others} of 4 photos" in said, "--forget" in said) == (2, True, True)
        assert {path.name: path.read_bytes() for path in photos.library.glob("*.*")} == parts
        code, said = photos.index("--forget", album=moved)
    assert (code, f"0 new, {others} changed, 0 gone" in said) == (0, True)
    assert len(photos.found()) == 4
