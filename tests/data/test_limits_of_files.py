"""Limits on tables, at the limit and one above; files beside data, and where else."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kiloword.data import files
from kiloword.data.sources import embedded
from kiloword.data.sources.embedded import check_expanded
from kiloword.data.tars import catalogue
from kiloword.data.tars.shards import TarSource
from tars import pairs, write_tar


@pytest.mark.parametrize("column", ["text", "lists"])
def test_text_of_a_table_counts_as_it_expands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    """Ten times the same cell is stored once."""
    cells = ["x" * 1000] * 10 if column == "text" else [["x" * 600, "x" * 400]] * 10
    pq.write_table(pa.table({column: cells, "other": ["y" * 9999] * 10}), tmp_path / "x.parquet")
    monkeypatch.setattr(embedded, "MAX_TABLE", 10_000)
    check_expanded(tmp_path / "x.parquet", [column])
    monkeypatch.setattr(embedded, "MAX_TABLE", 9_999)
    with pytest.raises(ValueError, match=f"the columns {column} hold more than 9,999 bytes of text"):
        check_expanded(tmp_path / "x.parquet", [column])


def test_files_are_kept_beside_the_data_or_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, inside = tmp_path / "data" / "0.tar", tmp_path / "cache"
    data.parent.mkdir()
    data.write_bytes(b"x")
    beside, kept = data.with_name("0.tar.new"), Path(files.fallback(str(data), ".new", str(inside)))
    assert files.places(data, ".new") == [beside, kept]
    data.parent.chmod(0o555)
    try:
        assert files.places(data, ".new") == [kept]
        assert files.write(data, ".new", lambda file: None) == kept
        assert kept.read_bytes() == b""
    finally:
        data.parent.chmod(0o755)
    assert files.write(data, ".new", lambda file: (file.write(b"new"), None)[1]) == beside
    data.parent.chmod(0o555)
    try:
        assert files.places(data, ".new") == [beside, kept], "what lies there is read"
    finally:
        data.parent.chmod(0o755)

    def full(file: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        ValueError, match=rf"{beside}: No space left on device; {kept}: No space left .*Set KILOWORD_CACHE"
    ):
        files.write(data, ".new", full)
    assert beside.read_bytes() == b"new"
    monkeypatch.delenv("KILOWORD_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert files.folder() == Path("/home/somebody/.cache/kiloword")
    assert files.fallback("a/../0.tar", ".x", "/c") == files.fallback(os.path.abspath("0.tar"), ".x", "/c")


def test_a_catalogue_is_kept_from_its_least_number_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tars = [write_tar(tmp_path / f"{n}.tar", pairs(n + 1)) for n in range(3)]
    monkeypatch.setattr(catalogue, "LEAST", 4)
    first = TarSource("x", tars)
    assert not list((tmp_path / "cache").glob("*.kwcatalogue"))
    monkeypatch.setattr(catalogue, "LEAST", 3)
    for _ in range(2):
        again = TarSource("x", tars)
        assert (again.fingerprint, len(again), again._digests) == (first.fingerprint, 6, first._digests)
        (file,) = (tmp_path / "cache").glob("*.kwcatalogue")
    assert file.name.startswith(files.fallback(str(tars[0]), "", "").lstrip("/")[:24])
    entries = catalogue._read(file)
    assert [entry.header.samples for entry in entries.values()] == [1, 2, 3]
    assert all(entry.header.blocks == () for entry in entries.values())
    assert [entry.stamps[0] for entry in entries.values()] == [(t.stat().st_size, t.stat().st_mtime_ns) for t in tars]
    opened: list[Path] = []
    real = catalogue.open_header
    monkeypatch.setattr(catalogue, "open_header", lambda tar: (opened.append(tar), real(tar))[1])
    write_tar(tars[1], pairs(9))
    assert [header.samples for header in catalogue.headers(tars)] == [1, 9, 3]
    assert set(opened) == {tars[1]}
    opened.clear()
    assert [header.samples for header in catalogue.headers(tars)] == [1, 9, 3]
    assert opened == []
    raw = file.read_bytes()
    for wrong in (raw[:-1], b"", raw[1:], b"{}"):
        file.write_bytes(wrong)
        assert catalogue._read(file) == {}
    assert [header.samples for header in catalogue.headers(tars[::-1])] == [3, 9, 1]
    assert np.array_equal(TarSource("x", tars)._ends, [1, 10, 13])
