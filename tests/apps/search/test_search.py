"""A library follows its folder, searches agree with the model, and a stranger's library does no harm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from commands import refused, run
from folders import model_folder
from kiloword.api import Matcher, load
from kiloword.apps.search.command import Index
from kiloword.apps.search.library import Library
from kiloword.apps.search.rank import best, find
from sources import files_of
from tars import draw, photos_in


@pytest.fixture(scope="module", params=("siglip", "llip", "prolip"))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, Matcher]:
    """A library of 12 photos by a fresh model, and the model."""
    root = tmp_path_factory.mktemp(request.param)
    model_folder(root / "model", request.param)
    Index(photos=photos_in(root / "photos"), out=root / "library", model=str(root / "model"), device="cpu").run()
    return Library(root / "library"), load(root / "model")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    model_folder(root / "model")
    photos_in(root / "photos")
    again(root / "library", model=str(root / "model"))
    return root


@pytest.fixture
def library(base: Path, tmp_path: Path) -> Path:
    """A library, its photos and its model, to be changed."""
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    rewritten(tmp_path / "library", folder=str(tmp_path / "photos"), model=str(tmp_path / "model"))
    return tmp_path / "library"


def rewritten(library: Path, **values: Any) -> None:
    path = library / "library.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def again(library: Path, **options: Any) -> Library:
    Index(photos=library.parent / "photos", out=library, device="cpu", **options).run()
    return Library(library)


def paths(library: Library) -> list[str]:
    return [library.cells(row)["path"] for row in range(len(library))]


def test_a_text_finds_what_the_model_scores_highest(made: tuple[Library, Matcher]) -> None:
    library, matcher = made
    for top in range(1, 12):  # ties keep the order of the library
        assert best(np.array([1, 3, 2, 3, np.nan, 2, -np.inf, 2], np.float32), top).tolist() == [1, 3, 2, 5, 7, 0][:top]
    photos = [library.photo(row) for row in range(12)]
    scores, snow = matcher.score(photos, ["two cats and a dog", "snow"]).T
    found = find(library, matcher, [("two cats and a dog", 1)], 5)
    assert [one.score for one in found] == pytest.approx(scores.sort(descending=True).values[:5].tolist(), abs=2e-3)
    own = None
    if "log_var" in library.features:
        own = matcher.uncertainty(matcher.encode_image([library.photo(one.row) for one in found])).tolist()
    for n, one in enumerate(found):
        assert one.score == pytest.approx(float(scores[one.row]), abs=2e-3)
        assert one.uncertainty == (own and pytest.approx(own[n], rel=1e-3))
    like = matcher.encode_image(photos)["vec"] @ matcher.encode_image(photos[3])["vec"]
    several = find(library, matcher, [("two cats and a dog", 1), (photos[3], 2), ("snow", -0.5)], 12)
    expected = (scores + 2 * like - 0.5 * snow)[[one.row for one in several]]
    assert [one.score for one in several] == pytest.approx(expected.tolist(), abs=5e-3)


def test_features_are_those_of_the_model(made: tuple[Library, Matcher]) -> None:
    """As stored, as other programs read them, and as a photo finds itself by them."""
    library, matcher = made
    stored, fresh = library.taken([9, 2, 5, 2]), matcher.encode_image([library.photo(row) for row in (9, 2, 5, 2)])
    assert stored.keys() == fresh.keys()
    for name, value in fresh.items():
        torch.testing.assert_close(stored[name], value, atol=5e-3, rtol=2e-3)
    vec = matcher.encode_image(library.photo(7))["vec"].numpy()
    assert find(library, matcher, [(vec, 1)], 1)[0].row == 7
    assert {paths(library)[one.row][:4] for one in find(library, matcher, [(vec, 1)], 12, "DEEP")} == {"deep"}
    (rows,), (vectors,) = library.folder.glob("rows-*.parquet"), library.folder.glob("vec-*.npy")
    assert pq.read_table(rows)["path"].to_pylist() == paths(library)
    assert np.linalg.norm(np.load(vectors), axis=1) == pytest.approx(np.ones(12), abs=1e-3)


def test_an_update_changes_what_changed(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, before = library.parent / "photos", Library(library)
    draw(photos / "00.jpg", 100)
    os.utime(photos / "00.jpg", ns=(1, 1))
    (photos / "02.jpg").unlink()
    draw(photos / "deep" / "new.jpg", 101)
    strange = os.fsdecode(b"\xff\x1b[31m.jpg")
    (photos / "04.jpg").rename(photos / strange)
    (photos / "bad.jpg").write_bytes(b"no image")
    after, said = again(library), capsys.readouterr()
    assert "3 new, 1 changed, 2 gone, 13 in the folder" in said.out
    assert ("bad.jpg" in said.err, "the old entry" in said.err) == (True, False)
    assert set(paths(after)) == {*paths(before), "deep/new.jpg", strange} - {"02.jpg", "04.jpg"}
    ids = [dict(zip(paths(one), one.rows["id"].to_pylist(), strict=True)) for one in (before, after)]
    assert {path for path in ids[0] if ids[1].get(path) != ids[0][path]} == {"00.jpg", "02.jpg", "04.jpg"}
    row = paths(after).index(strange)
    fresh = load(library.parent / "model").encode_image([after.photo(row)])["vec"]
    torch.testing.assert_close(after.taken([row])["vec"], fresh, atol=1e-4, rtol=1e-3)
    assert len(before.taken(range(12))["vec"]) == 12  # a reader of the former state
    bytes_ = files_of(library)
    again(library)
    assert files_of(library) == bytes_


@pytest.mark.slow
def test_a_killed_index_goes_on_to_the_same_library(tmp_path: Path) -> None:
    """Killed when a file is there, before the first state and in the middle of it, of a clock that runs fast."""
    model, photos = model_folder(tmp_path / "model"), photos_in(tmp_path / "photos", 200)
    (photos / "100.jpg").write_bytes(b"no image")
    words = ["index", str(photos), "--model", str(model), "--device", "cpu", "--batch", "8", "--workers", "0", "--out"]
    code = "import itertools, time; from kiloword.cli.main import main; now = itertools.count(0, {}).__next__\n"
    code += "time.monotonic = now; main()"

    def started(out: str, minute: int = 60) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code.format(minute), *words, str(tmp_path / out)])

    whole = started("whole", 0)
    for moment in ("library.json", "vec-*.npy", "rows-*.parquet"):
        killed = started("killed")
        while killed.poll() is None and not [*(tmp_path / "killed").glob(moment)]:
            time.sleep(0.002)
        killed.kill()
        killed.wait()
    assert [started("killed").wait(), whole.wait()] == [0, 0]
    after, before = Library(tmp_path / "killed"), Library(tmp_path / "whole")
    assert after.file == before.file
    assert after.rows.equals(before.rows)
    assert len(before) == 199
    # the photo that cannot be read is tried again first, which shifts the batches that follow
    np.testing.assert_allclose(after.features["vec"], before.features["vec"], atol=1e-6)


def test_links_to_outside_are_not_indexed(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, outside = library.parent / "photos", library.parent / "private"
    draw(outside / "a.jpg", 80)
    (outside / "a.txt").write_text("a secret")
    draw(photos / "mine.jpg", 81)
    (photos / "mine.txt").symlink_to(outside / "a.txt")
    (photos / "theirs.jpg").symlink_to(outside / "a.jpg")
    (photos / "twin.jpg").symlink_to(photos / "00.jpg")
    indexed = again(library)
    assert capsys.readouterr().err.count("a link to a file outside the folder") == 1
    assert {"twin.jpg", "theirs.jpg"} & {*paths(indexed)} == {"twin.jpg"}
    assert not any(indexed.rows["caption"].to_pylist())
    (photos / "twin.jpg").unlink()
    (photos / "twin.jpg").symlink_to(outside / "a.jpg")
    with pytest.raises(ValueError, match="outside"):
        indexed.photo(paths(indexed).index("twin.jpg"))


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
    "an earlier version": (lambda at: rewritten(at, format="kiloword-library-1"), "of another version"),
    "a key": (lambda at: rewritten(at, next_id=2**63 - 1), "next_id"),
    "a state": (lambda at: rewritten(at, state=2**63 - 1), "damaged"),
    "features elsewhere": (lambda at: rewritten(at, features=["../model/vec"]), "damaged"),
    "not JSON": (lambda at: (at / "library.json").write_text('{"format": "kiloword-library-2"' * 1000), "damaged"),
    "no rows": (lambda at: rows_of(at).unlink(), "damaged"),
    "cut rows": (lambda at: rows_of(at).write_bytes(b"PAR1"), "damaged"),
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


def test_a_path_that_leaves_the_folder_is_refused(library: Path) -> None:
    for path in (b"../model/config.json", b"/etc/passwd", b"a\0.jpg"):
        column = pa.array([path] * 12)
        file_of(library, lambda t, c=column: t.set_column(2, t.schema.field("file"), c))
        with pytest.raises(ValueError, match="outside"):
            Library(library).photo(0)


REFUSED = [
    ("search LIBRARY \t", "expected words"),
    ("search LIBRARY dog --top 0 --also nan cat", "; --top"),
    ("search LIBRARY dog --also -1 BAD", "not an image"),
    ("search LIBRARY none.jpg", "none.jpg"),
    ("search PHOTOS dog", "library.json"),
    ("search LIBRARY dog --model OTHER", "another model"),
    ("index PHOTOS --model OTHER --out LIBRARY", "another model"),
    ("index PHOTOS --model MODEL --out PHOTOS", "other files"),
    ("index PHOTOS --out LIBRARY --dim 8", "--dim"),
    ("index EMPTY --out LIBRARY", "no images"),
    ("index MORE --out LIBRARY", "--out"),
    ("serve LIBRARY --port 70000", "--port"),
    ("index PHOTOS --out LIBRARY GONE", "--forget"),
    ("serve LIBRARY --host 203.0.113.1", "--host"),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED)
def test_bad_input(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    names = {name: tmp_path / name.lower() for name in ("LIBRARY", "PHOTOS", "NEW", "OTHER", "MODEL", "EMPTY", "MORE")}
    names["BAD"] = tmp_path / "bad.jpg"
    names["BAD"].write_bytes(b"no image")
    names["EMPTY"].mkdir()
    if "OTHER" in words:
        model_folder(names["OTHER"], "llip")
    if "MORE" in words:
        photos_in(names["MORE"], 2)
    if words.endswith(" GONE"):
        words = words.removesuffix(" GONE")
        for photo in [*sorted(names["PHOTOS"].rglob("*.jpg"))][:7]:
            photo.unlink()
    before = files_of(library)
    assert expected in refused(capsys, *(names.get(word, word) for word in words.split(" ")), "--device", "cpu")
    assert files_of(library) == before


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
    code, said = run(capsys, "search", library, "<b>dog", "--also", -0.5, "cat", *words)
    assert (code, long in said, "\x1b" in said, "00.jpg: the photo cannot be read" in said) == (0, True, False, True)
    results = json.loads(out.with_suffix(".json").read_text())
    assert (results["query"], results["photos"], len(results["results"])) == ("<b>dog -0.5 cat", 14, 14)
    one = next(one for one in results["results"] if one["path"] == hostile)
    assert one.keys() == {"path", "score", "id", "caption", "row", "uncertainty"}
    page = out.with_suffix(".html").read_text()
    assert page.count('src="data:image/') == 13
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


PAGE = Path(__file__).parents[3] / "docs" / "export.md"


def test_libraries_and_features_for_other_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of docs/export.md run as they stand there, with stand-ins for the packages of others."""
    monkeypatch.chdir(tmp_path)
    model, photos = load(model_folder(tmp_path / "run/model")), photos_in(tmp_path / "photos")
    Index(photos=photos, out=tmp_path / "library", model="run/model", device="cpu").run()
    engines = {"LanceDB": MagicMock(), "Ray Data": MagicMock()}
    defined = {}
    for heading, package in (("LanceDB", "lancedb"), ("Ray Data", "ray")):
        monkeypatch.setitem(sys.modules, package, engines[heading])
        code = re.search(rf"^### {heading}$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        exec(code[1], defined)  # type: ignore[index]
    table = engines["LanceDB"].connect.return_value.create_table.call_args.args[1]
    library, vectors = Library(tmp_path / "library"), np.array(table["vector"].to_pylist())
    found = find(library, model, [("a dog on the beach", 1)], 12)
    nearest = (vectors @ defined["query"].ravel()).argsort()[::-1].tolist()
    assert [table["path"][row].as_py() for row in nearest] == [library.cells(one.row)["path"] for one in found]
    files = [path.read_bytes() for path in sorted(photos.glob("*.jpg"))]
    features = defined["Embed"]("run/model")({"bytes": np.array(files, object), "path": ["a"] * len(files)})["vec"]
    np.testing.assert_allclose(features, model.encode_image(files)["vec"], atol=1e-6)
