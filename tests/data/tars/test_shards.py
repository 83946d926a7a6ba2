"""Tars: what is read, from where, and what happens to damaged ones."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
import tracemalloc
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiloword.data import edits as mixture
from kiloword.data.edits import mix, stored_row, stored_rows
from kiloword.data.inspect import check
from kiloword.data.sources.open import expand, open_source
from kiloword.data.tars import index as index_module
from kiloword.data.tars.index import open_index
from kiloword.data.tars.shards import TarSource
from kiloword.randomness import key as draw_key
from kiloword.types import BadSample, Record, Source
from tars import pairs, photo, write_tar


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


def reason(source: Source, row: int) -> str:
    with pytest.raises(BadSample) as caught:
        source.record(row)
    return str(caught.value)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations([f"{k}.{s}" for k in "abc" for s in ("jpg", "txt")]), folder=st.sampled_from(["", "d/e/"]))
def test_index_equals_tarfile(tmp_path: Path, order: list[str], folder: str) -> None:
    members = {folder + name: name.encode() * (i + 1) for i, name in enumerate(order)}
    tar = write_tar(tmp_path / "x.tar", members)
    source, expected = TarSource("x", [tar]), literal(tar)
    assert [source.key(row) for row in range(len(source))] == list(expected)
    for row, parts in enumerate(expected.values()):
        record = source.record(row)
        assert record.image == parts["jpg"]
        assert record.captions == [parts["txt"].decode()]


def test_real_shards_equal_tarfile(shared: Path) -> None:
    source = open_source(str(shared / "flickr8k" / "dev"))
    expected = literal(shared / "flickr8k" / "dev" / "0.tar")
    assert len(source) == len(expected) == 1000
    for row, (key, parts) in enumerate(expected.items()):
        record = source.record(row)
        assert (record.key, record.image) == (key, parts["webp"])
        assert record.captions == parts["txt"].decode().strip().split("\n")


def test_long_names_and_the_first_dot(tmp_path: Path) -> None:
    long = "é" * 150
    names = [f"{long}/a.jpg", f"{long}/a.txt", "b.jpg", "b.seg.png", "b.txt", "__skip__.jpg", ".hidden.jpg", "noext"]
    source = TarSource("x", [write_tar(tmp_path / "x.tar", [(n, n.encode()) for n in names])])
    assert [source.key(row) for row in range(len(source))] == [f"{long}/a", "b"]
    assert source.record(1).image == b"b.jpg"


def test_a_repeated_name_is_another_sample(tmp_path: Path) -> None:
    members = [("a.jpg", b"1"), ("a.txt", b"one"), ("a.jpg", b"2"), ("a.txt", b"two")]
    source = TarSource("x", [write_tar(tmp_path / "x.tar", members)])
    assert [source.record(row).captions for row in range(len(source))] == [["one"], ["two"]]
    assert [source.record(row).image for row in range(len(source))] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("text", "meta", "captions"),
    [
        (b"one\n\n two \r\n", None, ["one", "two"]),
        (b"text", {"captions": ["a", " ", "b"]}, ["a", "b"]),
        (b"text", {"caption": "from json", "url": "u"}, ["from json"]),
        (b"text", {"url": "u"}, ["text"]),
        (b"text", {"caption": None}, ["text"]),
        (b"\xef\xbb\xbfmark", None, ["mark"]),
        (b"x" * 100_000, None, ["x" * 100_000]),
    ],
)
def test_captions(tmp_path: Path, text: bytes, meta: dict[str, object] | None, captions: list[str]) -> None:
    members = {"a.png": photo(), "a.txt": text} | ({} if meta is None else {"a.json": json.dumps(meta).encode()})
    source = TarSource("x", [write_tar(tmp_path / "x.tar", members)])
    record = source.record(0)
    assert record.captions == captions == source.captions(0)
    assert record.info == {k: v for k, v in (meta or {}).items() if k == "url"}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"a.txt": b"t"}, "no image"),
        ({"a.png": b"", "a.txt": b"t"}, "the image has zero bytes"),
        ({"a.png": photo()}, "no caption"),
        ({"a.png": photo(), "a.txt": b" \n\n"}, "no caption"),
        ({"a.png": photo(), "a.txt": b"caf\xe9"}, "caption is not UTF-8"),
        ({"a.png": photo(), "a.json": b'{"caption": "\\ud800"}'}, "caption is not UTF-8"),
        ({"a.png": photo(), "a.json": b"{"}, "the json cannot be parsed"),
        ({"a.png": photo(), "a.json": b"[" * 100_000}, "the json cannot be parsed"),
        ({"a.png": photo(), "a.json": b"[1]"}, "the json is not an object with `captions` or `caption`"),
        ({"a.png": photo(), "a.json": b'{"captions": "x"}'}, "the captions of the json are not strings"),
        ({"a.png": photo(), "a.cls": b"-1"}, "class index is not a whole number: b'-1'"),
    ],
)
def test_bad_samples_have_reasons(tmp_path: Path, members: dict[str, bytes], expected: str) -> None:
    source = TarSource("x", [write_tar(tmp_path / "x.tar", members | {"good.png": photo(), "good.txt": b"t"})])
    assert reason(source, 0) == expected
    assert source.record(1).captions == ["t"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_a_cut_tar_gives_its_whole_samples(tmp_path: Path, share: float) -> None:
    whole = write_tar(tmp_path / "whole.tar", pairs(4))
    with tarfile.open(whole) as file:
        ends = [m.offset_data + m.size for m in file]
    cut = 512 + int(share * (ends[-1] + 1024 - 512))
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:cut])
    source = TarSource("x", [tmp_path / "cut.tar"])
    rows_end = -(-ends[-1] // 512) * 512
    assert bool(source.notes) == (cut < rows_end + 512)
    reasons = [bad.reason for bad in check(source)]
    assert len(source) - len(reasons) == sum(end <= cut for end in ends[1::2])
    assert len(reasons) <= 1
    assert all("the tar" in r for r in reasons)
    for row in range(len(source) - len(reasons)):
        assert source.record(row).captions == [f"image {row}"]


def test_damage_in_the_middle_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tar = write_tar(tmp_path / "x.tar", pairs(4))
    raw = bytearray(tar.read_bytes())
    with tarfile.open(tar) as file:
        third = file.getmembers()[4].offset
    raw[third : third + 512] = b"\xff" * 512
    tar.write_bytes(raw)
    source: Any = open_source(str(tar))
    assert len(source) == 2
    assert f"damaged at byte {third:,}" in source.notes[0]
    assert capsys.readouterr().err.count(f"damaged at byte {third:,}") == 1


@pytest.mark.parametrize("more", [bytes(1 << 21), b"a second tar"])
def test_what_stands_behind_the_end_is_reported(tmp_path: Path, more: bytes) -> None:
    tar = write_tar(tmp_path / "x.tar", pairs(2))
    assert not TarSource("x", [tar]).notes
    with tarfile.open(tar) as file:
        end = max(member.offset_data + 512 for member in file)
    tar.write_bytes(tar.read_bytes() + more)
    assert f"ended at byte {end:,}; what follows is not read" in TarSource("x", [tar]).notes[0]


def test_what_is_no_plain_tar_of_images(tmp_path: Path) -> None:
    for name, content in {
        "text.tar": b"hello" * 200,
        "zip.tar": b"\x1f\x8b\x08" + b"\0" * 600,
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a plain tar"):
            open_source(str(tmp_path / name))
    write_tar(tmp_path / "none.tar", {"a.txt": b"x"})
    with pytest.raises(ValueError, match=r"none.tar holds no images. Expected webdataset tars"):
        open_source(str(tmp_path / "none.tar"))


def test_index_is_made_once_and_only_while_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar, scans = write_tar(tmp_path / "x.tar", pairs(2)), []
    scan = index_module.scan
    monkeypatch.setattr(index_module, "scan", lambda path: scans.append(path) or scan(path))
    first = open_index(tar)
    second = open_index(tar)
    assert len(scans) == 1
    assert (first.header, first.table.tolist(), first.keys) == (second.header, second.table.tolist(), second.keys)
    os.utime(tar, ns=(1, 1))
    assert open_index(tar).header.digest == first.header.digest
    assert len(scans) == 2
    for damage in (b"", b"{}\n", (tmp_path / "x.tar.kwindex").read_bytes()[:-1]):
        (tmp_path / "x.tar.kwindex").write_bytes(damage)
        assert open_index(tar).keys == first.keys
    assert len(scans) == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.tar", "x.tar.kwindex"]


def test_read_only_folder_uses_the_cache_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_tar(folder / "0.tar", pairs(2))
    folder.chmod(0o555)
    try:
        assert len(open_source(str(folder))) == 2
        assert [p.name for p in folder.iterdir()] == ["0.tar"]
        assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".kwindex"]
        assert len(open_source(str(folder))) == 2
    finally:
        folder.chmod(0o755)


def test_no_place_for_the_index_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    write_tar(folder / "0.tar", pairs(1))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KILOWORD_CACHE", str(tmp_path / "file"))
    folder.chmod(0o555)
    try:
        with pytest.raises(ValueError, match="Set KILOWORD_CACHE to a folder with space"):
            open_source(str(folder))
    finally:
        folder.chmod(0o755)


def test_fingerprint_is_of_content_not_of_time_or_place(tmp_path: Path) -> None:
    write_tar(tmp_path / "a" / "0.tar", pairs(2))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "0.tar", ns=(1, 1))
    write_tar(tmp_path / "c" / "0.tar", pairs(2, first=1))
    a, b, c = (open_source(str(tmp_path / name)).fingerprint for name in "abc")
    assert a == b != c


def _read_all(source: Source) -> list[Record]:
    return [source.record(row) for row in range(len(source))]


def test_sources_travel_to_processes(tmp_path: Path) -> None:
    for shard in range(3):
        write_tar(tmp_path / f"{shard}.tar", pairs(4, first=4 * shard))
    source = open_source(str(tmp_path))
    here = _read_all(source)
    assert len(pickle.dumps(source)) < 2000
    with get_context("fork").Pool(2) as pool:  # children inherit the open files, and read at the same time
        assert all(there == here for there in pool.map(_read_all, [source] * 4))
    assert _read_all(pickle.loads(pickle.dumps(source))) == here


def test_what_src_may_be(tmp_path: Path) -> None:
    for shard in (0, 2, 10):
        write_tar(tmp_path / "data" / f"x-{shard:02d}.tar", pairs(1, first=shard))
        write_tar(tmp_path / "unpadded" / f"{shard}.tar", pairs(1, first=shard))
    write_tar(tmp_path / "data" / "inner" / "0.tar", pairs(9))
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.b.png"):
        (tmp_path / "photos" / name).write_bytes(photo())
        (tmp_path / "photos" / f"{name[:-4]}.txt").write_text(name)

    def keys(src: str) -> list[str]:
        source = open_source(str(tmp_path / src))
        assert isinstance(source, Source)
        assert source.name == str(tmp_path / src)
        return [source.record(row).key for row in range(len(source))]

    assert keys("data") == keys("unpadded") == ["0000", "0002", "0010"]
    assert keys("data/x-10.tar") == ["0010"]
    assert keys("unpadded/{2..2}.tar") == ["0002"]
    assert keys("photos") == ["a", "b.b"]
    assert expand("a{08..10}b{0..1}") == [f"a{i}b{j}" for i in ("08", "09", "10") for j in (0, 1)]


@pytest.mark.parametrize(
    ("src", "message"),
    [
        ("missing", "no such file or folder. Expected a folder of tars"),
        ("empty", "is an empty folder"),
        ("other", "is a folder without tars or images"),
        ("splits", "its folders dev, train do: name one of them"),
        ("other/x.doc", "unknown kind of file"),
        ("splits/dev/{0..2}.tar", "2 of 3 tars are missing, the first is .*1.tar"),
        ("splits/dev/{2..0}.tar", "is empty. Write the smaller number first"),
    ],
)
def test_src_that_is_no_data_set(tmp_path: Path, src: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.doc").write_text("x")
    for split in ("train", "dev"):
        write_tar(tmp_path / "splits" / split / "0.tar", pairs(1))
    with pytest.raises(ValueError, match=message):
        open_source(str(tmp_path / src))


def test_class_data_in_clip_benchmarks_layout(tmp_path: Path) -> None:
    write_tar(tmp_path / "test" / "0.tar", {"a.png": photo(), "a.cls": b"1\n", "b.png": photo(), "b.cls": b"0"})
    (tmp_path / "classnames.txt").write_text("cat\nred fox\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")
    for src in (tmp_path, tmp_path / "test"):
        source = open_source(str(src))
        assert isinstance(source, TarSource)
        assert (source.classnames, source.templates) == (["cat", "red fox"], ["a photo of a {c}."])
        assert source.labels.tolist() == [1, 0] == [source.record(row).label for row in range(2)]


def test_samples_without_a_class_have_label_minus_1(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {"a.png": photo(), "a.cls": b"2", "b.png": photo()})
    source = open_source(str(tmp_path / "0.tar"))
    assert source.labels.tolist() == [2, -1]  # type: ignore[attr-defined]


def test_rows_of_a_mixture_are_named_as_in_their_own_source() -> None:
    """By their number where a source names none."""

    class Bare:
        name, fingerprint = "bare", "f"

        def __len__(self) -> int:
            return 3

        def record(self, row: int) -> Record:
            return Record(str(row), b"", [])

    class Named(Bare):
        def key(self, row: int) -> str:
            return f"n{row}"

    both = mix([Bare(), Named()])
    assert sorted(both.key(row) for row in range(6)) == ["0", "1", "2", "n0", "n1", "n2"]  # type: ignore[attr-defined]


def test_what_a_tar_says_of_all_its_members_holds_for_each(tmp_path: Path) -> None:
    """A global pax header; a member's own header comes before it."""
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"path": "all.png"}) as tar:
        for name, own in (("a.png", {}), ("b.png", {"path": "own.png"})):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(photo()), own
            tar.addfile(info, io.BytesIO(photo()))
    source = open_source(str(tmp_path / "0.tar"))
    assert [source.key(row) for row in range(len(source))] == ["all", "own"]


@pytest.mark.parametrize(("names", "line"), [("", 1), ("cat\n\ndog\n", 2)])
def test_an_empty_class_name_moves_no_other(tmp_path: Path, names: str, line: int) -> None:
    write_tar(tmp_path / "test" / "0.tar", {"a.png": photo(), "a.cls": b"0"})
    (tmp_path / "classnames.txt").write_text("\ufeffcat\r\nred fox\r\n\n", encoding="utf-8", newline="")
    assert open_source(str(tmp_path)).classnames == ["cat", "red fox"]  # type: ignore[attr-defined]
    (tmp_path / "classnames.txt").write_text(names)
    with pytest.raises(ValueError, match=f"classnames.txt: line {line} is empty"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("share", [0.3, 0.97])
def test_the_part_of_a_mixture_is_that_of_a_permutation(share: float) -> None:
    """Written out; of many rows it takes little more than 4 bytes a row, and its own."""
    rows = 1_000_003
    source: Any = type("Many", (), {"fingerprint": "x", "__len__": lambda self: rows})()
    rng = np.random.Generator(np.random.Philox(draw_key("x", "part of a mixture")))
    permutation, count = rng.permutation(rows), round(share * rows)
    for epoch in (0, 1, 2, 5):
        expected = np.sort(permutation[(epoch * count + np.arange(count)) % rows])
        tracemalloc.start()
        part = mixture._part(source, share, epoch)
        assert tracemalloc.get_traced_memory()[1] < 4.1 * (rows + count)
        tracemalloc.stop()
        assert np.array_equal(part, expected)


def test_mixture_counts_every_row_as_its_weight_says(tmp_path: Path) -> None:
    sources = [open_source(str(write_tar(tmp_path / f"{i}.tar", pairs(10, first=100 * i)))) for i in range(2)]
    mixed = mix(sources, [2.0, 0.3])
    counts: dict[str, int] = {}
    for epoch in range(10):
        now = mixed.at(epoch)  # type: ignore[attr-defined]
        assert len(now) == len(mixed) == 23
        for row in range(len(now)):
            counts[now.record(row).key] = counts.get(now.record(row).key, 0) + 1
    assert counts == {f"{i:04d}": 20 for i in range(10)} | {f"{i:04d}": 3 for i in range(100, 110)}
    numbers = {(stored_row(now, r), now.record(r).key) for now in map(mixed.at, range(10)) for r in range(23)}  # type: ignore[attr-defined]
    assert sorted(numbers) == [(n, f"{n if n < 10 else 90 + n:04d}") for n in range(20)]
    assert stored_rows(mixed) == stored_rows(mix([mixed], [2.0])) == 20
    assert pickle.loads(pickle.dumps(mixed)).record(22) == mixed.record(22)
    assert mix(sources[:1]) is sources[0]
    for weights in ([1.0], [1.0, float("nan")], [1.0, -1.0], [1.0, 0.01]):
        with pytest.raises(ValueError, match="weight"):
            mix(sources, weights)
