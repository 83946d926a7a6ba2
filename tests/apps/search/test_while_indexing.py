"""Searches and the served site while `kiloword index` changes the library, or makes it anew."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from folders import model_folder
from kiloword.api import load
from kiloword.apps.search import command, index, nearest, serve
from kiloword.apps.search.library import FILE, Library
from kiloword.apps.search.rank import Ranker
from kiloword.apps.search.site import Site
from photo_folders import draw, photos_in

QUERY = "q=a+dog"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "model")


def again(root: Path, model: Path | None = None, name: str = "photos") -> None:
    index.main(root / name, str(model) if model else None, root / "library", device="cpu")


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    photos_in(tmp_path / "photos", 8)
    again(tmp_path, model)
    return tmp_path


@pytest.fixture
def site(root: Path, model: Path) -> Site:
    return Site(Library(root / "library"), load(model), "model")


def page(site: Site, query: str = QUERY) -> str:
    answer = site.get("/", query)
    assert answer.status == 200
    return answer.body.decode()


def shown(html: str) -> list[tuple[str, str]]:
    """Path and score of each photo of a page."""
    return [(path, score) for score, path in re.findall(r"</b> (-?[0-9.]+).*?<div>([^<]*)</div></li>", html)]


def thumbs(html: str) -> list[str]:
    return re.findall(r'src="(/thumb/[^"]+)"', html)


def once(change: Callable[[], object]) -> Callable[[], None]:
    """A call that changes something the first time alone."""
    left = [change]
    return lambda: None if not left else left.pop()() and None


def test_scores_stand_beside_their_photos(site: Site, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request takes up the changed library while one is answered."""
    before = shown(page(site))
    encode_text = site.matcher.encode_text

    def changed() -> None:
        (root / "photos/00.jpg").unlink()
        again(root)
        site.get("/", "")

    change = once(changed)
    monkeypatch.setattr(site.matcher, "encode_text", lambda texts: change() or encode_text(texts))
    during = shown(page(site))
    assert during == before
    assert shown(page(site)) == [one for one in before if one[0] != "00.jpg"]


def test_a_library_that_cannot_be_opened_is_tried_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed, failures = Library.refreshed, [1]

    def failing(self: Library) -> Library:
        if failures and failures.pop():
            raise ValueError("part-000001.parquet is missing or damaged.")
        return refreshed(self)

    monkeypatch.setattr(Library, "refreshed", failing)
    assert len(shown(page(site))) == 8
    failures[:] = [1] * 100
    answer = site.get("/", QUERY)
    assert (answer.status, "missing or damaged" in answer.body.decode()) == (503, True)
    assert site.post(b"").status == 503
    failures.clear()
    assert site.get("/", QUERY).status == 200


def test_a_library_of_another_model_is_refused(site: Site, root: Path) -> None:
    other = model_folder(root / "other", "llip")
    shutil.rmtree(root / "library")
    again(root, other)
    answer = site.get("/", QUERY)
    assert (answer.status, "another model" in answer.body.decode()) == (503, True)


@pytest.mark.slow
def test_many_requests_while_an_index_works(site: Site, root: Path) -> None:
    """Each page shows the score of each photo, however requests and changes fall together."""
    draw(root / "photos/aa.jpg", 90)
    again(root)
    expected = dict(shown(page(site)))
    ended, wrong = threading.Event(), list[object]()

    def asks() -> None:
        while not ended.is_set():
            try:
                answer = site.get("/", QUERY)
                html = answer.body.decode()
                pairs = shown(html)
                if answer.status != 200 or not pairs or any(expected[path] != score for path, score in pairs):
                    wrong.append((answer.status, html))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=asks) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        (root / "photos/aa.jpg").rename(root / "photos/aa")
        again(root)
        (root / "photos/aa").rename(root / "photos/aa.jpg")
        again(root)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong


def rebuilt(root: Path, model: Path) -> None:
    """A library of other photos at the same path, whose numbers and parts have the same names."""
    shutil.rmtree(root / "library")
    for n in range(8):
        draw(root / "others" / f"other-{n}.jpg", 100 + n)
    again(root, model, "others")


def test_a_library_made_anew_is_read_anew(site: Site, root: Path, model: Path) -> None:
    before = thumbs(page(site))
    photos = {address: site.get(address, "").body for address in before}
    rebuilt(root, model)
    html = page(site)
    assert {path for path, _ in shown(html)} == {f"other-{n}.jpg" for n in range(8)}
    expected, library = Library(root / "library"), site.ranker.library
    torch.testing.assert_close(library.features(range(8))["vec"], expected.features(range(8))["vec"])
    after = thumbs(html)
    assert not set(before) & set(after)  # a browser keeps what an address had
    assert not set(photos.values()) & {site.get(address, "").body for address in after}
    assert {site.get(address, "").status for address in before} == {404}


def test_two_libraries_have_other_addresses(site: Site, root: Path, model: Path) -> None:
    """One after the other on one port."""
    before = thumbs(page(site))
    rebuilt(root, model)
    assert not set(before) & set(thumbs(page(Site(Library(root / "library"), load(model), "model"))))


def test_parts_of_the_same_library_are_kept(root: Path) -> None:
    library = Library(root / "library")
    draw(root / "photos/zz.jpg", 90)
    (part,) = library.parts
    library_json = json.loads((root / "library" / FILE).read_text())
    (root / "library" / FILE).write_text(json.dumps(library_json))
    after = library.refreshed()
    assert after is not library
    assert after.parts == [part]


@pytest.mark.parametrize("stored", ["", '"><script>', "../"])
def test_a_library_without_an_id_gets_one(root: Path, model: Path, stored: str) -> None:
    """Libraries of earlier versions; what stands in the file reaches no page as it is."""
    path = root / "library" / FILE
    fields = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: value for name, value in fields.items() if name != "id"} | ({"id": stored} if stored else {}))
    )
    site = Site(Library(root / "library"), load(model), "model")
    before = thumbs(page(site))
    assert len(before) == 8
    assert all(site.get(address, "").status == 200 for address in before)
    assert thumbs(page(Site(Library(root / "library"), load(model), "model"))) == before
    draw(root / "photos/zz.jpg", 90)
    again(root)
    assert re.fullmatch("[0-9a-f]{16}", json.loads(path.read_text())["id"])
    assert set(before) < set(thumbs(page(site)))


def test_an_approximate_index_belongs_to_one_library(root: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("usearch.index", reason="needs usearch, the extra search")
    monkeypatch.setattr(nearest, "LARGE", 3)
    nearest.update_nearest(Library(root / "library"))
    assert nearest.open_nearest(Library(root / "library")) is not None
    monkeypatch.setattr(nearest, "LARGE", 100)
    rebuilt(root, model)
    monkeypatch.setattr(nearest, "LARGE", 3)
    assert nearest.open_nearest(Library(root / "library")) is None


def changed_by(root: Path) -> Callable[[], None]:
    """Add a photo once, and index again: the part of the others is joined with the new one and removed."""

    def change() -> None:
        draw(root / "photos/zz.jpg", 90)
        again(root)

    return once(change)


def test_a_search_while_an_index_works(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change, opened = changed_by(root), command.opened_for

    def slow(*args: Any) -> Any:
        change()  # while the model loads
        return opened(*args)

    monkeypatch.setattr(command, "opened_for", slow)
    command.main(root / "library", "a dog", device="cpu", json=root / "hits.json")
    assert "9 of 9 photos" in capsys.readouterr().out
    assert len(json.loads((root / "hits.json").read_text())["results"]) == 9


@pytest.mark.parametrize("photo", [None, "photos/00.jpg"])
def test_a_failed_read_is_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], photo: str | None
) -> None:
    change, near = changed_by(root), Ranker.near

    def late(self: Ranker, vec: torch.Tensor) -> torch.Tensor:
        change()
        return near(self, vec)

    monkeypatch.setattr(Ranker, "near", late)
    like = None if photo is None else root / photo
    command.main(root / "library", None if like else "a dog", like, device="cpu")
    assert "9 of 9 photos" in capsys.readouterr().out


def test_damage_is_still_an_error_of_a_search(root: Path) -> None:
    (root / "library/part-000001.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="missing or damaged"):
        command.main(root / "library", "a dog", device="cpu")


def test_a_library_is_opened_while_an_index_works(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library.json is read, and then the parts that it names are removed."""
    change = changed_by(root)
    from kiloword.apps.search import library as module

    part = module.LibraryPart

    def late(*args: Any) -> Any:
        monkeypatch.setattr(module, "LibraryPart", part)
        change()
        return part(*args)

    monkeypatch.setattr(module, "LibraryPart", late)
    assert len(Library(root / "library")) == 9


def test_a_server_starts_while_an_index_works(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change, opened = changed_by(root), serve.opened
    sites: list[Site] = []

    def slow(*args: Any) -> Any:
        change()
        return opened(*args)

    def stopped(self: serve.SearchServer) -> None:
        sites.append(self.site)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "opened", slow)
    monkeypatch.setattr(serve.SearchServer, "serve_forever", stopped)
    serve.main(root / "library", port=0, device="cpu")
    assert "9 photos at http://127.0.0.1" in capsys.readouterr().out
    assert len(sites[0].ranker.library) == 9
