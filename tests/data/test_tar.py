"""Tars: which members are samples, what their parts are read as, what is damaged, and when a tar is read again."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import tarfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kiloword.data.inspect import main, stats
from kiloword.data.open import open_source
from kiloword.data.reading import captions_of
from kiloword.data.sample import MAX_CAPTION
from kiloword.data.tar import natural
from kiloword.types import BadSample, LabelSet, NoCaption
from sources import records
from tars import pairs, photo, write_tar

INDEX = "kiloword-index.arrow"


def opened(tmp_path: Path, members: list[tuple[str, bytes]] | dict[str, bytes] | bytes) -> Any:
    """A source of one tar with these members, or bytes."""
    path = write_tar(tmp_path / "data" / "x.tar", {} if isinstance(members, bytes) else members)
    if isinstance(members, bytes):
        path.write_bytes(members)
    return open_source(str(path))


def outcomes(source: Any) -> dict[str, str]:
    """Key -> the first caption, or the reason why there is none."""
    bad = {one.row: one.reason for one in stats(source, decoded=True).bad}
    return {source.key(row): bad.get(row) or source.captions(row)[0] for row in range(len(source))}


def literal(tar: Path) -> dict[str, dict[str, bytes]]:
    """Every sample as `tarfile` extracts it, key -> suffix -> bytes."""
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tar) as file:
        for member in file:
            key, suffix = member.name.split(".", 1)
            content = file.extractfile(member)
            assert content is not None
            samples.setdefault(key, {})[suffix] = content.read()
    return samples


@settings(max_examples=25)
@given(
    order=st.permutations([f"{k}.{s}" for k in "abc" for s in ("jpg", "txt")]),
    folder=st.sampled_from(["", "d/e/", f"{'é' * 150}/"]),
    kind=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_samples_are_those_of_tarfile(tmp_path: Path, order: list[str], folder: str, kind: int) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=kind) as tar:
        for i, name in enumerate(order):
            info, content = tarfile.TarInfo(folder + name), name.encode() * (i + 1)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    expected = {key: (parts["jpg"], [parts["txt"].decode()]) for key, parts in literal(path).items()}
    assert {r.key: (r.image, r.captions) for r in records(open_source(str(path)))} == expected


def test_what_belongs_to_no_sample_is_left(tmp_path: Path) -> None:
    names = ["a.jpg", "a.PNG", "d/a.webp", "__d/a.jpg", ".a.jpg", "jpg", "a.md", "a.JSON", "b.txt"]
    members = [(name, b"{}" if name.endswith("JSON") else name.encode()) for name in names]
    source = opened(tmp_path, [*members, ("\udcff.png", photo()), ("\udcff.txt", b"ff"), ("old", b""), ("c.txt", b"")])
    assert outcomes(source) == dict.fromkeys(("a", "d/a", "__d/a"), "no caption") | {
        "b": "no image", "\udcff": "ff", "c": "no image"
    }  # fmt: skip
    with pytest.raises(BadSample) as caught:
        source.record(0)
    assert caught.value.record.image == b"a.jpg"  # type: ignore[attr-defined]  # of two images the first counts
    for row in (-1, 6):
        with pytest.raises(IndexError):
            source.key(row)


def test_a_repeated_name_is_another_sample(tmp_path: Path) -> None:
    source = opened(tmp_path, [("a.jpg", b"1"), ("a.txt", b"one"), ("a.jpg", b"2"), ("a.txt", b"two")])
    assert [(record.image, record.captions) for record in records(source)] == [(b"1", ["one"]), (b"2", ["two"])]


def asks(**more: Any) -> bytes:
    return json.dumps({"question": "is it red?", **more}).encode()


NOT_UTF8, NOT_PARSED, NO_STRINGS = "caption is not UTF-8", "the json cannot be parsed", "are not strings"
NO_OBJECT, NO_QUESTION, NO_ANSWER = "the json is not an object", "the question is not text", "a question without an"
WRONG_CLASSES = [b"", b"-1", b"1.0", b"9" * 19, b"[1, -2]", b"[1, true]", b'["a"]', b"1 2", b"[1e3]", b"[[1]]"]
PARTS: list[tuple[str, bytes, Any]] = [  # the suffix of a file beside an image: its captions, or a part of the reason
    ("txt", b"one\n\n two \r\n", ["one", "two"]),
    ("txt", b"a\0b", ["a\0b"]),
    ("txt", b"\xef\xbb\xbfmark", ["mark"]),
    ("txt", b"\xff\xfea\0", NOT_UTF8),
    ("txt", b"caf\xe9", NOT_UTF8),
    ("txt", "👩‍👩‍👧‍👦 ".encode(), ["👩‍👩‍👧‍👦"]),
    ("txt", "\u00a0\u2003\u3000".encode(), "no caption"),
    ("txt", b" \r\n\t\v\f\n", "no caption"),
    ("txt", b"", "no caption"),
    ("txt", b"a\r\nb\rc\nd", ["a", "b\rc", "d"]),
    ("txt", b"x" * (MAX_CAPTION + 1), "1,000,001"),
    ("json", b"[" * 100_000, NOT_PARSED),
    ("json", b'{"caption": "x", "a": NaN, "b": Infinity, "c": -1e999}', ["x"]),
    ("json", b'{"caption": "x", "n": ' + b"9" * 5000 + b"}", NOT_PARSED),
    ("json", b'{"caption": "\\ud800"}', NOT_UTF8),
    ("json", b'{"captions": ["\\ud83d\\ude00", " ", "b"]}', ["😀", "b"]),
    ("json", b'{"caption": 3}', NO_STRINGS),
    ("json", b'{"captions": [null]}', NO_STRINGS),
    ("json", b'{"captions": []}', "no caption"),
    ("json", b'\xef\xbb\xbf{"caption": "mark"}', ["mark"]),
    ("json", b'{"caption": "x"} trailing', NOT_PARSED),
    ("json", b'"x"', NO_OBJECT),
    ("json", b"", NOT_PARSED),
    ("json", b'{"question": ["x"], "answers": ["a"]}', NO_QUESTION),
    ("json", b'{"question": 5, "answer": "yes"}', NO_QUESTION),
    ("json", asks(), NO_ANSWER),
    ("json", asks(answers=["", " "]), NO_ANSWER),
    ("json", asks(answers=[3]), NO_STRINGS),
    ("json", asks(answers=[{"text": "yes"}]), NO_STRINGS),
    ("json", asks(answers=["yes", "no "]), ["yes", "no"]),
    ("json", asks(answers=[{"answer": "yes", "answer_id": 1}, {"answer": ""}]), ["yes"]),
    ("json", asks(answer="yes", caption="red"), ["yes"]),
    ("json", asks(captions=["a red star"]), ["a red star"]),
    *(("cls", raw, "class") for raw in (*WRONG_CLASSES, b"[" * 9999)),
]


@pytest.mark.parametrize("kind", ["tar", "folder"])
def test_what_lies_beside_an_image(tmp_path: Path, kind: str) -> None:
    members = {f"{n:02}.{suffix}": raw for n, (suffix, raw, _) in enumerate(PARTS)}
    members |= {f"{n:02}.png": photo() for n in range(len(PARTS))} | {"13.txt": b"no matter"}
    if kind == "tar":
        source = opened(tmp_path, dict(sorted(members.items())))
    else:
        (tmp_path / "data").mkdir()
        for name, content in members.items():
            (tmp_path / "data" / name).write_bytes(content)
        source = open_source(str(tmp_path / "data"))
    for row, (_, raw, expected) in enumerate(PARTS):
        if isinstance(expected, list):
            assert source.record(row).captions == source.captions(row) == expected, raw
        else:
            with pytest.raises(BadSample, match=expected):
                source.record(row)


def vector(values: Any, dtype: str = "int64") -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(values, dtype), allow_pickle=True)
    return out.getvalue()


OTHER = [vector([[0, 1]]), vector([0, 2]), vector([0, 1])[:-1], vector([0])[:30], vector(["a"], "U1"), b"\x93NUMPY"]
LABELS: list[tuple[dict[str, bytes], Any, dict[str, Any]]] = [  # beside an image: its label, and the rest
    ({"cls": b"0"}, 0, {}),
    ({"cls": b" 12\n"}, 12, {}),
    ({"cls": b"9" * 18}, 10**18 - 1, {}),
    ({"cls": b"[2, 0]"}, LabelSet((0, 2)), {}),
    ({"cls": b"3", "json": b'{"caption": "x", "region": "Asia"}'}, 3, {"region": "Asia"}),
    ({"json": asks(answers=["a"])}, None, {"question": "is it red?", "answers": ["a"]}),
    ({"npy": vector([0, 1, 1])}, LabelSet((1, 2), 3), {}),
    ({"npy": vector([1, 0]), "json": b'{"region": "x"}', "cls": b"1"}, 1, {"region": "x"}),
    ({"npy": vector([3, 0]), "cls": b"1"}, 1, {"npy": [3, 0]}),  # a group, as in DataComp's Dollar Street and FMoW
    ({"npy": vector([2.0, 0.5], "float32"), "cls": b"1"}, 1, {"npy": [2, 0.5]}),
    ({"npy": vector([0.5] * 65, "float32"), "cls": b"1"}, 1, {}),  # an embedding
    ({"npy": vector([[1]]), "cls": b"1"}, 1, {}),
    *(({"npy": raw, "txt": b"x"}, None, {}) for raw in (*OTHER, vector([{"a": Path()}], "object"))),
]


def test_labels_arrays_and_the_rest_of_the_json(tmp_path: Path) -> None:
    members = {f"{n:02}.{name}": raw for n, (parts, *_) in enumerate(LABELS) for name, raw in parts.items()}
    images = {f"{n:02}.png": photo() for n in range(len(LABELS))}
    source = opened(tmp_path, dict(sorted((members | images).items())) | {"lone.npy": vector([1, 0, 0])})
    found = records(source)
    assert [(record.label, record.info) for record in found] == [(label, info) for _, label, info in LABELS]
    assert source.labels.tolist() == [label if isinstance(label, int) else -1 for _, label, _ in LABELS]
    assert [source.info(row).get("question") for row in (4, 5)] == [None, "is it red?"]
    assert list(captions_of(source))[:3] == ["x", "a", "is it red?"], "a tokenizer learns questions, too"


@settings(max_examples=25)
@given(share=st.floats(0, 1))
def test_a_cut_tar_gives_its_whole_samples(tmp_path: Path, share: float) -> None:
    whole = write_tar(tmp_path / "whole.tar", pairs(4))
    with tarfile.open(whole) as file:
        ends = [m.offset_data + m.size for m in file]
    cut = 512 + int(share * (ends[-1] + 1024 - 512))
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:cut])
    source: Any = open_source(str(tmp_path / "cut.tar"))
    rows_end = -(-ends[-1] // 512) * 512
    assert any(f" of {cut:,}: " in note for note in source.notes) == (cut < rows_end + 512)
    reasons = [bad.reason for bad in stats(source, decoded=True).bad]
    whole_samples = sum(end <= cut for end in ends[1::2])
    assert (len(source) - len(reasons), len(reasons) <= 1) == (whole_samples, True)
    assert [source.captions(row) for row in range(whole_samples)] == [[f"image {row}"] for row in range(whole_samples)]
    if reasons == ["no caption"]:  # its image is whole
        with pytest.raises(NoCaption):
            source.record(len(source) - 1)


def header(name: bytes, size: int = 0, kind: bytes = b"0") -> bytes:
    """One block of a ustar header; a negative size, or one of more than 8 GiB, is written in base 256."""
    field = b"%011o\0" % size if 0 <= size < 8**11 else (size % (1 << 95) | (1 << 95)).to_bytes(12, "big")
    block = bytearray(512)
    block[: len(name)], block[100:108], block[124:136], block[136:148] = name, b"0000644\0", field, b"00000000000\0"
    block[156:157], block[257:265], block[148:156] = kind, b"ustar\x0000", b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: bytes, body: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(body), kind) + body + bytes(-len(body) % 512)


SPARSE = header(b"old.png", 512, b"S") + bytes(512)
GOOD = member(b"good.png", photo()) + member(b"good.txt", b"good")
END = bytes(1024)
DAMAGED = {
    "noise": GOOD + SPARSE + bytes(range(256)) * 2 + GOOD + END,
    "a size that leads back": GOOD + header(b"a.png", -len(GOOD) - 512) + GOOD + END,
    "a pax header of 8 EiB": GOOD + header(b"pax", 8 << 60, b"x") + GOOD + END,
    "an image of 8 EiB": GOOD + header(b"a.png", 8 << 60),
    "half a pax header": GOOD + header(b"pax", 600, b"x"),
    "zeros behind the end": GOOD + END + bytes(1 << 21),
    "a second tar": GOOD + END + GOOD + END,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_ends_the_tar_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    source = opened(tmp_path, DAMAGED[kind])
    assert outcomes(source)["good"] == "good"
    assert re.search(r"x\.tar: .* byte [\d,]+ ", source.notes[0])
    if kind in ("noise", "a second tar"):
        assert f"byte {len(GOOD) + (kind == 'noise') * len(SPARSE):,} " in source.notes[0]
    assert capsys.readouterr().err.count(source.notes[0]) == 1
    assert main("index", str(tmp_path / "data/x.tar")) == 1


# The rows of a set


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for n in range(5):
        write_tar(tmp_path / "data" / f"{n}.tar", pairs(n + 1, first=100 * n))
    return tmp_path / "data"


def said(data: Path) -> Any:
    source: Any = open_source(str(data))
    return source.fingerprint, source.notes, outcomes(source)


CHANGES: list[Callable[[Path], object]] = [
    lambda tar: os.truncate(tar, 2000),
    lambda tar: write_tar(tar, pairs(5, first=900)),
    lambda tar: tar.unlink(),
    lambda tar: write_tar(tar.with_name("10.tar"), pairs(2, first=1000)),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("beside", [False, True])
def test_tars_that_have_changed_are_read_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], beside: bool
) -> None:
    before = said(data)
    if beside:
        main("index", str(data))
        shutil.rmtree(tmp_path / "cache")
    change(data / "3.tar")
    after = said(data)
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "another"))
    (data / INDEX).unlink(missing_ok=True)
    assert said(data) == after != before


def test_a_damaged_cache_is_made_again(tmp_path: Path, data: Path) -> None:
    before = said(data)
    for left in (0, 100):
        for path in (tmp_path / "cache/rows").iterdir():
            os.truncate(path, left)
        assert said(data) == said(data) == before


def test_the_cache_forgets_what_nobody_has_used(tmp_path: Path, data: Path) -> None:
    """After 90 days; what a killed process left, after one."""
    ages = {"a.arrow": 100, "b.arrow": 80, "c.kw.tmp": 2, "d.kw.tmp": 0}
    (tmp_path / "cache/rows").mkdir(parents=True)
    for name, days in ages.items():
        (tmp_path / "cache/rows" / name).touch()
        os.utime(tmp_path / "cache/rows" / name, times=(time.time() - days * 86400,) * 2)
    said(data)
    assert {path.name for path in (tmp_path / "cache/rows").iterdir()} & {*ages} == {"b.arrow", "d.kw.tmp"}


def test_sources_travel_to_processes_which_may_open_them_too(data: Path) -> None:
    with get_context("fork").Pool(4) as pool:
        first = pool.map(records, [str(data)] * 8)  # nothing is kept yet
        source = open_source(str(data))
        assert len(pickle.dumps(source)) < 2000
        assert first == pool.map(records, [source] * 8) == [records(source)] * 8


def test_an_index_for_others(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is used where the tars lie as they lay when it was made; a part of the set takes its rows from it."""
    expected = records(str(data))
    (tmp_path / "file").write_text("")
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:  # where no cache can be written, with the index and without
            patch.setenv("KILOWORD_CACHE", str(tmp_path / "file"))
            assert records(str(data)) == expected
        assert main("index", str(data)) == 0
    assert str(data / INDEX) in capsys.readouterr().out
    shutil.copytree(data, tmp_path / "moved", copy_function=shutil.copy2)
    assert records(str(tmp_path / "moved")) == expected
    assert records(f"{tmp_path}/moved/{{1..2}}.tar") == expected[1:6]
    assert main("index", "scenes?n=3") == 0
    assert "nothing to index" in capsys.readouterr().out


def test_numbers_in_names_count() -> None:
    names = ["9", "10", "2" * 5000, "a", "a9", "a9b", "a10", "b2", "x²", "x٢"]
    assert sorted(set(names), key=natural) == names
