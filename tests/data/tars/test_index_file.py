"""Indexes on disk: what is read of them, when, and what becomes of damaged ones."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counting import opened_in
from kiloword.data import files
from kiloword.data.sources.open import open_source
from kiloword.data.tars.index import (
    BLOCK,
    Header,
    Index,
    make_index,
    open_file,
    open_index,
    parse_index,
    write_index,
)
from kiloword.data.tars.shards import TarSource
from tars import write_tar

ROWS = 2 * BLOCK + 76  # of a tar: two whole blocks and a part of a third


def many(folder: Path, tars: int, samples: int = ROWS) -> Path:
    """A folder of `tars` names of one tar, whose images are no images, and of its index."""
    members = [(f"{n:05d}.{suffix}", b"%d" % n) for n in range(samples) for suffix in ("jpg", "txt")]
    first = write_tar(folder / "000.tar", members)
    open_index(first)
    for n in range(1, tars):
        os.link(first, folder / f"{n:03d}.tar")
        os.link(f"{first}.kwindex", folder / f"{n:03d}.tar.kwindex")
    return folder


def read_by(action: Callable[[], Any]) -> int:
    """Bytes that this process reads from files meanwhile."""

    def counted() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = counted()
    action()
    return counted() - before


def captions(source: Any) -> list[list[str]]:
    return [source.captions(row) for row in range(len(source))]


def synthetic(samples: int) -> Index:
    """Keys of several lengths, every third sample without a text."""
    keys = [f"{'é' * (n % 3)}{n}".encode() for n in range(samples)]
    table = np.arange(9 * samples, dtype=np.int64).reshape(-1, 9)
    table[::3, 2:4] = -1
    table[:, -1] = np.cumsum([len(key) for key in keys])
    return make_index(Header(size=1 << 40, mtime_ns=1, samples=samples, digest=""), table, b"".join(keys))


@pytest.mark.parametrize("samples", [1, BLOCK - 1, BLOCK, BLOCK + 1, 20 * BLOCK + 3])
def test_blocks_are_the_index(tmp_path: Path, samples: int) -> None:
    index = synthetic(samples)
    with (tmp_path / "x").open("wb") as out:
        write_index(out, index)
    file = open_file(tmp_path / "x")
    assert file is not None
    assert file.header == index.header
    assert open_file(tmp_path / "none") is None
    for row in {0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, samples - 2, samples - 1} & set(range(samples)):
        block = file.block(row // BLOCK)
        assert block is not None
        assert block.key(row % BLOCK) == index.key(row)
        assert block.place(row % BLOCK, "txt") == index.place(row, "txt")
        assert len(block.table) == min(BLOCK, samples - row // BLOCK * BLOCK)


def test_opening_reads_no_table(tmp_path: Path) -> None:
    """What is read at the start grows with tars, not with samples; a row then costs its block."""
    data = many(tmp_path / "data", 24)
    assert (data / "000.tar.kwindex").stat().st_size > 72 * ROWS
    assert read_by(lambda: open_source(str(data))) < 24 * 6000
    source: Any = open_source(str(data))
    assert len(source) == 24 * ROWS
    assert read_by(lambda: source.key(5 * ROWS + BLOCK)) < 6000 + 100 * BLOCK
    assert read_by(lambda: source.key(5 * ROWS + BLOCK + 1)) < 200  # it is in memory


@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_whatever_byte_is_damaged(tmp_path: Path, when: str) -> None:
    """The samples stay what they are, and the index is made again: at once, or when the block is asked for."""
    data = many(tmp_path / "data", 1)
    made: Any = open_source(str(data))
    expected, file = captions(made), data / "000.tar.kwindex"
    whole, keys = file.read_bytes(), [made.key(row) for row in range(ROWS)]
    line = whole.index(b"\n")
    places = np.random.default_rng(0).integers(line + 1, len(whole), 3).tolist()
    for place in (0, whole.index(b'"digest":"') + 12, line - 1, line, *places, line + 72 * BLOCK, len(whole) - 1):
        source: Any = open_source(str(data))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if when == "before it is opened":
            source = open_source(str(data))
        assert source.fingerprint == made.fingerprint
        assert [source.key(row) for row in range(ROWS)] == keys
        assert [source.captions(row) for row in (0, BLOCK, ROWS - 1)] == [expected[row] for row in (0, BLOCK, ROWS - 1)]
        if when == "before it is opened" or place > line:
            assert file.read_bytes() == whole
        file.write_bytes(whole)


@pytest.mark.parametrize("times", [1, 2, 3, 4, 5])
def test_an_index_that_cannot_be_read_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    source, failures = open_source(str(many(tmp_path / "data", 1, 3))), iter(range(times))
    real = files.PositionlessFile.read

    def stutter(file: files.PositionlessFile, offset: int, size: int) -> bytes:
        if next(failures, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, offset, size)

    monkeypatch.setattr(files.PositionlessFile, "read", stutter)
    if times == 5:
        with pytest.raises(OSError, match=r"Input/output error: '.*000.tar'"):
            source.key(1)  # type: ignore[attr-defined]
    assert source.key(1) == "00001"  # type: ignore[attr-defined]


def test_an_index_of_an_earlier_version_is_made_again(tmp_path: Path) -> None:
    data = many(tmp_path / "data", 1)
    open_index(data / "000.tar")
    file = data / "000.tar.kwindex"
    whole = file.read_bytes()
    old = whole.partition(b" ")[0].replace(b"kwindex-3", b"kwindex-1")
    file.write_bytes(old + b"\n" + whole.partition(b"\n")[2])
    assert parse_index(file.read_bytes()) is None
    assert open_source(str(data)).key(ROWS - 1) == f"{ROWS - 1:05d}"  # type: ignore[attr-defined]
    assert file.read_bytes() == whole


def test_blocks_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are asked for, and files are not left open."""
    monkeypatch.setattr("kiloword.data.tars.shards._BLOCKS", 2)
    monkeypatch.setattr("kiloword.data.tars.shards._OPEN", 3)
    data = many(tmp_path / "data", 9)
    source = TarSource("data", sorted(data.glob("*.tar")))
    assert {source.key(row) for row in range(0, len(source), 100)} <= {f"{n:05d}" for n in range(ROWS)}
    assert source._block.cache_info().currsize == 2
    assert len(opened_in(tmp_path)) <= 3


def test_few_files_may_be_open(tmp_path: Path) -> None:
    """Fewer are kept open; no sample is bad for it."""
    source = TarSource("data", sorted(many(tmp_path / "data", 150, 2).glob("*.tar")))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, hard))
    try:
        source = pickle.loads(pickle.dumps(source))
        assert captions(source) == [["0"], ["1"]] * 150
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
