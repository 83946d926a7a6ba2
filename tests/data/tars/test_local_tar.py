"""Tars that change while they are read, member by member; and what of a tar is read at all."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiloword.data import files
from kiloword.data.tars import index, shards
from kiloword.data.tars.index import open_index, scan
from kiloword.data.tars.local import LocalTar, index_as_it_was
from kiloword.data.tars.shards import TarSource
from kiloword.types import BadSample
from tars import write_tar

OTHER = "0.tar is another file than when the run began"


def samples(count: int, text: str = "caption") -> list[tuple[str, bytes]]:
    return [
        (f"{n}.{s}", b"image" if s == "jpg" else f"{text} {n}".encode()) for n in range(count) for s in ("jpg", "txt")
    ]


def write(path: Path, members: list[tuple[str, bytes]], seconds: int) -> Path:
    """Args: seconds: its time of change."""
    write_tar(path, members)
    os.utime(path, (seconds, seconds))
    return path


def reason(read: Callable[[], object]) -> str:
    with pytest.raises(BadSample) as caught:
        read()
    return str(caught.value)


def opened(tar: Path) -> LocalTar:
    return LocalTar(tar, index_as_it_was(tar, open_index(tar).header.digest))


@pytest.mark.parametrize(
    ("now", "same"),
    [
        (samples(3), True),  # copied
        (samples(9), True),  # longer
        (samples(2), True),  # shorter: the samples that both have
        (samples(3, "longer text"), False),  # other lengths
        ([(name.replace("0", "7"), content) for name, content in samples(3)], False),  # other names
        (samples(1), False),  # of one sample nobody can tell
        ([("a.txt", b"no images")], False),
    ],
)
def test_a_tar_is_read_on_while_the_samples_that_both_have_lie_where_they_did(
    tmp_path: Path, now: list[tuple[str, bytes]], same: bool
) -> None:
    tar = write(tmp_path / "0.tar", samples(3), 1000)
    file = opened(tar)
    offset, size = scan(tar).place(0, "txt") or (0, 0)
    write(tar, now, 2000)
    for _ in range(2):  # the second time from memory
        if same:
            assert file.read(offset, size) == b"caption 0"
        else:
            assert reason(lambda: file.read(offset, size)) == OTHER


def test_a_tar_that_is_gone_or_cut_behind_an_open_file(tmp_path: Path) -> None:
    tar = write(tmp_path / "0.tar", samples(3), 1000)
    file = opened(tar)
    assert file.read(512, 5) == b"image"
    end = tar.stat().st_size
    assert reason(lambda: file.read(end - 3, 5)) == "0.tar has become shorter since it was indexed"
    again = opened(tar)
    tar.unlink()
    assert reason(lambda: again.read(512, 5)) == "0.tar is missing"
    assert file.read(512, 5) == b"image", "what is open stays"


def test_a_drive_that_fails_for_a_moment_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = write(tmp_path / "0.tar", samples(3), 1000)
    file = opened(tar)
    file.read(512, 5)

    def stale(fd: int, size: int, offset: int) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", stale)
        with pytest.raises(OSError, match=r"Stale file handle.*0\.tar") as caught:
            file.read(512, 5)
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, str(tar))
    write(tar, samples(4), 2000)  # seen, as it is opened again
    assert file.read(512, 5) == b"image"


def test_the_index_of_a_digest_is_found_or_the_tar_is_another(tmp_path: Path) -> None:
    tar = write(tmp_path / "0.tar", samples(3), 1000)
    digest = open_index(tar).header.digest
    assert index_as_it_was(tar, digest).header.samples == 3
    write(tar, samples(3), 2000)
    assert index_as_it_was(tar, digest, damaged=True).header.mtime_ns == 2000 * 10**9, "made again: the same samples"
    write(tar, samples(4), 3000)
    assert index_as_it_was(tar, digest).header.samples == 3, "as it was kept"
    assert reason(lambda: index_as_it_was(tar, "0" * 32)) == OTHER
    assert reason(lambda: index_as_it_was(tar, digest)) == OTHER, "its index is of the tar as it is now"
    tar.write_bytes(b"nothing")
    assert reason(lambda: index_as_it_was(tar, "0" * 32)) == OTHER
    tar.unlink()
    assert reason(lambda: index_as_it_was(tar, "0" * 32)) == "0.tar is missing"


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    file, pread = files.PositionlessFile(tmp_path / "x"), os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 7), offset))
    assert file.read(3, 20) == bytes(range(3, 23))
    assert file.read(90, 20) == bytes(range(90, 100))
    assert file.read(3, 0) == b""
    assert file.times() == ((tmp_path / "x").stat().st_size, (tmp_path / "x").stat().st_mtime_ns)


def test_a_file_is_closed_with_its_last_user_and_a_pipe_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    file = files.PositionlessFile(tmp_path / "pipe")
    number, close, closed = file._fd, os.close, list[int]()
    monkeypatch.setattr(os, "close", lambda fd: closed.append(fd) or close(fd))
    del file
    assert number in closed
    with pytest.raises(FileNotFoundError):
        files.PositionlessFile(tmp_path / "none")


@pytest.mark.parametrize("less", [0, 1])
def test_a_tar_that_ends_with_the_last_byte_of_a_sample(tmp_path: Path, less: int) -> None:
    """Without the padding behind it."""
    whole = write(tmp_path / "0.tar", samples(3), 1000)
    offset, size = scan(whole).place(2, "txt") or (0, 0)
    whole.write_bytes(whole.read_bytes()[: offset + size - less])
    source = TarSource("x", [whole])
    assert source.notes == [f"{whole}: cut at byte {offset + size - less:,}"]
    if less:
        assert reason(lambda: source.captions(2)) == "the tar ends in the middle of this sample"
    else:
        assert source.record(2).captions == ["caption 2"]
    assert source.record(1).captions == ["caption 1"]


def test_why_a_sample_of_a_cut_tar_lacks_a_member(tmp_path: Path) -> None:
    tars = [
        write(tmp_path / f"{n}.tar", [*samples(2)[:3], ("9.jpg", b"image"), ("9.txt", b"x")], 1000) for n in range(2)
    ]
    cut, _ = scan(tars[0]).place(2, "txt") or (0, 0)
    tars[0].write_bytes(tars[0].read_bytes()[: cut - 512])
    source = TarSource("x", tars)
    assert reason(lambda: source.record(1)) == "no caption", "this one was never there"
    assert reason(lambda: source.record(2)) == f"no caption (the tar is cut at byte {cut - 512:,})"
    assert reason(lambda: source.record(4)) == "no caption"
    assert source.record(5).key == "9"


def test_members_larger_than_anybody_should_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TarSource("x", [write(tmp_path / "0.tar", samples(2), 1000)])
    for name, most, said in (
        ("MAX_IMAGE", 4, "the image has 5 bytes, more than 4"),
        ("MAX_TEXT", 8, "the .txt has 9"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(shards, name, most)
            assert said in reason(lambda: source.record(0))
            patch.setattr(shards, name, most + 1)
            assert source.record(0).captions == ["caption 0"]


def test_rows_that_there_are_not(tmp_path: Path) -> None:
    source = TarSource("x", [write(tmp_path / f"{n}.tar", samples(2), 1000) for n in range(2)])
    for row in (-1, 4):
        for read in (source.record, source.key, source.captions, source.stored, source.question):
            with pytest.raises(IndexError, match=f"row {row} of 4"):
                read(row)
    assert [source.key(row) for row in range(4)] == ["0", "1"] * 2
    assert source.stored(3) == [b"image", b"caption 1", None, None]
    assert source.remote_blocks(0) == []
    assert (source.remote, source.classnames, source.templates) == (False, None, None)
    with pytest.raises(ValueError, match="x: no tars"):
        TarSource("x", [])


@pytest.mark.parametrize(("limit", "most"), [(1024, 128), (120, 20), (6, 2), (resource.RLIM_INFINITY, 128)])
def test_open_tars_follow_the_limit_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    tar = write(tmp_path / "0.tar", samples(2), 1000)
    source: Any = pickle.loads(pickle.dumps(TarSource("x", [tar])))
    assert [c.cache_parameters()["maxsize"] for c in (source._index, source._file)] == [most, most]
    assert source.record(1).captions == ["caption 1"]


def test_a_digest_of_members_does_not_depend_on_how_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = write(tmp_path / "0.tar", [*samples(2), ("2.png", b"")], 1000)
    found = index._contents(tar, scan(tar))
    monkeypatch.setattr(index, "_READ", 4)
    assert index._contents(tar, scan(tar)) == found
    write(tar, [*samples(1), ("1.jpg", b"imagE"), *samples(2)[3:], ("2.png", b"")], 1000)
    assert index._contents(tar, scan(tar)) != found


def test_what_belongs_to_no_sample_is_left(tmp_path: Path) -> None:
    names = [
        "a.jpg",
        "a.PNG",
        "d/a.webp",
        "d/__a.jpg",
        "__d/a.jpg",
        "a.b.jpg",
        ".a.jpg",
        "jpg",
        "a.md",
        "a.JSON",
        "b.txt",
    ]
    found = scan(write_tar(tmp_path / "0.tar", [(name, name.encode()) for name in names]))
    assert [found.key(row) for row in range(len(found.table))] == ["a", "d/a", "__d/a", "b"]
    raw = (tmp_path / "0.tar").read_bytes()
    places = [[found.place(row, part) for part in ("image", "txt", "json", "cls")] for row in range(4)]
    texts = [[place and raw[place[0] : sum(place)].decode() for place in row] for row in places]
    assert texts == [
        ["a.jpg", None, "a.JSON", None],  # of two images the first counts
        ["d/a.webp", None, None, None],
        ["__d/a.jpg", None, None, None],
        [None, "b.txt", None, None],
    ]
