"""A library follows its folder, searches agree with the model, and a stranger's library does no harm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from folders import model_folder
from kiloword.api import Matcher, load
from kiloword.apps.search.command import Index
from kiloword.apps.search.library import Library, best, by_image, by_text
from photo_folders import draw, photos_in, refused, run


@pytest.fixture(scope="module", params=("siglip", "llip", "prolip"))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, Matcher]:
    """A library of 12 photos by a fresh model, and the model."""
    root = tmp_path_factory.mktemp(request.param)
    model_folder(root / "model", request.param)
    Index(photos=photos_in(root / "photos"), out=root / "library", model=str(root / "model"), device="cpu").run()
    return Library(root / "library"), load(root / "model")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    model_folder(tmp_path / "model")
    photos_in(tmp_path / "photos")
    again(tmp_path / "library", model=str(tmp_path / "model"))
    return tmp_path / "library"


def again(library: Path, **options: Any) -> Library:
    Index(photos=library.parent / "photos", out=library, device="cpu", **options).run()
    return Library(library)


def paths(library: Library) -> list[str]:
    return [one["path"] for one in library.photos(range(len(library)))]


def files(library: Library) -> list[Path]:
    return [library.photo(one["id"]) for one in library.photos(range(len(library)))]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_search_agrees_with_the_model(made: tuple[Library, Matcher]) -> None:
    """By scores of texts and of photos, with the features as stored, and as other programs read them."""
    library, matcher = made
    photos = files(library)
    scores = matcher.score(photos, ["two cats and a dog"])[:, 0]
    found = by_text(library, matcher, "two cats and a dog", 5)
    assert [one["score"] for one in found] == pytest.approx(scores.sort(descending=True).values[:5].tolist(), abs=2e-3)
    own = None
    if "log_var" in library.features:
        own = matcher.uncertainty(matcher.encode_image([library.photo(one["id"]) for one in found])).tolist()
    for n, one in enumerate(found):
        assert one["score"] == pytest.approx(float(scores[library.row_of(one["id"])]), abs=2e-3)
        assert one.get("uncertainty") == (own and pytest.approx(own[n], rel=1e-3))
    stored, fresh = library.taken([9, 2, 5, 2]), matcher.encode_image([photos[row] for row in (9, 2, 5, 2)])
    assert stored.keys() == fresh.keys()
    for name, value in fresh.items():
        torch.testing.assert_close(stored[name], value, atol=5e-3, rtol=2e-3)
    vec = matcher.encode_image(photos[7])["vec"].numpy()
    assert by_image(library, vec, 1)[0]["path"] == paths(library)[7]
    assert [one["path"][:4] for one in by_image(library, vec, 12, within="DEEP")] == ["deep"] * 6
    (rows,), (vectors,) = library.folder.glob("rows-*.parquet"), library.folder.glob("vec-*.npy")
    assert pq.read_table(rows)["path"].to_pylist() == paths(library)
    assert np.linalg.norm(np.load(vectors), axis=1) == pytest.approx(np.ones(12), abs=1e-3)


def test_ties_keep_the_order_of_the_library() -> None:
    scores = np.array([1, 3, 2, 3, np.nan, 2, -np.inf, 2], np.float32)
    for top in range(1, 12):
        assert best(scores, top).tolist() == [1, 3, 2, 5, 7, 0][:top]


def test_an_update_changes_what_changed(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, before = library.parent / "photos", Library(library)
    draw(photos / "00.jpg", 100)
    os.utime(photos / "00.jpg", ns=(1, 1))
    (photos / "02.jpg").unlink()
    (photos / "06.txt").write_text("a dog")
    (photos / "08.json").write_text('{"caption": 1}')
    draw(photos / "deep" / "new.jpg", 101)
    strange = os.fsdecode(b"\xff\x1b[31m.jpg")
    (photos / "04.jpg").rename(photos / strange)
    after = again(library)
    said = capsys.readouterr()
    assert "2 new, 2 changed, 2 gone, 12 in the folder" in said.out
    assert "08.jpg" in said.err
    assert set(paths(after)) == {*paths(before), "deep/new.jpg", strange} - {"02.jpg", "04.jpg"}
    ids = [dict(zip(paths(one), one.rows["id"].to_pylist(), strict=True)) for one in (before, after)]
    assert {path for path in ids[0] if ids[1].get(path) != ids[0][path]} == {"00.jpg", "02.jpg", "04.jpg", "06.jpg"}
    assert [one["path"] for one in after.photos(range(12)) if one["caption"] == "a dog"] == ["06.jpg"]
    row = paths(after).index(strange)
    fresh = load(library.parent / "model").encode_image([files(after)[row]])["vec"]
    torch.testing.assert_close(after.taken([row])["vec"], fresh, atol=1e-4, rtol=1e-3)
    assert len(before.taken(range(12))["vec"]) == 12  # a reader of the former state
    bytes_ = contents(library)
    again(library)
    assert contents(library) == bytes_
    for photo in [*photos.glob("*.jpg")]:
        photo.unlink()
    assert len(again(library, forget=True)) == 7


@pytest.mark.parametrize("moment", ["library.json", "vec-*.npy", "rows-*.parquet"])
def test_a_killed_index_goes_on_to_the_same_bytes(tmp_path: Path, moment: str) -> None:
    """Killed when a file is there: before the first state, and in the middle of it; with a state after each batch."""
    model = model_folder(tmp_path / "model")
    for n in range(300):
        draw(tmp_path / "photos" / f"{n:03}.jpg", n)
    (tmp_path / "photos/100.jpg").write_bytes(b"no image")
    words = ["index", str(tmp_path / "photos"), "--model", str(model), "--device", "cpu", "--batch", "8", "--out"]

    code = "from kiloword.apps.search import index; from kiloword.cli.main import main; index.SECONDS = {}; main()"

    def started(out: str, seconds: int = 0) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code.format(seconds), *words, str(tmp_path / out)])

    whole, killed = started("whole", 99), started("killed")
    while killed.poll() is None and not [*(tmp_path / "killed").glob(moment)]:
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert [started("killed").wait(), whole.wait()] == [0, 0]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert len(Library(tmp_path / "whole")) == 299


def test_nothing_outside_the_folder_is_read(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By links when it is indexed, by links made later, and by paths in a stranger's table."""
    photos, outside = library.parent / "photos", library.parent / "private"
    draw(outside / "a.jpg", 80)
    (outside / "a.txt").write_text("a secret")
    draw(photos / "mine.jpg", 81)
    (photos / "mine.txt").symlink_to(outside / "a.txt")
    (photos / "theirs.jpg").symlink_to(outside / "a.jpg")
    (photos / "twin.jpg").symlink_to(photos / "00.jpg")
    indexed = again(library)
    assert "2 paths skipped, a link to a file outside the folder" in capsys.readouterr().err
    assert {"mine.jpg", "twin.jpg", "theirs.jpg"} & {*paths(indexed)} == {"mine.jpg", "twin.jpg"}
    assert not any(indexed.rows["caption"].to_pylist())
    (photos / "twin.jpg").unlink()
    (photos / "twin.jpg").symlink_to(outside / "a.jpg")
    with pytest.raises(FileNotFoundError, match="outside"):
        files(indexed)
    for path in (b"../model/config.json", b"/etc/passwd", b"a\0.jpg"):
        column = pa.array([path] * 14)
        file_of(library, lambda t, c=column: t.set_column(2, t.schema.field("file"), c))
        with pytest.raises(FileNotFoundError, match="outside"):
            files(Library(library))


def rewritten(library: Path, **values: Any) -> None:
    path = library / "library.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rows_of(library: Path) -> Path:
    (path,) = library.glob("rows-*.parquet")
    return path


def file_of(library: Path, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    table = change(pq.read_table(rows_of(library)))
    pq.write_table(table, rows_of(library), **{"use_dictionary": False, "compression": "none"} | options)


def matrix(library: Path, shape: str, kind: str = "<f4") -> None:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    next(library.glob("vec-*.npy")).write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + header.encode())


STRANGERS = {
    "many parts": (lambda at: rewritten(at, parts=["part-000001"] * 200_000), "library.json"),
    "an earlier version": (lambda at: rewritten(at, format="kiloword-library-2"), "of another version"),
    "a state": (lambda at: rewritten(at, state=2**63 - 1), "damaged"),
    "features elsewhere": (lambda at: rewritten(at, features=["../model/vec"]), "damaged"),
    "not JSON": (lambda at: (at / "library.json").write_text('{"format": "kiloword-library-3"' * 1000), "damaged"),
    "no rows": (lambda at: rows_of(at).unlink(), "damaged"),
    "packed rows": (lambda at: file_of(at, lambda t: t, compression="zstd"), "damaged"),
    "a dictionary": (lambda at: file_of(at, lambda t: t, use_dictionary=True), "damaged"),
    "fewer rows": (lambda at: file_of(at, lambda t: t.slice(1)), "damaged"),
    "other columns": (lambda at: file_of(at, lambda t: t.drop_columns("file")), "damaged"),
    "a huge matrix": (lambda at: matrix(at, f"({10**6}, {10**6})"), "damaged"),
    "a matrix without end": (lambda at: matrix(at, f"(12, {2**62})"), "damaged"),
    "pickled objects": (lambda at: matrix(at, "(12, 64)", "|O"), "damaged"),
    "numbers, not vectors": (lambda at: np.save(next(at.glob("vec-*")), np.zeros(12, np.float32)), "damaged"),
    "no features": (lambda at: rewritten(at, features=[]), "damaged"),
    "a model of the hub": (lambda at: rewritten(at, model="hf-hub:nobody/nothing"), "unasked"),
    "another model": (lambda at: rewritten(at, fingerprint="0"), "another model"),
    "no model": (lambda at: rewritten(at, model=str(at / "gone")), "gone"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_library_is_refused(library: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    damage, word = STRANGERS[name]
    damage(library)
    began = time.process_time()
    assert word in refused(capsys, "search", library, "a dog", "--device", "cpu")
    assert time.process_time() - began < 5


REFUSED = [
    ("search library", "--like"),
    ("search library dog --like photos/00.jpg", "--like"),
    ("search library \t", "expected words"),
    (f"search library {'b' * 10_001}", "10,001"),
    ("search library dog --top 0", "--top"),
    ("search library --like bad.jpg", "not an image"),
    ("search library --like none.jpg", "none.jpg"),
    ("search photos dog", "library.json"),
    ("search library dog --model other", "another model"),
    ("index photos --model other --out library", "another model"),
    ("index photos --model model --out photos", "other files"),
    ("index photos --out new", "needs a model"),
    ("index photos --out library --dim 8", "--dim"),
    ("index empty --out library", "no images"),
    ("index more --out library", "choose another --out"),
    ("index half --out library", "lacks 7 of 12 photos"),
    ("serve library --port 70000", "--port"),
    ("serve library --host 203.0.113.1", "--host"),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED)
def test_bad_input(
    library: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, expected: str
) -> None:
    monkeypatch.chdir(library.parent)
    Path("bad.jpg").write_bytes(b"no image")
    Path("empty").mkdir()
    model_folder(Path("other"), "llip")
    photos_in(Path("more"), 12)  # of the same names and sizes, but another time
    shutil.copytree("photos", "half")
    for photo in [*sorted(Path("half").rglob("*.jpg"))][:7]:
        photo.unlink()
    before = contents(library)
    assert expected in refused(capsys, *words.split(" "), "--device", "cpu")
    assert contents(library) == before


def test_results_are_a_table_json_and_a_page(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, out = library.parent / "photos", library.parent / "out"
    hostile = "<img src=x onerror=alert(1)>\x1b[31m.jpg"
    draw(photos / hostile, 70)
    (photos / f"{hostile[:-4]}.txt").write_text("<script>alert(2)</script>")
    long = "/".join(["2024-08-31 a long day at the sea 🌊"] * 7) + "/photo.jpg"
    draw(photos / long, 71)
    again(library)
    (photos / "00.jpg").unlink()
    words = ["--top", 14, "--json", f"{out}.json", "--page", f"{out}.html", "--device", "cpu"]
    capsys.readouterr()
    code, said = run(capsys, "search", library, "<b>dog", *words)
    assert (code, long in said, "\x1b" in said, "14 of 14 photos" in said) == (0, True, False, True)
    results = json.loads(out.with_suffix(".json").read_text())
    assert (results["query"], results["photos"], len(results["results"])) == ("<b>dog", 14, 14)
    one = next(one for one in results["results"] if one["path"] == hostile)
    assert one.keys() == {"path", "score", "id", "caption"}
    page = out.with_suffix(".html").read_text()
    assert page.count('src="data:image/') == 13
    assert "the photo cannot be read" in page
    assert f"{one['score']:.3f}" in page
    for word in ("<script", "<img src=x", "<b>dog", "\x1b"):
        assert word not in page


def test_a_moved_model_moved_photos_and_fewer_numbers(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, words = tmp_path / "short", ["dog", "--within", "2030/", "--device", "cpu"]
    Index(photos=tmp_path / "photos", out=short, model=str(tmp_path / "model"), device="cpu", dim=8).run()
    (tmp_path / "model").rename(tmp_path / "moved")
    (tmp_path / "photos").rename(tmp_path / "album")
    before = Library(short)
    Index(photos=tmp_path / "album", out=short, model=str(tmp_path / "moved"), device="cpu").run()
    after = Library(short)
    assert (after.file.folder, after.file.state) == (str(tmp_path / "album"), before.file.state)
    whole, part = (Library(folder).features["vec"] for folder in (library, short))
    np.testing.assert_allclose(part, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-5)
    code, said = run(capsys, "search", short, *words)
    assert (code, "0 of 12 photos" in said, "'2030/'" in said) == (0, True, True)
