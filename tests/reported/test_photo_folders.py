"""Whatever a folder of images holds is read, or is counted and named with the reason; nothing is read twice."""

from __future__ import annotations

import os
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from users import Refused, Run

from kiloword.data.open import open_source
from tars import draw

NFD = unicodedata.normalize("NFD", "Caf\u00e9")
ALBUMS = ["album", NFD, "\u0635\u0648\u0631", "\u7167\u7247/2024", "\u0938\u093e\u0932"]


def link(place: Path, target: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(target, place)


def packed(place: Path) -> None:
    draw(place.parent / "inside.jpg", 9)
    if place.suffix == ".zip":
        with zipfile.ZipFile(place, "w") as file:
            file.write(place.parent / "inside.jpg", "inside.jpg")
    else:
        with tarfile.open(place, "w:gz" if place.suffix in (".gz", ".tgz") else "w") as tar:
            tar.add(place.parent / "inside.jpg", "inside.jpg")
    (place.parent / "inside.jpg").unlink()


def outside(place: Path) -> None:
    """A link to a folder of photos outside of the album."""
    draw(place.parents[4] / "elsewhere" / "x.jpg", 8)
    link(place, os.path.relpath(place.parents[4] / "elsewhere", place.parent))


OTHERS: dict[str, tuple[str, Callable[[Path], object]]] = {  # what a word of the reason names, and how it is made
    "thumbnails of Synology": ("thumbnails", lambda at: draw(at / "@eaDir/a.jpg/SYNOPHOTO_THUMB_XL.jpg", 1)),
    "trash of QNAP": ("trash", lambda at: draw(at / "@Recycle/old.jpg", 1)),
    "trash of Synology": ("trash", lambda at: draw(at / "#recycle/deep/old.png", 1)),
    "trash of Windows": ("trash", lambda at: draw(at / "$RECYCLE.BIN/S-1-5/old.jpg", 1)),
    "trash of Linux": ("trash", lambda at: draw(at / ".Trash-1000/files/old.jpg", 1)),
    "files of macOS": ("device", lambda at: draw(at / "__MACOSX/old.jpg", 1)),
    "hidden photo": ("hidden", lambda at: draw(at / ".secret.jpg", 1)),
    "hidden folder": ("hidden", lambda at: draw(at / ".hidden/x.jpg", 1)),
    "link to nothing": ("link", lambda at: link(at / "lost.jpg", "nothing.jpg")),
    "linked folder": ("link", lambda at: outside(at / "holiday")),
    "loop": ("link", lambda at: link(at / "loop", ".")),
    "loop two levels up": ("link", lambda at: link(at / "one/loop", "../..")),
    "zip": ("packed", lambda at: packed(at / "more.zip")),
    "tar": ("packed", lambda at: packed(at / "more.TAR")),
    "compressed tar": ("packed", lambda at: packed(at / "more.tar.gz")),
    "raw": (".cr2", lambda at: (at / "raw.CR2").write_bytes(b"II")),
    "video": (".mov", lambda at: (at / "film.mov").write_bytes(b"\0")),
    "pipe": ("regular", lambda at: os.mkfifo(at / "pipe.jpg")),
}


VERBS = [("index", other) for other in OTHERS]
VERBS += [(verb, other) for verb in ("classify", "score") for other in ("hidden photo", "linked folder", "zip", "pipe")]


@pytest.mark.parametrize(("verb", "other"), VERBS)
def test_verbs_name_what_they_leave_out(tmp_path: Path, model: Path, run: Run, verb: str, other: str) -> None:
    album = tmp_path / "root" / ALBUMS[sorted(OTHERS).index(other) % len(ALBUMS)]
    reason, make = OTHERS[other]
    draw(album / "a.jpg", 1)
    draw(album / "one/two/B.JPEG", 2)
    (album / "a.txt").write_text("a caption")
    place = album / "one" / "two"
    make(place)
    words = {
        "index": ["index", album, "--model", model, "--out", tmp_path / "lib"],
        "classify": ["classify", model, "--images", album, "--classes", "dog", "cat", "--json", tmp_path / "c.json"],
        "score": ["score", model, "--images", album, "--texts", "a dog"],
    }[verb]
    code, said = run(*words, "--device", "cpu")
    assert (code, "a.txt" in said) == (0, False)
    (line,) = [line for line in said.split(" path skipped, ")[1:] if reason in line.lower()]
    made = next(path.name for path in sorted(place.iterdir()) if path.name != "B.JPEG")
    assert made in line or any(path.name in line for path in place.rglob("*"))
    if verb == "index":
        assert "lib: 2 photos" in said
    if verb == "classify":
        assert (tmp_path / "c.json").read_text().count('"image"') == 2


def test_a_linked_album_is_read_by_its_own_name(tmp_path: Path, model: Path, run: Run, refused: Refused) -> None:
    draw(tmp_path / "disk/a.jpg", 1)
    link(tmp_path / "album/holiday", "../disk")
    words = ["--model", model, "--out", tmp_path / "lib", "--device", "cpu"]
    said = refused("index", tmp_path / "album", *words)
    assert ("holiday" in said, "link" in said) == (True, True)
    code, said = run("index", tmp_path / "album/holiday", *words)
    assert (code, "lib: 1 photo," in said) == (0, True)


def test_a_link_to_a_photo_is_a_photo(tmp_path: Path, model: Path, run: Run) -> None:
    draw(tmp_path / "album/a.jpg", 1)
    link(tmp_path / "album/b.jpg", "a.jpg")
    code, said = run("classify", model, "--images", tmp_path / "album", "--classes", "dog", "cat")
    assert (code, "b.jpg" in said, "skipped" in said) == (0, True, False)


@pytest.mark.parametrize("other", ["zip", "raw", "subfolder", "link to nothing", "thumbnails of Synology", "caption"])
def test_a_folder_of_pairs_names_what_it_leaves_out(tmp_path: Path, model: Path, run: Run, other: str) -> None:
    data = tmp_path / NFD
    for n in range(4):
        draw(data / f"{n}.jpg", n)
        (data / f"{n}.txt").write_text(f"caption {n}")
    if other == "subfolder":
        draw(data / "more/x.jpg", 1)
    elif other == "caption":
        (data / "orphan.txt").write_text("a caption of no image")
    else:
        OTHERS[other][1](data)
    (name,) = (path.name for path in data.iterdir() if not path.stem.isdigit())
    for words in (
        ["data", "check", data],
        ["embed", model, "--data", data, "--out", tmp_path / "features", "--device", "cpu"],
        ["eval", "retrieval", model, "--data", data, "--device", "cpu"],
    ):
        code, said = run(*words)
        assert (code, said.count(" path skipped"), name in said.partition(" path skipped")[2]) == (0, 1, True)
    assert len(open_source(str(data))) == 4


@pytest.mark.parametrize("name", ["@eaDir", "#recycle", "lost+found", "$RECYCLE.BIN"])
def test_folders_of_devices_are_no_classes(tmp_path: Path, name: str) -> None:
    for inner in ("cat", "dog", "zebra"):
        draw(tmp_path / inner / "0.jpg", 1)
    before = open_source(str(tmp_path))
    draw(tmp_path / name / "0.jpg", 1)
    source = open_source(str(tmp_path))
    assert (len(source), source.classnames) == (3, ["cat", "dog", "zebra"])
    assert source.fingerprint == before.fingerprint
    assert any(name in note for note in source.notes)
