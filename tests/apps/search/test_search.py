"""A library follows its folder, searches agree with the model, and what data says stays text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from folders import model_folder
from kiloword.api import Matcher, load
from kiloword.apps.search import command, index, nearest, rank
from kiloword.apps.search.library import FILE, Library
from kiloword.apps.search.photos import scan
from kiloword.apps.search.rank import Ranker
from kiloword.cli.main import main
from kiloword.models.trust import NONE
from photo_folders import draw, photos_in, refused

METHODS = ("siglip", "llip", "prolip")


@pytest.fixture(scope="module", params=METHODS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, Matcher]:
    """A library of 12 photos by a fresh model, and the model."""
    root = tmp_path_factory.mktemp(request.param)
    model_folder(root / "model", request.param)
    index.main(photos_in(root / "photos"), str(root / "model"), root / "library", device="cpu")
    return Library(root / "library"), load(root / "model")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    model_folder(tmp_path / "model")
    index.main(photos_in(tmp_path / "photos"), str(tmp_path / "model"), tmp_path / "library", device="cpu")
    return tmp_path / "library"


def again(library: Path) -> Library:
    index.main(library.parent / "photos", None, library, device="cpu")
    return Library(library)


def test_a_library_knows_its_model_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "here" / "model")
    monkeypatch.chdir(tmp_path / "here")
    index.main(photos_in(Path("photos")), "model", Path("library"), device="cpu")
    monkeypatch.chdir(tmp_path)
    command.main(Path("here/library"), "a dog", device="cpu")


def test_a_library_knows_a_named_model_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    model_folder(here / "model")
    monkeypatch.chdir(here)
    index.main(photos_in(Path("photos")), "hf:model", Path("library"), device="cpu")
    monkeypatch.chdir(tmp_path)
    command.main(Path("here/library"), "a dog", device="cpu")
    index.main(here / "photos", None, Path("here/library"), device="cpu")
    (here / "model").rename(here / "moved")
    for words in (("search", "here/library", "a dog"), ("index", here / "photos", "--out", "here/library")):
        message = refused(capsys, *words)
        assert f"there is no {here / 'model' / 'config.json'}: " in message
        assert "Give the model that made the library by --model, if it was moved." in message
    command.main(Path("here/library"), "a dog", model="hf:here/moved", device="cpu")


def test_a_text_finds_what_the_model_scores_highest(made: tuple[Library, Matcher]) -> None:
    library, matcher = made
    scores = matcher.score([library.photo(row) for row in range(12)], ["two cats and a dog"])[:, 0]
    hits = Ranker(library, matcher).by_text("two cats and a dog", 5)
    assert [hit.score for hit in hits] == pytest.approx(scores.sort(descending=True).values[:5].tolist(), abs=2e-3)
    for hit in hits:
        assert hit.score == pytest.approx(float(scores[hit.row]), abs=2e-3)


def test_uncertainties_are_those_of_the_model(made: tuple[Library, Matcher]) -> None:
    library, matcher = made
    hits = Ranker(library, matcher).by_text("a dog", 12)
    if "log_var" not in library.features([0]):
        assert {hit.uncertainty for hit in hits} == {None}
        return
    own = matcher.uncertainty(matcher.encode_image([library.photo(hit.row) for hit in hits]))
    assert [hit.uncertainty for hit in hits] == pytest.approx(own.tolist(), rel=1e-3)


def test_a_photo_finds_itself_first(made: tuple[Library, Matcher]) -> None:
    library, matcher = made
    vec = rank.query_image(matcher, library.photo(7).read_bytes())
    ranker = Ranker(library, matcher)
    assert ranker.by_image(vec, 1)[0].row == 7
    assert 7 not in [hit.row for hit in ranker.by_image(vec, 12, but=7)]
    assert {library.path(hit.row)[:4] for hit in ranker.by_image(vec, 12, within="DEEP")} == {"deep"}


def test_features_of_rows_are_in_their_order(made: tuple[Library, Matcher]) -> None:
    library, matcher = made
    rows = [9, 2, 5, 2]
    stored, fresh = library.features(rows), matcher.encode_image([library.photo(row) for row in rows])
    assert stored.keys() == fresh.keys()
    for name, value in fresh.items():
        torch.testing.assert_close(stored[name], value, atol=5e-3, rtol=2e-3)


def test_an_update_encodes_only_what_is_new_or_changed(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(zip(paths(library), Library(library).ids.tolist(), strict=True))
    photos, seen = library.parent / "photos", []
    encode = index.encode
    monkeypatch.setattr(index, "encode", lambda m, images: seen.append(len(images)) or encode(m, images))
    draw(photos / "00.jpg", 100)
    os.utime(photos / "00.jpg", ns=(1, 1))
    (photos / "02.jpg").unlink()
    draw(photos / "deep" / "new.jpg", 101)
    after = again(library)
    assert sum(seen) == 2
    assert sorted(paths(library)) == sorted(scan(photos).stamps)
    kept = {path: number for path, number in zip(paths(library), after.ids.tolist(), strict=True) if path in before}
    assert {path for path in kept if kept[path] != before[path]} == {"00.jpg"}
    assert len(after.parts) == 1  # merged
    assert len(list(library.glob("*.parquet"))) == 1


def test_photos_that_are_there_are_not_looked_at_when_others_are_added(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(library.parent / "photos" / "another.jpg", 102)
    monkeypatch.setattr(Library, "ids", property(lambda self: pytest.fail("numbers of all photos")))
    dropped = []
    commit = Library.commit

    def noted(self: Library, rows: Any = None, drop: frozenset[str] = frozenset(), **changed: Any) -> None:
        dropped.append(drop)
        commit(self, rows, drop, **changed)

    monkeypatch.setattr(Library, "commit", noted)
    made = again(library)
    assert dropped == [frozenset()]
    monkeypatch.undo()
    assert "another.jpg" in paths(library)
    assert made.ids.tolist() == list(made.row_of) == list(range(len(made)))


def paths(library: Path) -> list[str]:
    return [path for part in Library(library).parts for path in part.paths]


def test_a_killed_index_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = model_folder(tmp_path / "model"), tmp_path / "library"
    photos, encode = photos_in(tmp_path / "photos"), index.encode
    monkeypatch.setattr(index, "COMMIT_S", -1.0)
    calls: list[int] = []

    def killed(matcher: Matcher, images: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(len(images))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(matcher, images)

    monkeypatch.setattr(index, "encode", killed)
    with pytest.raises(KeyboardInterrupt, match="8 photos are in the library"):
        index.main(photos, str(model), out, batch=4, device="cpu")
    index.main(photos, None, out, batch=4, device="cpu")
    assert sum(calls[4:]) == 4
    assert sorted(paths(out)) == sorted(scan(photos).stamps)


def test_bad_photos_are_named_and_the_others_indexed(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = library.parent / "photos"
    (photos / "bad.jpg").write_bytes(b"no image")
    scanned = scan(photos)
    (photos / "00.jpg").write_bytes(b"")
    (photos / "made").mkdir()
    for name in ("a.HEIC", "made/library.json", "made/part.parquet", "b.heic", "c.mov", "d", ".hidden", "00.txt"):
        (photos / name).write_bytes(b'{"format": "kiloword-library-1"}' if name.endswith(".json") else b"")
    assert len(again(library)) == 12
    error = capsys.readouterr().err
    assert "1 path skipped, .mov is no suffix of an image: c.mov" in error
    assert "1 path skipped, no suffix of an image: d\n" in error
    assert "not an image in a known format: bad.jpg" in error
    assert "the image has zero bytes, the library keeps what it was before: 00.jpg" in error
    assert "part.parquet" not in error
    assert "bad.jpg" in scanned.stamps


def test_a_photo_that_vanishes_while_indexing_is_skipped(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = library.parent / "photos"
    draw(photos / "gone.jpg", 50)
    scanned = scan(photos)
    (photos / "gone.jpg").unlink()
    matcher = load(library.parent / "model")
    (skipped,) = index.update(Library(library), photos, scanned, matcher)
    assert (skipped.key, skipped.reason) == ("gone.jpg", "the file is gone")


def test_names_that_are_not_utf8(library: Path) -> None:
    photos = library.parent / "photos"
    draw(photos / "x.jpg", 60)
    strange = os.fsdecode(b"\xff\x1b[31m.jpg")
    (photos / "x.jpg").rename(photos / strange)
    indexed = again(library)
    assert strange in paths(library)
    row = paths(library).index(strange)
    assert indexed.photo(row).is_file()


def test_the_table_is_open(made: tuple[Library, Matcher]) -> None:
    """Other programs read it without kiloword."""
    library, _ = made
    table = pq.read_table(library.folder / f"{library.file.parts[0]}.parquet")
    assert {"id", "path", "caption", "vec"} <= set(table.column_names)
    assert np.linalg.norm(np.array(table["vec"].to_pylist()), axis=1) == pytest.approx(np.ones(12), abs=1e-3)


def test_duckdb_finds_the_same_photos(library: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb, which no other part uses")
    matcher = load(library.parent / "model")
    hits = Ranker(Library(library), matcher).by_text("a dog", 3)
    vec = matcher.encode_text("a dog")["vec"].tolist()
    rows = duckdb.execute(
        f"select path, list_dot_product(vec, $1::float[]) as score from '{library}/*.parquet' order by 2 desc limit 3",
        [vec],
    ).fetchall()
    assert [path for path, _ in rows] == [Library(library).path(hit.row) for hit in hits]


def test_recall_of_a_shortlist(made: tuple[Library, Matcher], monkeypatch: pytest.MonkeyPatch) -> None:
    library, matcher = made
    ranker = Ranker(library, matcher)
    assert rank.measure(ranker) == {}  # all 12 photos are scored
    monkeypatch.setattr(rank, "SHORTLIST", 10)
    measured = rank.measure(ranker)
    if library.file.shapes:
        assert 0.8 <= measured["recall@10"] <= 1  # 10 of 12 photos are listed
        assert (measured["shortlist"], measured["photos"]) == (10, 12)
    else:
        assert measured == {}


def test_an_approximate_index_follows_the_library(
    made: tuple[Library, Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("usearch.index", reason="needs usearch, the extra search")
    library, matcher = made
    exact = Ranker(library, matcher).by_text("a dog", 5)
    monkeypatch.setattr(nearest, "LARGE", 3)
    assert Ranker(library, matcher).nearest is None  # not made yet
    nearest.update_nearest(library)
    ranker = Ranker(Library(library.folder), matcher)
    assert ranker.nearest is not None
    listed = ranker.by_text("a dog", 5)
    assert [match.row for match in listed] == [match.row for match in exact]
    assert [match.score for match in listed] == pytest.approx([match.score for match in exact], abs=1e-5)
    monkeypatch.setattr(rank, "SHORTLIST", 11)
    assert rank.measure(ranker)["recall@10"] > 0.8
    photos = Path(library.file.folder)
    draw(photos / "extra.jpg", 300)
    index.main(photos, None, library.folder, device="cpu")
    updated = Ranker(Library(library.folder), matcher)
    assert updated.nearest is not None
    vec = rank.query_image(matcher, (photos / "extra.jpg").read_bytes())
    assert updated.library.path(updated.nearest.rows(vec)[0]) == "extra.jpg"
    (photos / "extra.jpg").unlink()
    index.main(photos, None, library.folder, device="cpu")
    after = Ranker(Library(library.folder), matcher)
    assert after.nearest is not None
    assert len(after.nearest.rows(vec)) == 12


def test_bad_input(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = model_folder(tmp_path / "other", "llip")
    photos, model = tmp_path / "photos", tmp_path / "model"
    assert "made by another model" in refused(capsys, "search", library, "a dog", "--model", other)
    assert "made by another model" in refused(capsys, "index", photos, "--model", other, "--out", library)
    assert "the query is empty" in refused(capsys, "search", library, "  ")
    assert "the query has 10,001 characters" in refused(capsys, "search", library, "b" * 10_001)
    assert "needs a text or --like PHOTO, one of them, and got neither" in refused(capsys, "search", library)
    assert "and got both" in refused(capsys, "search", library, "a dog", "--like", tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes(b"no image")
    message = refused(capsys, "search", library, "--like", tmp_path / "a.jpg")
    assert f"the image {tmp_path / 'a.jpg'} cannot be used: not an image" in message
    main(["search", str(library), "a dog", "--within", "2030/"])
    assert "no photo of the library has '2030/' in its path" in capsys.readouterr().err
    said = refused(capsys, "search", library, "--like", "https://example.org/a.jpg")
    assert "the URL https://example.org/a.jpg, and kiloword fetches nothing" in said
    assert "cannot be read" in refused(capsys, "search", library, "--like", tmp_path / "none.jpg")
    assert "it has no library.json" in refused(capsys, "search", photos, "a dog")
    assert "needs a model" in refused(capsys, "index", photos, "--out", tmp_path / "new")
    assert "holds other files" in refused(capsys, "index", photos, "--model", model, "--out", photos)
    (tmp_path / "empty").mkdir()
    assert "holds no images" in refused(capsys, "index", tmp_path / "empty", "--out", library)
    (tmp_path / "empty" / "0.tar").touch()
    assert "unpack it first: 0.tar" in refused(capsys, "index", tmp_path / "empty", "--out", library)
    photos_in(tmp_path / "more", 2)
    assert "choose another --out" in refused(capsys, "index", tmp_path / "more", "--out", library)
    (library / "part-000001.parquet").write_bytes(b"PAR1")
    assert "missing or damaged. The same `kiloword index`" in refused(capsys, "search", library, "a dog")
    assert len(again(library)) == 12


def test_a_path_that_leaves_the_folder_is_refused(library: Path) -> None:
    opened = Library(library)
    for path in ("../model/config.json", "/etc/passwd", "a\0.jpg"):
        opened.parts[0].paths[0] = path
        with pytest.raises(ValueError, match="outside its folder"):
            opened.photo(0)
    stored = json.loads((library / FILE).read_text())
    (library / FILE).write_text(json.dumps(stored | {"parts": ["../model"]}))
    with pytest.raises(ValueError, match="outside its folder"):
        Library(library)


def test_results_are_a_table_json_and_a_page(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = library.parent / "photos"
    hostile = "<img src=x onerror=alert(1)>\x1b[31m.jpg"
    draw(photos / hostile, 70)
    (photos / f"{hostile[:-4]}.txt").write_text("<script>alert(2)</script>")
    again(library)
    capsys.readouterr()
    out = library.parent / "out"
    main(["search", str(library), "<b>dog", "--top", "13", "--json", f"{out}.json", "--page", f"{out}.html"])
    assert "\x1b" not in capsys.readouterr().out
    results = json.loads(out.with_suffix(".json").read_text())
    assert len(results["results"]) == 13
    assert hostile in [one["path"] for one in results["results"]]
    page = out.with_suffix(".html").read_text()
    assert page.count('<img src="data:image/') == 13
    for word in ("<script", "<img src=x", "<b>dog", "\x1b"):
        assert word not in page


@pytest.mark.parametrize("terminal", [False, True])
def test_whole_paths_are_printed(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    """Also in a terminal of 80 columns, which wraps them, and where another program reads them."""
    photos = library.parent / "photos"
    path = "/".join(["2024-08-31 a long day at the sea 🌊"] * 7) + "/photo.jpg"
    draw(photos / path, 70)
    again(library)
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "dumb")
    main(["search", str(library), "dog", "--top", "13"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15
    assert lines[0].split() == ["score", "photo"]
    (line,) = (line for line in lines if "sea" in line)
    assert re.fullmatch(r"[0-9]+ +-?0\.[0-9]{3}  " + re.escape(path), line)


def test_the_page_names_the_model_that_searched(library: Path) -> None:
    """The library's own may be gone: a copy elsewhere made the scores."""
    other, page = library.parent / "elsewhere", library.parent / "page.html"
    (library.parent / "model").rename(other)
    main(["search", str(library), "dog", "--model", str(other), "--page", str(page)])
    footer = page.read_text().split("<footer")[1]
    assert str(other) in footer
    assert str(library.parent / "model") not in footer.replace(str(other), "")


def test_words_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr("kiloword.apps.search.index.main", lambda *args: calls.append(args))
    words = "index p --out o --model m --batch 3 --workers 2 --device cpu --precision fp32"
    main(words.split())
    assert calls.pop() == (Path("p"), "m", Path("o"), 3, 2, "cpu", "fp32", NONE, None, None, None, False)
    monkeypatch.setattr("kiloword.apps.search.command.main", lambda *args: calls.append(args))
    words = "search l dog --top 3 --within a --json j --page h --open --model m --device cpu"
    main(words.split())
    expected = (Path("l"), "dog", None, 3, "a", Path("j"), Path("h"), True, "m", "cpu", "auto", NONE, None, None)
    assert calls.pop() == expected
