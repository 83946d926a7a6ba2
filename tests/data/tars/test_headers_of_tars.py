"""Headers of tars and of indexes, field by field: what is a number, a name, an end, a table that can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kiloword.addresses import Address
from kiloword.data.remote import sets as remote
from kiloword.data.remote.config import RemoteConfig
from kiloword.data.sources.open import open_source
from kiloword.data.tars import headers as tar
from kiloword.data.tars.headers import Damage, Tar, _blocks, _is_header, _pax_records, _pax_size, number
from kiloword.data.tars.index import (
    BLOCK,
    COLUMNS,
    Header,
    Index,
    _parse_line,
    header_file,
    make_index,
    open_file,
    open_header,
    open_index,
    parse_index,
    write_index,
)
from servers import Server
from tars import pairs, photo, write_tar


def test_numbers_of_headers() -> None:
    for raw, value in (
        (b"0000017\0", 15), (b" 17 \0junk", 15), (b"17 ", 15), (b"\0\0", 0), (b"   ", 0), (b"\x80\0\x01\x02", 258),
    ):  # fmt: skip
        assert number(raw) == value
    for raw in (b"18", b"-1", b"1 7", b"\xff\xff", b"\x81\0", b"0x1"):
        with pytest.raises(Damage):
            number(raw)
    assert [_blocks(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_records_of_pax_headers() -> None:
    assert list(_pax_records(b"12 path=a/b\n10 size=7\n13 mtime=1.5\n\0\0")) == [(b"path", b"a/b"), (b"size", b"7")]
    assert list(_pax_records(b"22 GNU.sparse.major=1\n")) == [(b"GNU.sparse", b"")]
    assert list(_pax_records(b"")) == []
    broken = (
        b"11 path=a/b\n",
        b"13 path=a/b\n",
        b"path=a\n",
        b"7 path=\n",
        b"12 path=a/b\r",
        b"99 path=a\n",
        b"8 path=x",
    )
    for wrong in broken:
        with pytest.raises(Damage):
            list(_pax_records(wrong))
    assert (_pax_size({}, 7), _pax_size({b"size": b"9" * 18}, 7)) == (7, int("9" * 18))
    for wrong in (b"", b"-1", b"9" * 19, b"1.0"):
        with pytest.raises(Damage):
            _pax_size({b"size": wrong}, 7)


def test_checksums_of_headers_are_of_unsigned_or_signed_bytes(tmp_path: Path) -> None:
    plain = b"\xfc" + write_tar(tmp_path / "0.tar", {"a.png": photo()}).read_bytes()[1:512]
    rest = plain[:148] + b" " * 8 + plain[156:]
    block = rest[:148] + b"%06o\0 " % sum(rest) + rest[156:]
    assert _is_header(block)
    assert not _is_header(block[:-1])
    assert not _is_header(bytes(512))
    assert not _is_header(block[:100] + b"x" + block[101:])
    assert not _is_header(block[:148] + b"rubbish!" + block[156:])
    signed = sum(byte - 256 * (byte > 127) for byte in rest)
    assert sum(rest) != signed
    assert _is_header(block[:148] + b"%06o\0 " % signed + block[156:])


@pytest.mark.parametrize(
    ("end", "note"),
    [
        (b"", "cut at byte 1,024"),
        (bytes(511), "cut at byte 1,535"),
        (bytes(512), ""),
        (bytes(1023) + b"x", "ended at byte 1,024; what follows is not read"),
        (b"x" * 512, "damaged at byte 1,024; what follows is not read"),
        (bytes(512 + 99), ""),
        (bytes(512 + 100), "ended at byte 1,024; what follows is not read"),
    ],
)
def test_ends_of_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes, note: str) -> None:
    monkeypatch.setattr(tar, "_PADDING", 100)
    path = write_tar(tmp_path / "0.tar", {"a.png": b"image"})
    path.write_bytes(path.read_bytes()[:1024] + end)
    found = Tar(path)
    assert [(member.name, member.offset, member.size) for member in found] == [("a.png", 512, 5)]
    assert found.note == note


@pytest.mark.parametrize("raw", [b"x" * 512, b"x"])
def test_what_does_not_begin_as_a_tar(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "0.tar").write_bytes(raw)
    with pytest.raises(ValueError, match="does not begin"):
        list(Tar(tmp_path / "0.tar"))
    (tmp_path / "0.tar").write_bytes(bytes(1024))
    empty = Tar(tmp_path / "0.tar")
    assert (list(empty), empty.note) == ([], "")


def small() -> Index:
    """Two samples in a tar of 1000 bytes."""
    table = np.full((2, COLUMNS), -1, np.int64)
    table[:, 0], table[:, 1], table[:, -1] = (100, 990), (5, 10), (1, 3)
    return make_index(Header(size=1000, mtime_ns=1, samples=2, digest=""), table, b"abc")


def test_tables_that_can_be() -> None:
    index = small()
    assert index.is_possible()
    for row, column, value, possible in (
        (1, 1, 1001, True),  # a member may go past the end by what was cut
        (1, 1, 1002, False),
        (0, 0, -2, False),
        (0, 0, -1, False),  # a size without a place
        (0, 2, 0, False),  # a place without a size
        (0, -1, 2, True),
        (0, -1, 4, False),
        (0, -1, -1, False),
        (1, -1, 2, False),
    ):
        table = index.table.copy()
        table[row, column] = value
        assert replace(index, table=table).is_possible() == possible, (row, column, value)
    assert not replace(index, keys=b"abcd").is_possible()


def test_header_lines(tmp_path: Path) -> None:
    index = small()
    with (tmp_path / "x").open("wb") as file:
        write_index(file, index)
    raw = (tmp_path / "x").read_bytes()
    line, _, body = raw.partition(b"\n")
    text, _, digest = line.rpartition(b" ")
    assert _parse_line(line) == index.header
    for wrong in (text, text + b" " + digest[:-1], b"", b"{}", text.replace(b"1000", b"-1.5")):
        assert _parse_line(wrong) is None
    assert parse_index(raw) is not None
    for wrong in (raw[:-1], raw + b"x", body, b"", line + b"\n", text + b"\n" + body):
        assert parse_index(wrong) is None
    (tmp_path / "x").write_bytes(raw[:-1])
    assert header_file(tmp_path / "x") is header_file(tmp_path / "none") is None
    assert header_file(tmp_path) is None, "a folder in its place"


@pytest.mark.parametrize("samples", [1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_blocks_begin_where_the_one_before_ended(tmp_path: Path, samples: int) -> None:
    table = np.full((samples, COLUMNS), 1, np.int64)
    keys = [b"%d" % n * (n % 3) for n in range(samples)]
    table[:, -1] = np.cumsum([len(key) for key in keys])
    with (tmp_path / "x").open("wb") as file:
        write_index(file, make_index(Header(size=9, mtime_ns=1, samples=samples, digest=""), table, b"".join(keys)))
    found = open_file(tmp_path / "x")
    assert found is not None
    assert len(found.header.blocks) == -(-samples // BLOCK)
    blocks: list[Any] = [found.block(n) for n in range(len(found.header.blocks))]
    assert [len(block.table) for block in blocks] == [min(BLOCK, samples - at) for at in range(0, samples, BLOCK)]
    assert [block.key(row).encode() for block in blocks for row in range(len(block.table))] == keys


def test_an_index_is_made_again_when_the_tar_has_changed_or_lacks_what_is_asked(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", pairs(3))
    assert open_header(path).contents == ""
    with_digest = open_index(path, digest=True)
    assert len(with_digest.header.contents) == 32
    assert open_header(path) == open_index(path).header == with_digest.header
    write_tar(path, pairs(4))
    assert len(open_header(path).contents) == 32, "one that had a digest gets one again"
    assert (open_header(path).samples, open_header(path).size) == (4, path.stat().st_size)


def test_lists_beside_remote_tars_or_one_folder_higher() -> None:
    files = {"set/test/0.tar": b"", "set/names.txt": b"cat\n dog \n", "set/test/own.txt": b"a\n", "top.txt": b"b\n"}
    with Server(files) as server:
        address, config = Address(f"{server.url}/set/test/0.tar"), RemoteConfig(retries=0)
        assert remote._lines(address, config, "own.txt") == ["a"]
        assert remote._lines(address, config, "names.txt") == ["cat", "dog"]
        assert remote._lines(address, config, "top.txt") is None
        top = Address(f"{server.url}/0.tar")
        assert remote._lines(top, config, "top.txt") == ["b"], "there is no folder above the host"
        assert server.asked["http:/top.txt"] == 0


def test_checksums_beside_remote_tars(tmp_path: Path) -> None:
    sums = f"{'A' * 64} *0.tar\n{'b' * 64}  ./1.tar\n{'c' * 63}  2.tar\nnonsense\n".encode()
    files = {f"{n}.tar": write_tar(tmp_path / f"{n}.tar", pairs(1)).read_bytes() for n in range(3)}
    with Server(files | {"SHA256SUMS": sums}) as server:
        config = RemoteConfig(retries=0)
        tars = [remote.open_remote_file(f"{server.url}/{n}.tar", config) for n in range(3)]
        found = [one.info.checksum for one in remote._with_sums(tars, config)]
    assert [one and (one.algorithm, one.value) for one in found] == [("sha256", "a" * 64), ("sha256", "b" * 64), None]


@pytest.mark.parametrize(
    ("src", "said"),
    [
        ("https://host/a.zip", "unknown kind of data"),
        ("https://host/folder", "unknown kind of data"),
        ("https://host/folder/", "http has no folders. Expected a brace pattern, such as https://host/folder/{00000"),
        ("memory://nothing/x.txt", "unknown kind of data"),
    ],
)
def test_urls_that_name_no_data_set(src: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("{", r"\{")):
        open_source(src)
