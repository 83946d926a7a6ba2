"""The catalogue of a set of tars: a start opens no tar and no index, and notices whatever has changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kiloword.data import files
from kiloword.data.sources.open import open_source
from kiloword.data.tars import catalogue
from servers import Server
from tars import pairs, write_tar

TARS = 7


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "LEAST", TARS - 1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for n in range(TARS):
        write_tar(tmp_path / "data" / f"{n}.tar", pairs(n + 1, first=100 * n))
    return tmp_path / "data"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tars and indexes that are opened from here on."""
    names, real = list[str](), files.PositionlessFile.__init__

    def noted(file: files.PositionlessFile, path: Path) -> None:
        names.append(path.name.split("-")[-1])
        real(file, path)

    monkeypatch.setattr(files.PositionlessFile, "__init__", noted)
    return names


def said(source: Any) -> Any:
    """All that opening tells."""
    return source.fingerprint, source.notes, [source.key(row) for row in range(len(source))]


def afresh(data: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As `said`, without a catalogue."""
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "LEAST", 10**9)
        return said(open_source(str(data)))


def kept(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache").rglob("*.kwcatalogue")
    return file


def test_a_start_opens_nothing(data: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = afresh(data, monkeypatch)
    open_source(str(data))
    opened.clear()
    source = open_source(str(data))
    assert opened == []
    assert len(source) == TARS * (TARS + 1) // 2
    assert said(source) == expected


def test_small_sets_have_none(tmp_path: Path, data: Path) -> None:
    open_source(str(data / f"{{0..{TARS - 3}}}.tar"))
    assert not (tmp_path / "cache").exists()


def cut(data: Path) -> None:
    with (data / "3.tar").open("r+b") as file:
        file.truncate(2000)


def replaced(data: Path) -> None:
    write_tar(data / "3.tar", pairs(5, first=900))


def gone(data: Path) -> None:
    (data / "3.tar").unlink()


def more(data: Path) -> None:
    write_tar(data / "10.tar", pairs(2, first=1000))


def no_index(data: Path) -> None:
    (data / "3.tar.kwindex").unlink()


def damaged_index(data: Path) -> None:
    (data / "3.tar.kwindex").write_bytes(b"noise")


CHANGES = [cut, replaced, gone, more, no_index, damaged_index]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_what_has_changed_is_noticed(
    data: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """A start says what it would say without a catalogue, and what is left as it was is not opened."""
    before = said(open_source(str(data)))
    change(data)
    opened.clear()
    source = open_source(str(data))
    assert set(opened) <= {"3.tar", "3.tar.kwindex", "10.tar", "10.tar.kwindex"}
    after = said(source)
    assert after == afresh(data, monkeypatch)
    assert (after == before) == (change in (no_index, damaged_index))
    opened.clear()
    open_source(str(data))
    assert opened == []


def test_a_damaged_catalogue_is_made_again(tmp_path: Path, data: Path) -> None:
    expected = said(open_source(str(data)))
    whole = kept(tmp_path).read_bytes()
    harms = [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(0, len(whole), 97)]
    for harm in (b"", b"\n{}", b"noise", whole[:-1], *harms):
        kept(tmp_path).write_bytes(harm)
        assert said(open_source(str(data))) == expected
        assert kept(tmp_path).read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_time_alone(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = said(open_source(str(data)))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "file"))
    assert said(open_source(str(data))) == expected


def test_several_at_once(tmp_path: Path, data: Path) -> None:
    """None has a catalogue yet."""
    with ThreadPoolExecutor(4) as pool:
        found = [said(source) for source in pool.map(open_source, [str(data)] * 4)]
    assert found == [found[0]] * 4
    assert {path.suffix for path in kept(tmp_path).parent.iterdir()} == {".kwcatalogue"}
    assert said(open_source(str(data))) == found[0]


def test_a_tar_twice_and_a_name_that_is_not_utf8(data: Path, opened: list[str]) -> None:
    os.rename(data / "6.tar", os.fsencode(data) + b"/\xff.tar")
    for _ in range(2):
        opened.clear()
        assert len(open_source(str(data))) == TARS * (TARS + 1) // 2
    assert opened == []
    twice = [data / "3.tar"] * TARS
    assert [header.samples for header in catalogue.headers(twice)] == [4] * TARS


def test_remote_tars(tmp_path: Path, data: Path, opened: list[str]) -> None:
    """Their tags stand for their times."""
    files = {path.name: path.read_bytes() for path in data.iterdir()}
    with Server(files) as server:
        src = f"{server.url}/{{0..{TARS - 1}}}.tar"
        expected = said(open_source(src))
        shutil.rmtree(data)
        assert said(open_source(src)) == expected
        catalogued = kept(tmp_path).read_bytes()
        assert open_source(src).fingerprint == expected[0]
        assert kept(tmp_path).read_bytes() == catalogued
        server.files["3.tar"] = write_tar(tmp_path / "other.tar", pairs(9)).read_bytes()
        assert len(open_source(src)) == TARS * (TARS + 1) // 2 + 5
        assert kept(tmp_path).read_bytes() != catalogued


def test_a_row_does_not_look_at_all_tars(data: Path) -> None:
    """Of 40,000 tars, each row would take milliseconds."""

    class Tars(list[Any]):
        def __iter__(self) -> Any:
            pytest.fail("all tars were looked at")

    source: Any = open_source(str(data))
    source.tars = Tars(source.tars)
    assert source.record(20).captions == source.captions(20)
    assert len(source.stored(20)) == 4
    assert source.remote_blocks(20) == []
