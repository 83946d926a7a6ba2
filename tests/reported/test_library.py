"""A library does not empty itself: photos that may come back are kept, and many are removed only by the user's word."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from users import Run

from tars import draw


class Photos:
    """A folder of photos with its library."""

    def __init__(self, folder: Path, model: Path, run: Run) -> None:
        self.folder, self.model, self.run = folder, model, run
        self.album, self.library = folder / "album", folder / "lib"

    def index(self, *words: object, album: Path | None = None) -> tuple[int, str]:
        named = [album or self.album, "--model", self.model, "--out", self.library, "--device", "cpu"]
        return self.run("index", *named, *words)

    def found(self) -> list[str]:
        """Paths of all photos that a search finds."""
        return sorted(self.captions())

    def captions(self) -> dict[str, str]:
        """Path -> caption of all photos that a search finds."""
        words = ["--top", 1000, "--json", self.folder / "hits.json", "--device", "cpu"]
        assert self.run("search", self.library, "a dog", *words)[0] == 0
        hits = json.loads((self.folder / "hits.json").read_text())["results"]
        return {hit["path"]: hit["caption"] for hit in hits}

    def files(self) -> dict[str, bytes]:
        """Contents of the library's files."""
        return {path.name: path.read_bytes() for path in self.library.glob("*.*")}


@pytest.fixture
def photos(tmp_path: Path, model: Path, run: Run) -> Photos:
    return Photos(tmp_path, model, run)


def filled(photos: Photos, inner: str) -> list[str]:
    """An album with three photos of a phone and three on a disk, indexed. Returns: all paths."""
    for i in range(3):
        draw(photos.album / "phone" / f"{i}.jpg", i)
        draw(photos.album / inner / f"{i}.jpg", 10 + i)
    assert photos.index()[0] == 0
    return photos.found()


@pytest.mark.parametrize(
    ("inner", "left"),
    [
        ("disk", "empty"),
        (unicodedata.normalize("NFD", "\u00dcrlaub"), "gone"),
        ("\u0635\u0648\u0631/2024", "empty"),
        ("\u7167\u7247", "gone"),
        ("a b/c/d", "link"),
    ],
)
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


@pytest.mark.parametrize("place", ["", "@eaDir", "#recycle", "$RECYCLE.BIN"])
@pytest.mark.parametrize("gone", [1, 2])
def test_deleted_photos_are_forgotten(photos: Photos, place: str, gone: int) -> None:
    """Those in the trash of the device, too."""
    paths = filled(photos, "disk")
    (photos.album / place).mkdir(exist_ok=True)
    for path in paths[-gone:]:
        (photos.album / path).rename(photos.album / place / "x.jpg")
        if not place:
            (photos.album / "x.jpg").unlink()
    code, said = photos.index()
    assert (code, f"{gone} gone" in said, "kept" in said, place in said) == (0, True, False, True)
    assert photos.found() == paths[:-gone]


def test_photos_behind_links_to_nothing_are_kept(photos: Photos) -> None:
    paths = filled(photos, "disk")
    (photos.album / "phone/0.jpg").unlink()
    os.symlink("/media/nobody/0.jpg", photos.album / "phone/0.jpg")
    code, said = photos.index()
    assert (code, "phone/0.jpg" in said) == (0, True)
    assert photos.found() == paths


@pytest.mark.parametrize("names", [["0.jpg", "1.jpg"], ["x.jpg", "y.jpg", "z.png"]])
def test_most_photos_are_removed_by_the_users_word_alone(photos: Photos, names: list[str]) -> None:
    """A folder in which most photos are others, as of another disk."""
    for n in range(7):
        draw(photos.album / f"{n}.jpg", n)
    assert photos.index()[0] == 0
    before = photos.found()
    parts = photos.files()
    for path in photos.album.iterdir():
        path.unlink()
    for n, name in enumerate(names):
        draw(photos.album / name, 20 + n)
    code, said = photos.index()
    lost = sum(not (photos.album / path).exists() for path in before)
    assert (code, f"{lost} of 7 photos" in said, "--forget" in said, "Traceback" in said) == (2, True, True, False)
    assert photos.files() == parts
    assert photos.found() == before
    assert photos.index("--forget")[0] == 0
    assert photos.found() == sorted(names)


@pytest.mark.parametrize(("inner", "other"), [("", "empty"), ("disk", "few"), ("\u7167\u7247/2024", "others")])
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


@pytest.mark.parametrize(("share", "content"), [("all", b""), ("some", b"\xff\xd8\xff"), ("some", bytes(4096))])
def test_photos_that_become_unreadable_are_kept(photos: Photos, share: str, content: bytes) -> None:
    """As placeholders of a cloud, or after damage; they are tried again until they can be read."""
    paths = filled(photos, "disk")
    lost = [path for path in paths if share == "all" or path.startswith("disk")]
    stored = {path: (photos.album / path).read_bytes() for path in lost}
    for path in lost:
        (photos.album / path).write_bytes(content)
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


@pytest.mark.parametrize("inner", ["", "\u0635\u0648\u0631/2024"])
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


def test_captions_that_are_not_kept_are_named(photos: Photos) -> None:
    texts = {
        "latin": ("caf\u00e9".encode("latin-1"), ""),
        "utf16": ("\u0643\u062a\u0627\u0628".encode("utf-16"), ""),
        "shift": ("\u5199\u771f".encode("shift-jis"), ""),
        "long": (("word " * 400).encode(), ("word " * 400)[:1000]),
        "letters": (("\u0939" * 1001).encode(), "\u0939" * 1000),
        "whole": (("\u0939" * 1000).encode(), "\u0939" * 1000),
    }
    for n, name in enumerate((*texts, "object", "none")):
        draw(photos.album / "deep" / f"{name}.jpg", n)
    for name, (text, _) in texts.items():
        (photos.album / "deep" / f"{name}.txt").write_bytes(text)
    (photos.album / "deep/object.json").write_text('{"caption": "a dog"}')
    code, said = photos.index()
    assert code == 0
    for name in (*texts, "object", "none"):
        suffix = "json" if name == "object" else "txt"
        assert said.count(f"deep/{name}.{suffix}") == (name not in ("whole", "none")), name
    kept = {f"deep/{name}.jpg": caption for name, (_, caption) in texts.items()}
    assert photos.captions() == kept | {"deep/object.jpg": "", "deep/none.jpg": ""}


@pytest.mark.parametrize(("inner", "others"), [("", 4), ("\u7167\u7247/2024", 3), ("", 2), ("\u7167\u7247/2024", 0)])
def test_equal_names_on_another_disk_replace_few_photos(photos: Photos, inner: str, others: int) -> None:
    """More than half of them are replaced by the user's word alone; what was moved with its times is not encoded."""
    for n in range(4):
        draw(photos.album / inner / f"{n}.jpg", n)
    assert photos.index()[0] == 0
    parts = photos.files()
    moved = photos.folder / "other"
    shutil.move(photos.album, moved)
    for n in range(others):
        draw(moved / inner / f"{n}.jpg", 20 + n)
    code, said = photos.index(album=moved)
    if others > 2:
        assert (code, f"{others} of 4 photos" in said, "--forget" in said) == (2, True, True)
        assert photos.files() == parts
        code, said = photos.index("--forget", album=moved)
    assert (code, f"0 new, {others} changed, 0 gone" in said) == (0, True)
    assert len(photos.found()) == 4
