"""Tars made by someone who means harm: nothing is extracted, no claim of a header costs memory or time."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counting import calls
from kiloword.data.inspect import check
from kiloword.data.tars.headers import Tar
from kiloword.data.tars.index import make_index, open_index, parse_index, scan, write_index
from kiloword.data.tars.shards import TarSource
from kiloword.types import BadSample
from tars import photo

EIB = 1 << 60


def header(name: bytes, size: int | bytes = 0, kind: bytes = b"0", **fields: bytes) -> bytes:
    """One block of a ustar header; a size of more than 8 GiB or below zero is written in base 256."""
    if isinstance(size, int):
        plain = 0 <= size < 8**11
        size = b"%011o\0" % size if plain else (size % (1 << 95) | (1 << 95)).to_bytes(12, "big")
    block = bytearray(512)
    block[: len(name[:100])] = name[:100]
    block[100:108], block[124:136], block[136:148] = b"0000644\0", size, b"00000000000\0"
    block[156:157], block[257:265] = kind, b"ustar\x0000"
    for place, content in fields.items():
        start = int(place.removeprefix("at"))
        block[start : start + len(content)] = content
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(body: bytes) -> bytes:
    return body + bytes(-len(body) % 512)


def member(name: bytes, body: bytes, **more: Any) -> bytes:
    return header(name, len(body), **more) + padded(body)


def pax(**records: bytes | str) -> bytes:
    """A pax header that speaks about the next member."""
    body = b""
    for key, value in records.items():
        raw = key.replace("__", ".").encode() + b"=" + (value.encode() if isinstance(value, str) else value) + b"\n"
        length = len(raw) + 2
        while length != len(b"%d " % length) + len(raw):
            length = len(b"%d " % length) + len(raw)
        body += b"%d " % length + raw
    return member(b"pax", body, kind=b"x")


GOOD = member(b"good.png", photo()) + member(b"good.txt", b"good")
END = bytes(1024)


def source_of(tmp_path: Path, raw: bytes) -> TarSource:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "x.tar").write_bytes(raw)
    return TarSource("x", [tmp_path / "data" / "x.tar"])


def outcome(source: TarSource, row: int) -> str:
    """The first caption, or the reason why there is none."""
    try:
        return source.record(row).captions[0]
    except BadSample as error:
        return str(error)


def outcomes(source: TarSource) -> dict[str, str]:
    return {source.key(row): outcome(source, row) for row in range(len(source))}


NAMES = [
    "../../../../tmp/evil",
    "/etc/evil",
    "a/../../evil",
    "C:\\evil",
    "nul\u202egnp",
    "x" * 4000,
    "😀/é",
]


def test_nothing_is_ever_extracted(tmp_path: Path) -> None:
    """Path tricks are only names; links and devices are no members."""
    raw = b""
    for name in NAMES:
        for suffix, body in ((".png", photo()), (".txt", b"a dog")):
            raw += pax(path=name + suffix) + member(b"short", body)
    for kind in b"123456":  # hard link, symbolic link, devices, folder, pipe
        link = header(b"link%c.jpg" % kind, 0, bytes([kind]), at157=b"/etc/passwd")
        raw += link + member(b"link%c.txt" % kind, b"x")
    before = set(tmp_path.parent.rglob("*")) | set(Path("/tmp").glob("evil*"))
    source = source_of(tmp_path, raw + header(b"folder.jpg/", 0, b"5") + GOOD + END)
    found = outcomes(source)
    assert {key: found[key] for key in [*NAMES, "good"]} == dict.fromkeys(NAMES, "a dog") | {"good": "good"}
    assert [key for key, said in found.items() if said == "no image"] == [f"link{c}" for c in "123456"]
    assert len(found) == len(NAMES) + 7
    new = (set(tmp_path.parent.rglob("*")) | set(Path("/tmp").glob("evil*"))) - before
    assert {path.relative_to(tmp_path).as_posix() for path in new} == {"data", "data/x.tar", "data/x.tar.kwindex"}
    assert not Path("/etc/evil.png").exists()


CLAIMS = {
    "image of 8 EiB": header(b"a.png", 8 * EIB),
    "image of 2^87 bytes": header(b"a.png", 1 << 87),
    "image of 8 EiB by pax": pax(size=str(10**18 - 1)) + header(b"a.png"),
    "image past the end": header(b"a.png", 1 << 20) + photo(),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_header_claims_costs_nothing(tmp_path: Path, name: str) -> None:
    tracemalloc.start()
    source = source_of(tmp_path, GOOD + CLAIMS[name])
    assert outcomes(source)["good"] == "good"
    assert outcomes(source)["a"].startswith("the tar ends in the middle of this sample")
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()
    assert "cut at byte" in source.notes[0]


HARM = {
    "negative size": header(b"a.png", -512),
    "a size that leads back to the beginning": header(b"a.png", -len(GOOD) - 512),
    "negative size of a pax header": header(b"pax", -512, b"x"),
    "pax header of 8 EiB": header(b"pax", 8 * EIB, b"x"),
    "long name of 8 EiB": header(b"././@LongLink", 8 * EIB, b"L"),
    "negative size by pax": pax(size="-512") + member(b"a.png", photo()),
    "no size by pax": pax(size="1e9") + member(b"a.png", photo()),
    "pax record of no length": member(b"pax", b"0 path=x\n", kind=b"x"),
    "pax record beyond its header": member(b"pax", b"99 path=x\n", kind=b"x"),
    "pax header of digits": member(b"pax", b"1" * 65536, kind=b"x"),
    "pax header without an equals sign": member(b"pax", b"9 " + b"x" * 65536, kind=b"x"),
    "size that is no number": header(b"a.png", b"0x000000000\0"),
    "size with a sign": header(b"a.png", b"-0000001000\0"),
    "noise": bytes(range(256)) * 2,
}


@pytest.mark.parametrize("name", HARM)
def test_damage_ends_the_tar_with_a_word(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.tar").write_bytes(GOOD + HARM[name] + GOOD + END)
    assert calls(lambda: scan(tmp_path / "x.tar")) < 5000
    source = source_of(tmp_path, GOOD + HARM[name] + GOOD + END)
    assert outcomes(source) == {"good": "good"}
    assert "damaged at byte" in source.notes[0]


def test_headers_that_say_nothing_end_too(tmp_path: Path) -> None:
    """10,000 pax headers in a row, an endless map of holes, headers cut by the end of the file."""
    assert outcomes(source_of(tmp_path, pax(comment="x") * 10_000 + GOOD + END)) == {"good": "good"}
    sparse = header(b"a.png", 512, b"S", at482=b"\1")
    assert outcomes(source_of(tmp_path, GOOD + sparse + b"\1" * 512 * 1000)) == {"good": "good"}
    for raw in (pax(path="x.png")[:512], header(b"././@LongLink", 600, b"L"), sparse):
        source = source_of(tmp_path, GOOD + raw)
        assert outcomes(source) == {"good": "good"}
        assert "cut at byte" in source.notes[0]


def test_files_with_holes_are_skipped(tmp_path: Path) -> None:
    """They do not lie in one piece."""
    old = header(b"old.png", 512, b"S") + bytes(512)
    new = pax(GNU__sparse__major="1", GNU__sparse__minor="0") + member(b"new.png", b"1\n0\n512\n".ljust(1024, b"\0"))
    assert outcomes(source_of(tmp_path, old + new + GOOD + END)) == {"good": "good"}


@pytest.mark.parametrize("blocks", range(4))
def test_the_map_of_an_old_sparse_file_is_skipped(tmp_path: Path, blocks: int) -> None:
    """Each block of it says whether another one follows; the size in the header counts none of them."""
    more = [b"\1"] * blocks + [b"\0"]
    extended = b"".join(bytes(504) + flag + bytes(7) for flag in more[1:])
    sparse = header(b"old.png", 512, b"S", at257=b"ustar  \0", at482=more[0], at483=b"%011o\0" % 512)
    raw = sparse + extended + b"\xff" * 512 + GOOD + END
    source = source_of(tmp_path, raw)
    assert outcomes(source) == {"good": "good"}
    assert [note.rpartition(": ")[2] for note in source.notes] == ["old.png"]
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        assert tar.getnames() == ["old.png", "good.png", "good.txt"]


def test_a_member_over_the_next_header(tmp_path: Path) -> None:
    """A size that swallows what follows hides it; what it then holds is data like any other."""
    swallowed = header(b"a.png", len(GOOD)) + GOOD
    assert list(outcomes(source_of(tmp_path, swallowed + GOOD + END))) == ["a", "good"]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    raw = member(b"\xff\xfe.png", photo()) + member(b"\xff\xfe.txt", b"bytes")
    raw += pax(path=b"\xed\xa0\x80.png") + member(b"x", photo()) + pax(path=b"\xed\xa0\x80.txt") + member(b"x", b"s")
    raw += member(b"new\nline.png", photo()) + member(b"new\nline.txt", b"line") + member(b".png", b"") + GOOD
    source = source_of(tmp_path, raw + END)
    keys = {key.encode("utf-8", "surrogateescape"): said for key, said in outcomes(source).items()}
    assert keys == {b"\xff\xfe": "bytes", b"\xed\xa0\x80": "s", b"new\nline": "line", b"good": "good"}


def test_compressed_tars_are_refused(tmp_path: Path) -> None:
    for mode in ("w:gz", "w:bz2", "w:xz"):
        with tarfile.open(tmp_path / "x.tar", mode) as tar:
            tar.addfile(tarfile.TarInfo("a.jpg"), io.BytesIO())
        with pytest.raises(ValueError, match="cannot be read as a plain tar"):
            scan(tmp_path / "x.tar")


def test_many_members_cost_little(tmp_path: Path) -> None:
    """10,000 empty images: some hundred bytes of memory a sample."""
    block = b"".join(header(b"%05d.png" % i) for i in range(1000))
    (tmp_path / "x.tar").write_bytes(block * 10 + END)
    tracemalloc.start()
    index = scan(tmp_path / "x.tar")
    assert tracemalloc.get_traced_memory()[1] < 10_000 * 1000
    tracemalloc.stop()
    assert index.header.samples == 10_000


@pytest.mark.parametrize("harm", ["offset", "size", "half", "key", "order", "longer"])
def test_an_index_made_on_purpose_is_made_again(tmp_path: Path, harm: str) -> None:
    """Its digest is right, but it names what cannot be."""
    tar = tmp_path / "x.tar"
    tar.write_bytes(GOOD * 2 + END)
    good = open_index(tar)
    table, keys = good.table.copy(), good.keys
    if harm == "longer":
        keys += b"x"
    else:
        column, value = {"offset": (0, EIB), "size": (1, -512), "half": (1, -1), "key": (8, -3), "order": (8, 9)}[harm]
        table[0, column] = value
    beside = tmp_path / "x.tar.kwindex"
    with beside.open("wb") as file:
        write_index(file, make_index(good.header, table, keys))
    assert parse_index(beside.read_bytes()) is None
    source = TarSource("x", [tar])  # by its header alone; the index is made again when a row is asked for
    bad = check(source)
    assert {one.reason for one in bad} <= {"x.tar is another file than when the run began"}
    assert len(bad) in (0, len(source))
    assert np.array_equal(open_index(tar).table, good.table)
    assert outcomes(TarSource("x", [tar])) == {"good": "good"}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]),
    members=st.lists(
        st.tuples(st.text(st.characters(exclude_characters="\0/"), min_size=1, max_size=120), st.binary(max_size=1500)),
        min_size=1,
        max_size=6,
    ),
)
def test_members_lie_where_tarfile_says(tmp_path: Path, kind: int, members: list[tuple[str, bytes]]) -> None:
    path = tmp_path / "x.tar"
    try:
        with tarfile.open(path, "w", format=kind) as tar:
            for name, body in members:
                info = tarfile.TarInfo(name)
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    except (ValueError, UnicodeError):  # ustar has no room for long names
        return
    with tarfile.open(path) as tar:
        expected = [(m.name, m.offset_data, m.size) for m in tar]
    found = Tar(path)
    assert [tuple(m) for m in found] == expected
    assert found.note == ""


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=8), cut=st.integers(0, 4096))
def test_any_damage_gives_members_or_a_sentence(tmp_path: Path, changes: list[tuple[int, int]], cut: int) -> None:
    raw = bytearray((pax(path="long.png") + GOOD + END)[: 4096 - cut])
    for place, value in changes:
        if place < len(raw):
            raw[place] = value
    try:
        outcomes(source_of(tmp_path, bytes(raw)))
    except ValueError as error:
        said = str(error)
        assert "x.tar cannot be read as a plain tar" in said or "x holds no images" in said
